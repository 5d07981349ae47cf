"""Worlds by tables run through the simulator of the formulas; a file with a mistake is refused by path and rule."""

import copy
import dataclasses
import json
from pathlib import Path

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bandit.policies.table import POLICIES
from paceline.bandit.replay import families
from paceline.bandit.replay.curves import TableCurves, off_diagonal
from paceline.bandit.replay.families import FAMILIES, FamilyWorld, family_worlds
from paceline.bandit.replay.oracle import hindsight
from paceline.bandit.replay.outcomes import FIRST, TrainOrder
from paceline.bandit.replay.scenario import Scenario
from paceline.bandit.replay.simulate import draw_world, run_policy, simulate
from paceline.bandit.replay.table import read_table, table_of, world_schema
from paceline.bandit.replay.world import World
from paceline.config import PolicyConfig
from paceline.errors import ConfigError
from tests.helpers.tiny_traffic import ARM, CONFIG, exhaustive, tiny

WORLDS = Path(__file__).resolve().parents[3] / "paceline" / "replay" / "worlds"
EXAMPLES = sorted(p for p in WORLDS.glob("*.json") if not p.name.endswith(".schema.json"))
WORLD = {
    "name": "x",
    "rounds": {"drafted_s": 0.007, "plain_s": 0.005},
    "classes": {
        "chat": {"acceptance_length": 2.4, "learned_rows": 1000},
        "code": {"acceptance_length": 1.4, "curves": {"full": [[500, 1.5], [4000, 2.1]]}},
    },
    "jobs": {"full": {"fixed_s": 1, "row_s": 0.001, "scoring_s": 1}},
    "noise": {"gain": 0, "cost": 0, "gate": 0},
    "traffic": [{"steps": 30, "tokens": {"chat": 3000}}, {"steps": 120, "tokens": {"code": 2400}}],
}


def _changed(path: tuple, value: object) -> dict:
    """WORLD with one value replaced; `...` leaves it out."""
    world = copy.deepcopy(WORLD)
    at = world
    for part in path[:-1]:
        at = at[part]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return world


MISTAKES = [  # (path, value, what the error says, whether the schema alone finds it)
    (("rounds",), ..., r"world\.rounds must be given", True),
    (("rounds", "plain_s"), 0, r"world\.rounds\.plain_s must be in \(0, 1000000\.0\], got 0", True),
    (("rouns",), {}, r"world\.rouns is not a setting; known settings: .*rounds", True),
    (("classes",), {}, r"world\.classes must not be empty", True),
    (("classes", ""), {"acceptance_length": 2}, r"world\.classes must have names: .*, got ''", False),
    (("classes", "code", "buckt"), "a", r"world\.classes\.code\.buckt is not a setting; known settings: .*bucket", True),
    (("classes", "chat", "acceptance_length"), 0.5, r"world\.classes\.chat\.acceptance_length must be in \[1, 64\], got 0\.5", True),
    (("classes", "chat", "acceptance_length"), "2", r"world\.classes\.chat\.acceptance_length must be float, got '2'", True),
    (("classes", "code", "curves", "full", 0), [500], r"world\.classes\.code\.curves\.full\[0\]\[1\] must be given", True),
    (("classes", "code", "curves", "full", 0, 0), -5, r"world\.classes\.code\.curves\.full\[0\]\[0\] must be in \(0, 1000000000\], got -5", True),
    (("classes", "code", "curves", "full"), [], r"world\.classes\.code\.curves\.full must not be empty", True),
    (("classes", "code", "curves", "full", 0, 0), 5000, r"world\.classes\.code\.curves\.full\[1\]\[0\] must be more rows than the point before \(5000\), got 4000", False),
    (("classes", "code", "curves", "full", 1, 1), 1.45, r"world\.classes\.code\.curves\.full\[1\]\[1\] must be at least the acceptance length before \(1\.5\), got 1\.45", False),
    (("classes", "code", "curves", "head"), [[1, 2]], r"world\.classes\.code\.curves must name arms of world\.jobs \(full\), got 'head'", False),
    (("jobs", "lora"), {"fixed_s": 1, "row_s": 1, "scoring_s": 1}, r"world\.jobs must name arms among calibration, head, full, got 'lora'", False),
    (("jobs", "full", "max_rows"), 0, r"world\.jobs\.full\.max_rows must be in \[1, 1000000000\], got 0", True),
    (("traffic", 1, "steps"), 2.5, r"world\.traffic\[1\]\.steps must be int, got 2\.5", True),
    (("traffic", 1, "tokens", "code"), -1, r"world\.traffic\[1\]\.tokens\.code must be in \[0, 1000000000\.0\], got -1", True),
    (("traffic", 1, "tokens"), {"cod": 1}, r"world\.traffic\[1\]\.tokens must name classes of world\.classes \(chat, code\), got 'cod'", False),
    (("traffic",), [{"tokens": {"chat": 1}}], r"world\.traffic must have 4 to 200000 steps in all, got 1", False),
    (("traffic",), [{"steps": 9, "tokens": {}}], r"world\.traffic must hold tokens", False),
    (("traffic",), [{"steps": 9, "tokens": {"chat": 5e-324}}], r"world\.traffic must hold tokens", False),
    (("num_replicas",), 10**400, r"world\.num_replicas must be in \[1, 1000000\], got", True),
    (("tokens_per_request",), 1e-300, r"world\.tokens_per_request must be in \[1, 1000000000\.0\], got 1e-300", True),
    (("transfer",), {"code": {"chat": 1.5}}, r"world\.transfer\.code\.chat must be in \[0, 1\], got 1\.5", True),
    (("forgetting",), {"code": {"code": 0.5}}, r"world\.forgetting\.code must name other classes than itself, got 'code'", False),
    (("failures",), {"failed": 0.7, "harmful": 0.7}, r"world\.failures\.failed \+ world\.failures\.harmful must be <= 1", False),
    (("format",), 2, r"world\.format must be in \[1, 1\], got 2", True),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "message", "by_schema"), MISTAKES)
