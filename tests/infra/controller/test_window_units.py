"""Windows of time as units: their requests are pooled, counted once, and what judges trials and books savings sees one of each."""

from paceline.config import RolloutConfig
from paceline.contracts import EngineFacts, is_canary, window_name
from paceline.infra.controller.feedback import WindowUnits
from paceline.infra.controller.rollout import RolloutState, close_quiet, fold
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
