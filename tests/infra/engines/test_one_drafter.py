"""Driver of an engine with one drafter: windows are followed, what is refused or away is not taken for something else."""

import fcntl
import itertools
import os
import shutil
import threading
import time

import pytest

from paceline.contracts import DesiredState, EngineFacts, Group, window_name
from paceline.errors import ConfigError, DrafterMismatchError, EngineAwayError
from paceline.infra.engines import one_drafter
from paceline.infra.engines.one_drafter import Looked, OneDrafterDriver, hold
from paceline.infra.engines.windows import served_now
from paceline.machine import ManualClock

WINDOW_S = 10.0


class Engine:
    """Holds a version; `calls` are (version, group, whether weights were loaded)."""

    def __init__(self) -> None:
        self.label, self.calls, self.refused, self.is_away = ("", ""), [], set(), False
        self.is_training, self.checked, self.odd = False, [], None

    def check(self, folder) -> None:
        self.checked.append(folder.name)
        if folder.name in self.refused:
            raise DrafterMismatchError(f"{folder.name} does not fit")

    def publish(self, staged, version, group) -> float:
        if version in self.refused:
            raise DrafterMismatchError(f"{version} was refused")
        if self.odd is not None:
            raise self.odd
        self.calls.append((version, group, staged is not None))
        self.label = (group, version)
        return 0.0 if staged is None else 12.0

    def look(self) -> Looked:
        if self.is_away:
            raise EngineAwayError("away")
        return Looked({"code": 1.0}, self.label)

    def tell_training(self, is_training) -> None:
        self.is_training = is_training


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def make_driver(engine, drafters, tmp_path):
    facts = EngineFacts(
        kind="sglang", draft_shape="chain", max_draft_tokens=5, group_unit="time", window_s=WINDOW_S, timing="request",
        has_features=False,
    )  # fmt: skip

    def make(replica_id):
        folder = tmp_path / "exported" / replica_id
        return OneDrafterDriver(
            engine=engine, facts=facts, replica_id=replica_id, folder=folder, target=str(drafters.target),
            registry=drafters.registry, clock=ManualClock(), held=hold(folder),
        )  # fmt: skip

    return make


@pytest.fixture
def driver(make_driver):
    return make_driver("r")


def go_live(driver, drafters, version, **fields):
    values = {"gen": 1, "version": version, "first_version": drafters.first, "holdback_percent": 0, **fields}
    driver.desired_changed(DesiredState(**values))
    assert driver.stage(version)
    return driver.publish(version)


def test_each_window_has_the_drafter_that_was_drawn_for_it(driver, engine, drafters):
    go_live(driver, drafters, drafters.other, holdback_percent=40)
    served = []
    for _ in range(30):
        driver.follow_window()
        served.append(engine.label)
        driver.clock.advance(WINDOW_S)
    wanted = [served_now(driver._desired, {}, window_name("r", WINDOW_S * i, WINDOW_S)) for i in range(30)]
    assert served == wanted
    assert len(set(served)) == 2
    changes = 1 + sum(a != b for a, b in itertools.pairwise(served))
    assert len(engine.calls) <= changes + 1, "nothing is loaded where nothing changes"


def test_the_first_drafter_as_the_live_one_changes_its_group_without_a_load(driver, engine, drafters):
    assert go_live(driver, drafters, drafters.first, holdback_percent=100) == 12.0
    driver.follow_window()
    assert engine.calls == [(drafters.first, "adaptive", True), (drafters.first, "static", False)]


def test_a_version_that_is_refused_in_its_window_is_reported_and_the_live_one_goes_on(driver, engine, drafters):
    go_live(driver, drafters, drafters.first, canary_version=drafters.other, canary_percent=100)
    assert driver.stage(drafters.other)
    engine.refused.add(drafters.other)
    with pytest.raises(DrafterMismatchError):
        driver.follow_window()
    assert "was refused" in driver.failures()[drafters.other]
    driver.follow_window()
    assert engine.label == (Group.ADAPTIVE, drafters.first)


def test_what_cannot_be_loaded_is_not_staged(driver, engine, drafters):
    engine.refused.add(drafters.other)
    with pytest.raises(DrafterMismatchError, match="does not fit"):
        driver.stage(drafters.other)
    engine.refused.clear()
    assert driver.stage(drafters.other), "it is written anew"