def test_a_mistake_is_refused_by_its_path_and_its_rule(tmp_path, path, value, message, by_schema):
    file, world = tmp_path / "w.json", _changed(path, value)
    file.write_text(json.dumps(world))
    with pytest.raises(ConfigError, match=message) as caught:
        read_table(file)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)
    assert jsonschema.Draft202012Validator(world_schema()).is_valid(world) is not by_schema


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[]", "world must be a mapping"),
        (json.dumps(WORLD)[:-1] + ', "traffic": []}', "must be JSON: key 'traffic' must come once in its object"),
        (json.dumps(WORLD).replace('"x"', '"\\ud800"'), r"json: world must be text of whole characters.{,50}$"),
        (json.dumps(WORLD).replace("2400", "NaN"), r"traffic\[1\]\.tokens\.code must be a finite number"),
        (json.dumps(WORLD).replace("2400", "1e999"), r"traffic\[1\]\.tokens\.code must be a finite number"),
    ],
)
def test_a_file_that_is_no_world_is_refused_in_one_sentence(tmp_path, text, message):
    file = tmp_path / "w.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_table(file)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="readable file"):
        read_table(tmp_path / "absent.json")


def test_the_published_schema_is_that_of_the_records_and_the_examples_keep_to_it():
    published = json.loads((WORLDS / "world.schema.json").read_text())
    assert published == world_schema()
    jsonschema.Draft202012Validator.check_schema(published)
    assert len(EXAMPLES) >= 3
    for path in EXAMPLES:
        assert read_table(path).name == path.stem
        jsonschema.validate(json.loads(path.read_text()), published)


