"""Windows of time as units: their requests are pooled, counted once, and what judges trials and books savings sees one of each."""

import math

import msgspec
import numpy as np

from paceline.bandit.beliefs.observation import close
from paceline.bandit.beliefs.observation import fold as fold_windows
from paceline.bandit.canary import CanaryTest
from paceline.config import RolloutConfig
from paceline.contracts import DesiredState, EngineFacts, Group, is_canary, window_name
from paceline.infra.controller.feedback import WindowUnits
from paceline.infra.controller.rollout import RolloutState, close_quiet, fold
from paceline.infra.engines.windows import served_now
from tests.helpers.feedback import trial_batch, trial_row

WINDOW_S = 10.0
FACTS = EngineFacts(
    kind="vllm", draft_shape="chain", max_draft_tokens=5, group_unit="time", window_s=WINDOW_S, timing="round", has_features=True
)  # fmt: skip


def pooled(units, *rows):
    return units.pooled(trial_batch(*rows), FACTS)


def test_engines_that_draw_by_request_keep_their_requests():
    batch = trial_batch(trial_row("r1", "v"), trial_row("r2", "v"))
    assert WindowUnits().pooled(batch, None) is batch
    by_request = EngineFacts(
        kind="paceline",
        draft_shape="tree",
        max_draft_tokens=16,
        group_unit="request",
        timing="round",
        has_features=True,
    )
    assert WindowUnits().pooled(batch, by_request) is batch


def test_requests_of_a_window_are_one_unit_with_their_sums():
    rows = [trial_row("r1", "v", 1, ts=12.0), trial_row("r1", "v", 2, ts=12.5), trial_row("r2", "v", 1, ts=13.0)]
    (before,), (cell,) = trial_batch(*rows).cells, pooled(WindowUnits(), *rows).cells
    assert list(cell.requests) == [window_name("a", 12.0, WINDOW_S)]
    (whole,), parts = cell.requests.values(), before.requests.values()
    assert (whole.num_rounds, whole.num_run, whole.first_ts) == (3, 3, 12.0)
    for field in ("seconds", "num_tokens", "kept", "drafted_rounds", "batch_sum"):
        assert getattr(whole, field) == sum(getattr(p, field) for p in parts), field
    assert cell.sizes == before.sizes


def test_a_window_begins_once_and_plain_or_asked_rows_stay_requests():
    units = WindowUnits()
    (first,) = pooled(units, trial_row("r1", "v", 1, ts=12.0)).cells
    (second,) = pooled(units, trial_row("r2", "v", 1, ts=14.0)).cells
    (third,) = pooled(units, trial_row("r3", "v", 1, ts=21.0)).cells
    starts = [next(iter(c.requests.values())).first_ts for c in (first, second, third)]
    assert starts == [12.0, None, 21.0]
    for group in ("plain", "asked"):
        (cell,) = pooled(units, trial_row("r4", "", 1, group=group, ts=22.0)).cells
        assert list(cell.requests) == ["r4"]


def test_a_canary_by_time_is_judged_by_its_windows():
    """The draw of a window is the hash that the trial checks, so no window is left out, and each counts once."""
    units, state = WindowUnits(), RolloutState()
    config = RolloutConfig(canary_percent=50, quiet_s=1.0)
    canary = state.begin("new", "old", config, now=0.0, decision_id=1, bucket="math", arm="full")
    tried = 0
    for window in range(40):
        begin = window * WINDOW_S
        is_tried = is_canary(window_name("a", begin, WINDOW_S), "new", 50)
        tried += is_tried
        version, ms = ("new", 5.0) if is_tried else ("old", 10.0)
        for i in range(3):
            row = trial_row(f"r{window}-{i}", version, 1, ms=ms, ts=begin + 1.0 + 2 * i)
            fold(canary, units.pooled(trial_batch(row), FACTS).cells, begin + 2.0 * i)
        close_quiet(canary, config, begin + WINDOW_S)
    assert canary.num_excluded == 0
    assert canary.test.num_requests == (40 - tried, tried)
    assert canary.test.ratio() > 1.5


def test_rows_of_another_drafter_than_the_windows_are_left_out():
    units, state = WindowUnits(), RolloutState()
    canary = state.begin(
        "new", "old", RolloutConfig(canary_percent=50), now=0.0, decision_id=1, bucket="math", arm="full"
    )
    begin = next(w * WINDOW_S for w in range(99) if is_canary(window_name("a", w * WINDOW_S, WINDOW_S), "new", 50))
    fold(canary, units.pooled(trial_batch(trial_row("r", "old", 1, ts=begin + 1.0)), FACTS).cells, begin)
    assert canary.num_excluded == 1 and not canary.open