def test_what_replicas_that_are_gone_have_written_is_deleted(make_driver, engine, drafters, tmp_path):
    gone, lives, again = make_driver("gone"), make_driver("lives"), make_driver("again")
    for driver in (gone, lives, again):
        assert driver.stage(drafters.first)
    engine.refused.add(drafters.other)
    with pytest.raises(DrafterMismatchError):
        again.stage(drafters.other)
    gone.stop()
    again.stop()
    again = make_driver("again")
    engine.refused.clear()
    assert make_driver("new").stage(drafters.other) and again.stage(drafters.broken)
    left = {str(path.parent.relative_to(tmp_path / "exported")) for path in tmp_path.glob("exported/*/*/config.json")}
    assert left == {f"lives/{drafters.first}", f"new/{drafters.other}", f"again/{drafters.broken}"}


def test_a_second_process_that_drives_a_replica_is_told_so(make_driver, drafters):
    first = make_driver("same")
    with pytest.raises(ConfigError, match="another one drives same"):
        make_driver("same")
    first.stop()
    assert make_driver("same").stage(drafters.first)


def test_no_version_is_blamed_for_an_engine_that_is_away(driver, engine, drafters):
    go_live(driver, drafters, drafters.first)
    engine.is_away = True
    with pytest.raises(EngineAwayError):
        driver.follow_window()
    assert driver.failures() == {}
    assert not driver.stage(drafters.other), "tried again later"
    engine.is_away = False
    driver.follow_window()
    assert driver.stage(drafters.other)


def test_an_engine_that_lost_its_version_gets_it_again(driver, engine, drafters):
    go_live(driver, drafters, drafters.other)
    engine.label = ("", "")
    driver.follow_window()
    assert engine.calls == [(drafters.other, "adaptive", True)] * 2
    assert driver.versions() == {"draft": drafters.other}


def test_a_live_version_that_is_refused_is_asked_for_again_in_the_next_window(driver, engine, drafters):
    engine.refused.add(drafters.other)
    engine.check = lambda folder: None  # refused by its weights alone
    with pytest.raises(DrafterMismatchError):
        go_live(driver, drafters, drafters.other)
    assert "was refused" in driver.failures()[drafters.other] and driver.live_version == ""
    go_live(driver, drafters, drafters.first)
    engine.label, engine.refused = ("", ""), {drafters.first}
    with pytest.raises(DrafterMismatchError):
        driver.follow_window()
    engine.refused.clear()
    driver.follow_window()
    assert engine.calls == [(drafters.first, "adaptive", True)], "not at every look: each stops the engine's steps"
    driver.clock.advance(WINDOW_S)
    driver.follow_window()
    assert engine.calls == [(drafters.first, "adaptive", True)] * 2 and drafters.first not in driver.failures()


def test_a_first_drafter_that_does_not_fit_is_written_once_and_the_live_one_serves(driver, engine, drafters):
    engine.refused.add(drafters.first)
    go_live(driver, drafters, drafters.other, holdback_percent=100)
    for _ in range(3):
        driver.follow_window()
    assert engine.checked == [drafters.other, drafters.first]
    assert engine.label == (Group.ADAPTIVE, drafters.other)
    assert "does not fit" in driver.failures()[drafters.first]


@pytest.mark.parametrize("odd", [EngineAwayError("away"), ConfigError("another key")])
def test_an_engine_that_does_not_take_a_version_now_is_away(driver, engine, drafters, odd):
    engine.odd = odd
    with pytest.raises(EngineAwayError):
        go_live(driver, drafters, drafters.other)
    assert driver.failures() == {}
    engine.odd = None
    assert driver.publish(drafters.other) == 12.0


def test_an_exchange_that_the_engine_does_not_end_is_not_begun_at_every_look(driver, engine, drafters):
    go_live(driver, drafters, drafters.other, holdback_percent=100)
    assert driver.stage(drafters.first)
    tries, publish = [], engine.publish
    engine.publish = lambda *args: tries.append(args) or publish(*args)
    engine.odd = EngineAwayError("504")
    with pytest.raises(EngineAwayError):
        driver.follow_window()
    for _ in range(5):
        driver.follow_window()
    assert len(tries) == 1 and driver.failures() == {}
    engine.odd, driver._retry_at = None, 0.0
    driver.follow_window()
    assert engine.label == (Group.STATIC, drafters.first)


