"""Versions of classes in the drafter slots: who gets which, what is resident, what goes, and what never does."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from paceline.contracts import Group, is_canary
from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.slots import LOAD_SHARE, DrafterSlots, Pin, delta_name
from tests.helpers.scripted_drafters import WeightDrafter


def state(value: float, size: int = 3) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((size,), value)}


def make_slots(num_class_slots: int = 2, **kwargs) -> DrafterSlots:
    """The slots; loading takes no time unless there is a timer."""
    kwargs = {"timer": lambda: 0.0, **kwargs}
    return DrafterSlots(WeightDrafter(1.0), "v1", spawn=WeightDrafter, num_class_slots=num_class_slots, **kwargs)


def load(slots: DrafterSlots, version: str) -> bool:
    return slots.load(version, lambda: state(float(version[1:])))


def ask(slots: DrafterSlots, bucket: str) -> str:
    """The version that a request of a class is given, which ends at once."""
    slot, version, *_ = slots.pin(Group.ADAPTIVE, "r", bucket)
    slots.unpin(slot)
    return version


def test_a_class_has_its_own_version_once_it_is_resident_and_the_live_one_meanwhile():
    slots = make_slots()
    slots.route({"math": "v2", "code": "v3"})
    assert [ask(slots, b) for b in ("math", "code", "chat", "")] == ["v1"] * 4
    assert load(slots, "v2")
    assert [ask(slots, b) for b in ("math", "code", "chat", "")] == ["v2", "v1", "v1", "v1"]
    assert slots.served() == {"math": "v2"} and slots.live_version == "v1"
    held = slots.pin(Group.ADAPTIVE, "r", "math")
    slots.route({"code": "v3"})
    assert ask(slots, "math") == "v1" and slots.versions()[held[0]] == "v2", "a request keeps what it was given"
    assert slots.pin(Group.STATIC, "r", "code")[1] == "v1" and slots.pin(Group.PLAIN, "r", "code") == (None, "", -1)


def test_what_most_requests_ask_for_in_vain_is_wanted_first():
    slots = make_slots()
    slots.route({"math": "v2", "code": "v3", "chat": "v4"})
    for bucket, number in (("math", 1), ("code", 3), ("chat", 2)):
        for _ in range(number):
            ask(slots, bucket)
    assert slots.missing() == ["v3", "v4", "v2"]
    load(slots, "v3")
    assert slots.missing() == ["v4", "v2"]


def test_the_version_whose_classes_were_asked_for_the_longest_ago_goes():
    slots = make_slots()
    slots.route({"math": "v2", "code": "v3", "chat": "v4"})
    assert load(slots, "v2") and load(slots, "v3")
    assert not load(slots, "v4"), "nobody has asked for it"
    ask(slots, "math"), ask(slots, "code"), ask(slots, "chat")
    assert load(slots, "v4")
    assert slots.served() == {"code": "v3", "chat": "v4"} and slots.missing() == ["v2"]
    ask(slots, "code")
    assert not load(slots, "v2"), "it was asked for before the others were"
    ask(slots, "math")
    assert load(slots, "v2") and slots.served() == {"code": "v3", "math": "v2"}


def test_classes_that_take_each_others_slots_have_weights_loaded_a_small_share_of_the_time():
    clock = [0.0]

    def read() -> dict[str, torch.Tensor]:
        clock[0] += 1.0
        return state(2.0)

    slots = make_slots(1, timer=lambda: clock[0])
    slots.route({"math": "v2", "code": "v3", "law": "v4"})
    num_loads, rng = 0, random.Random(0)
    for _ in range(4000):
        clock[0] += 0.05
        ask(slots, rng.choice(("math", "code", "law")))
        num_loads += any(slots.load(version, read) for version in slots.missing())
    assert 5 < num_loads <= 1 + LOAD_SHARE * clock[0]


def test_a_pinned_version_stays_whoever_asks():
    slots = make_slots(1)
    slots.route({"math": "v2", "code": "v3"})
    load(slots, "v2")
    slot, *_ = slots.pin(Group.ADAPTIVE, "r", "math")
    ask(slots, "code")
    assert not load(slots, "v3") and slots.versions()[slot] == "v2"
    slots.unpin(slot)
    assert load(slots, "v3") and ask(slots, "math") == "v1"


def test_requests_that_come_while_weights_are_read_keep_their_slot():
    slots = make_slots(1)
    slots.route({"math": "v2", "code": "v3"})
    load(slots, "v2")
    ask(slots, "code")
    pins = []

    def read():
        pins.append(slots.pin(Group.ADAPTIVE, "r", "math"))
        return state(3.0)

    assert not slots.load("v3", read)
    assert slots.versions()[pins[0][0]] == "v2" and float(slots.drafter(pins[0][0]).weight[0]) == 2.0


def test_classes_that_fill_their_slots_under_load_do_not_keep_the_next_live_version_out():
    slots = make_slots()
    slots.route({"math": "v2", "code": "v3", "chat": "v4"})
    for version in ("v2", "v3"):
        load(slots, version)
    pins = [slots.pin(Group.ADAPTIVE, "r", b) for b in ("math", "code", "chat")]
    assert slots.stage("v5", state(5.0))
    slots.set_canary("v5", 50)
    assert not load(slots, "v4")
    assert slots.stage("v5", {})
    slots.publish("v5")
    assert [pin.version for pin in pins] == ["v2", "v3", "v1"]
    assert [ask(slots, b) for b in ("math", "code", "chat")] == ["v2", "v3", "v5"]


def test_a_live_version_that_classes_keep_when_another_goes_live_takes_one_of_their_slots():
    """Else three versions of classes would be pinned for ever, and nothing could be staged."""
    slots = make_slots()
    slots.route({"math": "v2", "code": "v3", "chat": "v1"})
    load(slots, "v2"), load(slots, "v3")
    assert ask(slots, "math") == "v2" and ask(slots, "code") == "v3" and ask(slots, "chat") == "v1"
    slots.stage("v5", state(5.0))
    slots.publish("v5")
    assert slots.served() == {"code": "v3", "chat": "v1"}, "the two that were asked for last"
    for bucket in ("code", "chat"):
        slots.pin(Group.ADAPTIVE, "r", bucket)
    assert slots.stage("v6", state(6.0)), "nothing new is pinned to the third"


def test_a_class_takes_no_room_for_what_is_live_or_first():
    slots = make_slots(0, first=WeightDrafter(1.0))
    slots.route({"math": "v1", "code": "v2"})
    assert ask(slots, "math") == "v1" and slots.missing() == ["v2"]
    slots.stage("v2", state(2.0))
    slots.publish("v2")
    assert slots.missing() == [] and slots.served() == {"math": "v1", "code": "v2"}
    slots.stage("v3", state(3.0)), slots.publish("v3")
    slots.stage("v4", state(4.0)), slots.publish("v4")
    assert slots.pin(Group.ADAPTIVE, "r", "math") == ("first", "v1", -1) and ask(slots, "code") == "v4"
    assert not load(slots, "v2"), "no slot is for classes here"


def test_a_version_that_fails_leaves_its_classes_to_the_live_one():
    slots = make_slots()
    slots.route({"math": "v2"})
    load(slots, "v2")
    slot, *_ = slots.pin(Group.ADAPTIVE, "r", "math")
    slots.mark_failed(slot, "NaN")
    assert ask(slots, "math") == "v1" and slots.failures() == {"v2": "NaN"} and slots.served() == {}
    slots.mark_failed(slots.live_slot, "NaN")
    slots.route({"math": "v3"})
    load(slots, "v3")
    assert ask(slots, "math") == "v3" and ask(slots, "code") == "", "classes with a version of their own still draft"


@pytest.mark.parametrize("bad", [state(float("nan")), state(1.0, size=4)])
def test_bad_weights_of_a_class_are_refused_and_the_slot_is_used_again(bad):
    slots = make_slots(1)
    slots.route({"math": "v2"})
    with pytest.raises(DrafterMismatchError):
        slots.load("v2", lambda: bad)
    assert ask(slots, "math") == "v1" and load(slots, "v2") and ask(slots, "math") == "v2"


def test_weights_that_cannot_be_read_leave_what_is_resident():
    slots = make_slots(1)
    slots.route({"math": "v2", "code": "v3"})
    load(slots, "v2")
    ask(slots, "code")

    def read():
        raise FileNotFoundError("v3")

    with pytest.raises(FileNotFoundError):
        slots.load("v3", read)
    assert ask(slots, "math") == "v2" and slots.failures() == {}


def test_a_canary_is_tried_on_its_class_alone_or_on_what_the_live_version_serves():
    slots = make_slots()
    slots.route({"math": "v2"})
    load(slots, "v2")
    own = next(f"r{k}" for k in range(100) if is_canary(f"r{k}", "v3", 50))
    slots.stage("v3", state(3.0))
    slots.set_canary("v3", 50)
    assert [slots.pin(Group.ADAPTIVE, own, b)[1] for b in ("math", "code")] == ["v2", "v3"]
    slots.set_canary("v3", 50, "math")
    assert [slots.pin(Group.ADAPTIVE, own, b)[1] for b in ("math", "code")] == ["v3", "v1"]
    with pytest.raises(DrafterMismatchError, match="canary"):
        slots.set_canary("v2", 50, "math")
    slots.set_canary("", 0)
    assert [slots.pin(Group.ADAPTIVE, own, b)[1] for b in ("math", "code")] == ["v2", "v1"]


def test_every_slot_counts_in_the_bytes_of_a_row_and_has_its_drafter_before_graphs_are_made():
    slots = make_slots(3, first=WeightDrafter(1.0))
    slots.alloc(7)
    assert slots.kv_row_bytes == 60
    prepared = slots.prepare_all()
    assert list(prepared) == ["A", "B", "C", "D", "E", "first"] and {d.num_pool_rows for d in prepared.values()} == {7}
    slots.route({"math": "v2"})
    load(slots, "v2")
    assert any(slots.drafter(name) is prepared[name] for name in "BCDE"), "captured addresses stay valid"


def delta_slots(num_deltas: int = 2, **kwargs) -> DrafterSlots:
    return make_slots(0, first=WeightDrafter(1.0, num_deltas), **kwargs)


def test_deltas_of_the_first_version_are_served_beside_it_in_one_slot():
    slots = delta_slots()
    slots.route({"math": "v2", "code": "v3"})
    assert slots.takes_delta("v1") and not slots.takes_delta("v2") and not make_slots().takes_delta("v1")
    assert slots.missing() == ["v2", "v3"] and load_delta(slots, "v2") and load_delta(slots, "v3")
    assert slots.served() == {"math": "v2", "code": "v3"} and slots.missing() == []
    pins = {b: slots.pin(Group.ADAPTIVE, "r", b) for b in ("math", "code", "chat")}
    assert pins == {"math": ("first", "v2", 0), "code": ("first", "v3", 1), "chat": ("first", "v1", -1)}
    assert slots.pin(Group.STATIC, "r", "math") == ("first", "v1", -1), "the hold-back keeps the first version"
    assert {"first": "v1", "first+0": "v2", "first+1": "v3"}.items() <= slots.versions().items()


def test_a_delta_gives_its_place_to_one_that_is_asked_for_since_and_never_under_a_request():
    slots = delta_slots(1)
    slots.route({"math": "v2", "code": "v3"})
    ask(slots, "math")
    load_delta(slots, "v2")
    held = slots.pin(Group.ADAPTIVE, "r", "math")
    ask(slots, "code")
    assert not load_delta(slots, "v3"), "a request drafts with it"
    slots.unpin(held.slot, held.delta)
    assert load_delta(slots, "v3") and slots.served() == {"code": "v3"}
    assert not load_delta(slots, "v2"), "nobody has asked since"


def test_a_delta_that_does_not_fit_takes_no_others_place_and_is_wanted_still():
    slots = delta_slots(1)
    slots.route({"math": "v2", "code": "v3"})
    assert load_delta(slots, "v2")
    ask(slots, "code")
    with pytest.raises(DrafterMismatchError):
        slots.load_delta("v3", lambda: {"added": -1.0})
    assert slots.missing() == ["v3"] and slots.served() == {"math": "v2"} and load_delta(slots, "v3")


def test_a_failed_delta_stops_alone_and_its_place_takes_the_next_one():
    slots = delta_slots(1)
    slots.route({"math": "v2", "code": "v3"})
    load_delta(slots, "v2")
    held = slots.pin(Group.ADAPTIVE, "r", "math")
    slots.mark_failed("first", "test", held.delta)
    assert slots.drafter(held.slot, held.delta) is None and slots.drafter("first") is not None
    assert slots.failures() == {"v2": "test"} and slots.served() == {} and ask(slots, "math") == "v1"
    assert not load_delta(slots, "v3"), "a request is pinned to the place"
    slots.unpin(held.slot, held.delta)
    assert load_delta(slots, "v3") and slots.failures() == {} and slots.served() == {"code": "v3"}


def test_a_version_that_another_slot_drafts_with_is_no_failure():
    slots = delta_slots()
    slots.mark_failed("first", "test")
    assert slots.failures() == {} and slots.pin(Group.ADAPTIVE) == ("A", "v1", -1)
    slots.mark_failed("A", "test")
    assert slots.failures() == {"v1": "test"}


def test_a_version_whose_slot_was_given_up_is_served_as_a_delta():
    slots = delta_slots()
    slots.route({"math": "v2"})
    slots.stage("v2", state(2.0)), slots.publish("v2"), slots.stage("v1", {}), slots.publish("v1")
    assert slots.served() == {} and slots.missing() == ["v2"], "there is no slot for classes"
    assert load_delta(slots, "v2") and slots.served() == {"math": "v2"} and slots.missing() == []
    assert slots.pin(Group.ADAPTIVE, "r", "math") == ("first", "v2", 0)


def test_a_failed_first_drafter_takes_its_deltas_with_it():
    slots = delta_slots()
    slots.route({"math": "v2"})
    load_delta(slots, "v2")
    slots.mark_failed("first", "test")
    assert slots.served() == {} and not slots.takes_delta("v1") and slots.missing() == ["v2"]
    assert slots.pin(Group.ADAPTIVE, "r", "math") == ("A", "v1", -1)


def test_a_place_whose_delta_nobody_wants_goes_first():
    slots = delta_slots(2)
    slots.route({"math": "v2", "code": "v3"})
    load_delta(slots, "v2"), load_delta(slots, "v3")
    slots.route({"code": "v3", "chat": "v4"})
    assert load_delta(slots, "v4") and slots.served() == {"code": "v3", "chat": "v4"}


OPERATIONS = ["pin", "unpin", "stage", "publish", "canary", "off", "fail", "route", "load", "load", "missing"]
BUCKETS = ("math", "code", "chat", "law")


def load_delta(slots: DrafterSlots, version: str) -> bool:
    return slots.load_delta(version, lambda: {"added": float(version[1:])})


@pytest.mark.parametrize("num_deltas", [0, 2])
@pytest.mark.parametrize("num_class_slots", range(4))
@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_leaves_pinned_weights_alone_and_the_live_version_room(num_deltas, num_class_slots, seed):
    """Where there is room for deltas, every second version is one."""
    rng = random.Random(seed)
    operations = [(rng.choice(OPERATIONS), rng.randrange(1000)) for _ in range(150)]
    slots = make_slots(num_class_slots, first=WeightDrafter(1.0, num_deltas))
    pins: list[Pin] = []
    number = 1
    for name, value in operations:
        if name == "pin":
            group = Group.STATIC if value % 7 == 0 else Group.ADAPTIVE
            pins.append(slots.pin(group, f"r{value}", (*BUCKETS, "")[value % 5]))
        elif name == "unpin" and pins:
            pin = pins.pop(value % len(pins))
            slots.unpin(pin.slot, pin.delta)
        elif name == "stage":
            number += 1
            version = f"v{number if value % 2 else value % number + 1}"
            slots.stage(version, state(float(version[1:])))
        elif name == "publish" and slots._staged is not None:
            slots.publish()
        elif name == "canary" and slots._staged is not None:
            with contextlib.suppress(DrafterMismatchError):  # it failed, or serves there already
                slots.set_canary(slots._slots[slots._staged].version, value % 91, (*BUCKETS, "")[value % 5])
        elif name == "off":
            slots.set_canary("", 0)
        elif name == "fail" and value % 4 == 0:
            names = [n for n, s in slots._slots.items() if s.drafter is not None]
            slots.mark_failed(names[value % len(names)], "test")
        elif name == "route":
            slots.route(
                {b: f"v{(value // 7 + i * value) % (number + 2) + 1}" for i, b in enumerate(BUCKETS[: value % 5])}
            )
        elif name == "load":
            wanted = slots.missing()
            if wanted:
                version = wanted[value % len(wanted)]
                is_delta = int(version[1:]) % 2 == 0 and slots.takes_delta("v1")
                (load_delta if is_delta else load)(slots, version)
        held = slots.versions()
        for slot, version, delta in pins:
            drafter = slots.drafter(slot)
            assert slot is None or held[slot if delta < 0 else delta_name(delta)] == version
            if drafter is not None:
                own = drafter.weight[0] if delta < 0 else drafter.deltas[delta]
                assert float(own) == float(version[1:]), "what a request is pinned to was overwritten"
                assert delta < 0 or held[slot] == "v1", "a delta adds to the first one's weights"
        assert sum(slots.num_pins().values()) == sum((pin.slot is not None) + (pin.delta >= 0) for pin in pins)
        assert len(held) <= 3 + num_class_slots + num_deltas
        routes = slots._routes
        for bucket, version in slots.served().items():
            slot, delta = slots._served[bucket]
            assert routes[bucket] == version == held[slot if delta < 0 else delta_name(delta)]
            assert not slots._slots[slot].failure
        own = {n for n, _ in slots._served.values() if n not in ("first", slots._live, slots._staged, slots._canary)}
        assert len(own) <= num_class_slots, "classes are given more slots than are theirs"
    for pin in pins:
        slots.unpin(pin.slot, pin.delta)
    assert not any(slots.num_pins().values())
    slots.set_canary("", 0)
    assert slots.stage("v999", state(999.0)), "an idle engine can always take the next live version"
    slots.publish("v999")
    assert slots.pin(Group.ADAPTIVE)[1] == "v999"