def test_rows_that_come_late_begin_no_window_again():
    """An engine that tells of whole requests sends the rows of a long one behind those of windows that began later."""
    units, state = WindowUnits(), RolloutState()
    config = RolloutConfig(canary_percent=50, quiet_s=1.0)
    canary = state.begin("new", "old", config, now=0.0, decision_id=1, bucket="math", arm="full")
    begins = [w * WINDOW_S for w in range(99) if not is_canary(window_name("a", w * WINDOW_S, WINDOW_S), "new", 50)]
    early, later = begins[0], begins[1]
    for name, ts in (("r1", early), ("r2", later), ("long", early), ("r3", later)):
        fold(canary, units.pooled(trial_batch(trial_row(name, "old", 1, ts=ts + 1.0)), FACTS).cells, later)
        close_quiet(canary, config, later + 5.0)
    assert canary.test.num_requests == (2, 0)


def test_a_window_without_traffic_for_a_while_is_one_unit_until_its_end():
    units, state = WindowUnits(), RolloutState()
    config = RolloutConfig(canary_percent=50, quiet_s=1.0)
    canary = state.begin("new", "old", config, now=0.0, decision_id=1, bucket="math", arm="full")
    begin = next(w * WINDOW_S for w in range(99) if not is_canary(window_name("a", w * WINDOW_S, WINDOW_S), "new", 50))
    for after in (1.0, 6.0):
        row = trial_row(f"r{after}", "old", 1, ts=begin + after, tokens=3)
        fold(canary, units.pooled(trial_batch(row), FACTS).cells, begin + after, hold_s=WINDOW_S)
        assert close_quiet(canary, config, begin + after + 2.0) == 0
    assert close_quiet(canary, config, begin + 1.0 + WINDOW_S + config.quiet_s) == 1
    (sums,) = canary.test.strata.values()
    assert sums.tokens == [6.0, 0.0]


# ---- several replicas
def replica_cells(units, replica, window, rows):
    batch = msgspec.structs.replace(trial_batch(*rows), replica_id=replica)
    return units.pooled(batch, FACTS).cells


def test_a_guard_judges_replicas_times_windows():
    """Hold-back and usual windows of three replicas, each with many requests: as many units as windows, and the right sides."""
    wanted = DesiredState(
        gen=1, version="live", first_version="first", holdback_percent=40, class_versions={"math": "new"}
    )
    units, state, config = WindowUnits(), RolloutState(), RolloutConfig(canary_percent=50, quiet_s=1.0)
    guard = state.begin("new", "first", config, now=0.0, decision_id=1, bucket="math", arm="full", scope="math")
    guard.before = ""
    held, epoch = 0, {}
    for window in range(60):
        for replica in ("a", "b", "c"):
            begin = window * WINDOW_S
            group, version = served_now(wanted, {"math": 1.0}, window_name(replica, begin, WINDOW_S))
            held += group == Group.STATIC
            rows = [
                trial_row(
                    f"{replica}{window}-{i}",
                    version,
                    1,
                    group=group,
                    ms=5.0 if version == "new" else 10.0,
                    ts=begin + i,
                )
                for i in range(1, 5)
            ]
            cells = replica_cells(units, replica, window, rows)
            fold(guard, cells, begin, hold_s=WINDOW_S)
            fold_windows(epoch, msgspec.structs.replace(trial_batch(), cells=cells))
        close_quiet(guard, config, begin + 2 * WINDOW_S)
    assert guard.test.num_requests == (held, 180 - held) and 45 < held < 100
    assert guard.num_excluded == 0 and guard.test.ratio() > 1.5
    stats = {s.group: s for s in close("math", epoch["math"], 0.0, 600.0).stats}
    assert stats[Group.STATIC].time_per_token.n == held
    assert stats[Group.ADAPTIVE].time_per_token.n == 180 - held
    assert stats[Group.STATIC].num_rounds == 4 * held


def test_replicas_that_differ_for_long_are_no_evidence_against_a_drafter():
    """Two computers, one 30% slower, and a canary that is no different: the test errs as rarely as it promises.

    Were one of the two, by a coin, the canary in every window, it would err four times as often.
    """
    speeds, rng, alpha, wrong = {"a": 10.0, "b": 13.0}, np.random.default_rng(1), 0.05, 0
    for trial in range(120):
        test = CanaryTest(share=0.5, margin=0.02)
        for window in range(120):
            for replica, ms in speeds.items():
                arm = is_canary(window_name(f"{replica}{trial}", window * WINDOW_S, WINDOW_S), "new", 50)
                test.add("math", arm, 100.0, ms * math.exp(0.02 * rng.standard_normal()), 30)
            if test.evidence_worse() >= math.log(1 / alpha):
                wrong += 1
                break
    assert wrong / 120 <= alpha + 0.04