def test_a_file_that_was_tidied_up_is_written_again(driver, engine, drafters):
    go_live(driver, drafters, drafters.other)
    engine.label, engine.odd = ("", ""), FileNotFoundError("no such file")
    with pytest.raises(FileNotFoundError):
        driver.follow_window()
    assert driver.failures() == {}
    engine.odd = None
    driver.follow_window()
    assert engine.label == (Group.ADAPTIVE, drafters.other)


def test_one_refusal_of_the_first_drafter_does_not_end_the_comparison(driver, engine, drafters):
    go_live(driver, drafters, drafters.other, holdback_percent=100)
    assert driver.stage(drafters.first)
    engine.refused.add(drafters.first)
    with pytest.raises(DrafterMismatchError):
        driver.follow_window()
    driver.follow_window()
    assert engine.label == (Group.ADAPTIVE, drafters.other), "for the rest of the window"
    engine.refused.clear()
    driver.clock.advance(WINDOW_S)
    driver.follow_window()
    assert engine.label == (Group.STATIC, drafters.first) and driver.failures() == {}


def test_a_canary_that_is_ordered_again_is_not_refused_for_what_happened_to_the_trial_before(driver, engine, drafters):
    go_live(driver, drafters, drafters.first)
    assert driver.stage(drafters.other)
    driver.set_canary(drafters.other, 50, "")
    driver._failures[drafters.other] = "out of memory"
    driver.set_canary("", 0, "")
    assert drafters.other in driver.failures()
    driver.set_canary(drafters.other, 50, "")
    assert driver.failures() == {}


def test_pauses_between_windows_are_told(driver, engine, drafters):
    told = []
    driver.on_pause = told.append
    go_live(driver, drafters, drafters.other, holdback_percent=100)
    driver.follow_window()
    driver.follow_window()
    assert told == [12.0] and engine.label == (Group.STATIC, drafters.first)


def test_an_end_leaves_the_live_version_not_what_the_window_tried(driver, engine, drafters):
    go_live(driver, drafters, drafters.other, holdback_percent=100)
    driver.follow_window()
    assert engine.label == (Group.STATIC, drafters.first)
    driver.stop()
    assert engine.label == (Group.ADAPTIVE, drafters.other)


def test_an_end_waits_for_a_publication_and_none_begins_after_it(driver, engine, drafters):
    go_live(driver, drafters, drafters.other)
    assert driver.stage(drafters.first)
    begun, may_end, publish = threading.Event(), threading.Event(), engine.publish

    def slow(*args):
        begun.set()
        assert may_end.wait(30)
        return publish(*args)

    engine.publish = slow
    publishing = threading.Thread(target=driver.publish, args=(drafters.first,), daemon=True)
    publishing.start()
    assert begun.wait(30)
    ending = threading.Thread(target=driver.stop, daemon=True)
    ending.start()
    ending.join(0.3)
    assert ending.is_alive(), "what is half done stays so once its agent is gone"
    may_end.set()
    ending.join(30)
    assert not ending.is_alive()
    assert engine.calls[-1][0] == drafters.first
    with pytest.raises(EngineAwayError, match="its agent ends"):
        driver.publish(drafters.other)
    assert engine.calls[-1][0] == drafters.first


def test_a_folder_that_another_one_looked_at_for_a_moment_is_held_all_the_same(tmp_path, monkeypatch):
    """One that begins deletes what nobody holds: between this one's opening and its lock that may be its own folder."""
    folder = tmp_path / "all" / "a"
    folder.mkdir(parents=True)
    looking = (folder / "held").open("ab")
    fcntl.flock(looking, fcntl.LOCK_EX)

    def tidy_up() -> None:
        time.sleep(0.3)
        shutil.rmtree(folder)
        looking.close()

    thread = threading.Thread(target=tidy_up)
    thread.start()
    held = hold(folder)
    thread.join()
    assert os.path.samestat(os.fstat(held.fileno()), (folder / "held").stat())
    monkeypatch.setattr(one_drafter, "_TRY_S", 0.2)
    with pytest.raises(ConfigError, match="one process's"):
        hold(folder)
    held.close()