def test_every_field_of_the_schema_says_what_it_is_or_has_a_name_that_does():
    plain = {"name", "tokens_per_request", "num_replicas", "rounds", "classes", "traffic", "format"}
    schema = world_schema()
    for part in (schema, *schema["$defs"].values()):
        bare = {k for k, v in part["properties"].items() if "description" not in v and "$ref" not in v}
        assert bare <= plain | {"steps", "failures", "noise", "batch_size"}, part["title"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_runs_and_no_policy_beats_its_bound(path):
    world = read_table(path)
    bound = simulate(world, "bound", {}, 0).net_s
    for policy in ("payoff", "always", "oracle"):
        run = simulate(world, policy, {}, 0)
        assert run.net_s <= bound + 1e-6 and run.contradictions == []


def test_a_formula_and_the_table_of_its_points_give_the_same_runs():
    cell = Scenario(name="x", regime_s=300.0, duration_s=900.0, train_cost=0.3)
    traffic, outcomes = draw_world(cell, 1)
    rows = np.concatenate([[0.0], np.geomspace(1e-3, 2.0**21, 20_000)])
    table = TableCurves(
        tuple({a.parameters: (rows, outcomes.curves.closed(d, a, rows)) for a in outcomes.arms} for d in range(len(outcomes.first)))
    )  # fmt: skip
    for policy in ("payoff", "always", "oracle", "bound"):
        formula = run_policy(traffic, draw_world(cell, 1)[1], policy, {}, 1)
        points = run_policy(traffic, dataclasses.replace(draw_world(cell, 1)[1], curves=table), policy, {}, 1)
        assert points.num_jobs == formula.num_jobs and points.net_s == pytest.approx(formula.net_s, rel=1e-2, abs=0.1)


@given(rows=st.integers(1, 16_384))
def test_a_job_of_the_first_drafter_reaches_what_the_curve_says_for_its_seconds(rows):
    world = table_of(WORLD)
    _, outcomes = world.draw(3)
    outcomes.luck[:], outcomes.gate_noise = 1.0, 0.0
    (arm,) = outcomes.arms
    order = TrainOrder(
        step=40, domain=1, bucket="code", arm=msgspec.structs.replace(arm, num_rows=rows), base=FIRST, rows=rows,
        rows_per_request=rows / 200, time_limit_s=1e9, decision_id=1,
    )  # fmt: skip
    truth = outcomes.train(order)
    assert truth.train_s == pytest.approx(1.0 + 0.001 * rows) and truth.shadow_s == pytest.approx(1.0)
    assert truth.num_rows == rows and truth.num_requests == 200
    expected = np.interp(rows, [0, 500, 4000], [1.4, 1.5, 2.1])
    assert 0.7 * (expected - 1.4) < truth.seen_gain <= expected - 1.4, "the newest requests, each before it was learned"
    if truth.status == "accepted":
        assert outcomes.lengths(truth.version)[1] == pytest.approx(expected)
    else:
        assert truth.status == "learning" and expected < 1.45
        on = msgspec.structs.replace(order, step=41, rows=4000, rows_per_request=20.0)
        later = outcomes.train(on)
        assert later.num_rows_before == rows and later.status == "accepted"
        assert outcomes.lengths(later.version)[1] == pytest.approx(
            min(np.interp(rows + 4000, [0, 500, 4000], [1.4, 1.5, 2.1]), 2.1)
        )


@pytest.mark.parametrize("jobs", [{"fixed_s": 600.0}, {"scoring_s": 50.0}, {"row_s": 0.1}, {"scoring_row_s": 0.1}])
def test_a_burst_ends_at_its_time_limit_whatever_takes_the_time(jobs):
    world = _changed(("jobs", "full"), {**WORLD["jobs"]["full"], **jobs})
    _, outcomes = table_of(world).draw(0)
    (arm,) = outcomes.arms
    order = TrainOrder(
        step=40, domain=1, bucket="code", arm=arm, base=FIRST, rows=4000, rows_per_request=100.0, time_limit_s=20.0, decision_id=1
    )  # fmt: skip
    truth = outcomes.train(order)
    assert truth.train_s + truth.shadow_s == pytest.approx(20.0) and truth.num_rows < 4000


@pytest.mark.parametrize("tokens_per_request", [20.0, 100.0, 2000.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_sparse_service_has_the_bank_of_the_share_that_it_is_busy(tokens_per_request, seed):
    world = {
        "name": "sparse", "rounds": {"drafted_s": 0.022, "plain_s": 0.02}, "tokens_per_request": tokens_per_request,
        "classes": {"b": {"acceptance_length": 1.6, "curves": {"full": [[1000, 1.62]]}}},
        "jobs": {"full": {"fixed_s": 1.5, "row_s": 0.0046, "scoring_s": 2.0}},
        "traffic": [{"steps": 720, "tokens": {"b": 20}}],
    }  # fmt: skip
    found = simulate(table_of(world), "payoff", {}, seed)
    busy = found.never_s / (720 * 10.0)
    assert 0.02 < busy < 0.04 and sum(found.spent.values()) <= 40.0 * busy + 1.0


@pytest.mark.parametrize("seed", range(3))
def test_a_fleet_tries_longer_drafts_for_text_that_its_drafter_knows_and_one_device_does_so_within_its_income(seed):
    """Curve: 3,400 rows of text that a drafter was made for added 5% in real bursts, 30,000 added 8%."""

    def found(devices: int) -> tuple[float, float]:
        world = {
            "name": "known", "rounds": {"drafted_s": 0.0066, "plain_s": 0.0045}, "num_replicas": devices,
            "classes": {"b": {"acceptance_length": 3.0, "learned_rows": 200_000, "curves": {"full": [[3400, 3.15], [30_000, 3.25]]}}},
            "jobs": {"full": {"fixed_s": 0.5, "row_s": 0.0018, "scoring_s": 0.5, "scoring_row_s": 0.001}},
            "traffic": [{"steps": 90, "tokens": {"b": 4000 * devices}}],
        }  # fmt: skip
        run = simulate(table_of(world), "payoff", {}, seed)
        return run.net_s / run.never_s, sum(run.spent.values()) / run.never_s

    assert found(8)[0] > 0.01
    assert found(1)[1] <= 0.015


@pytest.mark.parametrize(("spike", "most", "is_first"), [(1, 8.0, False), (30, 2.0, False), (30, 2.0, True)])
def test_the_bank_grows_with_the_devices_that_serving_keeps_busy_but_not_with_a_spike(spike, most, is_first):
    """8 devices all the time, or in one step of 30, the first or the last."""
    every = {"steps": 1, "tokens": {"b": 8 * 10.0 / 0.0066 * 3.0}}
    quiet = {"steps": spike - 1, "tokens": {"b": 10.0 / 0.0066 * 3.0}}
    world = {
        "name": "fleet", "rounds": {"drafted_s": 0.0066, "plain_s": 0.0045}, "num_replicas": 8,
        "classes": {"b": {"acceptance_length": 3.0, "curves": {"full": [[1000, 3.01]]}}}, "jobs": WORLD["jobs"],
        "traffic": [*(every, quiet)[:: 1 if is_first else -1]] * (240 // spike) if spike > 1 else [every] * 240,
    }  # fmt: skip
    traffic, outcomes = table_of(world).draw(0)
    running = World(traffic, outcomes, PolicyConfig(), seed=0)
    starts = []
    for k in range(240):
        running.step(k)
        starts.append(running.controller.bank().start_s / 40.0)
    assert max(starts) <= most + 1e-9 and np.median(starts) >= min(most, 7.0) - 1.0


def test_an_arm_that_the_table_leaves_out_cannot_be_ordered():
    run = simulate(table_of(WORLD), "always", {}, 0)
    assert {e["what"] for e in run.events if e["action"] == "train"} == {"full"}


def test_transfer_helps_others_and_forgetting_costs_them():
    _, plain = table_of(WORLD).draw(0)
    for title, sign in (("transfer", 1), ("forgetting", -1)):
        world = _changed((title,), {"chat": {"code": 0.5}})
        world["classes"]["chat"]["curves"] = {"full": [[1000, 3.0]]}
        _, outcomes = table_of(world).draw(0)
        after = outcomes.trained(0, outcomes.first, 1.0)
        expected = 1.4 + 0.5 * 0.7 if sign > 0 else 1.0 + 0.4 * 0.5
        assert after == pytest.approx([3.0, expected])
    assert plain.trained(1, plain.first, 1.0) == pytest.approx([2.4, 2.1])


def test_failures_come_at_their_rates():
    world = _changed(("failures",), {"failed": 0.3, "harmful": 0.2, "harm": 0.5})
    world["traffic"][1]["steps"] = 2500
    _, outcomes = table_of(world).draw(0)
    (arm,) = outcomes.arms
    ends = []
    for step in range(2500):
        order = TrainOrder(step=step, domain=1, bucket="code", arm=arm, base=FIRST, rows=4000, rows_per_request=100.0, time_limit_s=1e9, decision_id=step)  # fmt: skip
        truth = outcomes.train(order)
        harmed = truth.version is not None and outcomes.lengths(truth.version)[1] < 1.4
        ends.append("harmful" if harmed else truth.status)
    shares = {end: ends.count(end) / 2500 for end in set(ends)}
    assert shares == {"failed": pytest.approx(0.3, abs=0.03), "harmful": pytest.approx(0.2, abs=0.03), "accepted": pytest.approx(0.5, abs=0.03)}  # fmt: skip


@given(seed=st.integers(0, 10_000), share=st.floats(0, 1), back=st.floats(0, 1))
@settings(max_examples=6)
def test_no_plan_beats_the_bound_where_learning_carries_over(seed, share, back):
    traffic, outcomes = tiny(seed, 2, 0.2)
    outcomes.transfer[:] = off_diagonal(2, share)
    outcomes.transfer[1, 0] = back
    traffic.tokens[4:] = 0.0  # keeps the search small
    bound = hindsight(traffic, outcomes, CONFIG, slowdown=0.05, arms=(ARM,))
    assert bound.net_s >= exhaustive(traffic, outcomes, 0.05) - 1e-6


def test_there_are_at_least_twelve_families_and_each_seed_is_another_world():
    assert len(FAMILIES) == len(family_worlds()) >= 12
    for cell in family_worlds():
        one, again, other = cell.table(1), cell.table(1), cell.table(2)
        assert one == again and one != other
        assert table_of(json.loads(json.dumps(dataclasses.asdict(one)))) == one  # a file could hold it


def test_a_family_is_what_its_name_says():
    def table(name, seed=0):
        return FamilyWorld(name=name).table(seed)

    assert len(table("zipf").classes) == 20
    assert max(p[1] for c in table("flat").classes.values() for own in c.curves.values() for p in own) < 2.8
    late = table("late-gain").classes["c1"]
    assert late.curves["full"][2][1] - late.acceptance_length < 0.1 * (late.curves["full"][-1][1] - late.acceptance_length)  # fmt: skip
    assert table("dear").jobs["full"].row_s > 2 * max(table(n).jobs["full"].row_s for n in FAMILIES if n != "dear")
    assert {c.bucket for c in table("hidden-morph").classes.values()} == {"all"}
    assert table("failures").failures.failed == 0.25
    loads = [sum(s.tokens.values()) for s in table("spikes").traffic]
    assert max(loads) > 8 * np.median(loads)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_policy_beats_the_bound_of_a_family(name, monkeypatch):
    monkeypatch.setattr(families, "NUM_STEPS", 72)
    cell = FamilyWorld(name=name)
    bound = simulate(cell, "bound", {}, 0).net_s
    for policy in ("payoff", "always") if name in ("zipf", "hidden-morph") else POLICIES:
        run = simulate(cell, policy, {}, 0)
        assert run.net_s <= bound + 1e-6 and run.contradictions == []


def test_learning_that_begins_behind_millions_of_rows_is_learned_from_there():
    late = {
        **WORLD["classes"],
        "code": {"acceptance_length": 1.4, "curves": {"full": [[4_000_000, 1.5], [500_000_000, 2.4]]}},
    }
    _, outcomes = table_of({**WORLD, "classes": late, "noise": {"gain": 0, "cost": 0, "gate": 0}}).draw(0)
    share = outcomes.share(1, np.array([1.5]))  # where 4 M rows have brought it
    closed = outcomes.closed(1, outcomes.arms[0], np.array([248_000_000.0]), share)[0, 0]
    assert 1.5 + closed * (2.4 - 1.5) == pytest.approx(1.95, abs=0.01)
    bad = {**WORLD["classes"], "code": {"acceptance_length": 1.4, "curves": {"full": [[2e9, 2.4]]}}}
    with pytest.raises(ConfigError, match=r"curves.* must be in \(0, 1000000000\], got 2000000000"):
        table_of({**WORLD, "classes": bad})
