"""Budgets by replay are the engine's own: same trees, same rounds; and the table says what the trees had predicted."""

import json

import numpy as np
import pytest
from rich.console import Console

from paceline.adapt.gate.gate import RequestScore
from paceline.adapt.gate.shadow import SeenRound, usable_traces
from paceline.bench.common.engine_run import load_named_drafter, load_target
from paceline.bench.shadow.budgets import BudgetsOptions, figures, make_groups, replay, run_budgets
from paceline.bench.shadow.decode import decode
from paceline.config import TreeConfig
from paceline.errors import ConfigError

SMALL = {"buckets": ("code",), "num_prompts": 3, "max_tokens": 24, "drafters": ("jetspec", "specblock")}


@pytest.mark.parametrize("policy", ["ddtree", "bundle"])
@pytest.mark.parametrize("drafter", ["jetspec", "specblock"])
def test_a_replayed_budget_accepts_what_the_engine_accepts(drafter, policy):
    options = BudgetsOptions(**SMALL)
    target = load_target("bundled", "float32", drafters=options.drafters)
    (group,) = make_groups(options, target)
    traces = usable_traces(decode(target, None, group).traces)
    for num_nodes in (4, 24):
        tree = TreeConfig(policy=policy, max_draft_tokens=num_nodes, max_frontier=options.max_frontier)
        real = decode(target, load_named_drafter(drafter, target), group, tree=tree)
        assert [t.token_ids for t in real.traces] == [t.token_ids for t in traces]
        scores, seen = replay(options, target, traces, drafter, policy, num_nodes)
        assert [s.num_rounds for s in scores] == [len(own) for own in real.rounds]
        whole = [r for own in real.rounds for r in own if not (r.is_cut or r.is_limited)]
        assert sum(int(r.num_accepted_tokens.sum()) for r in seen) <= sum(r.num_accepted_tokens for r in whole)
        assert all((r.predicted >= 0).all() and (r.predicted <= num_nodes + 1e-6).all() for r in seen)


def test_figures_pair_an_arm_with_the_first_one_and_compare_masses_with_what_came():
    first = [RequestScore(str(i), 10 + i, 10) for i in range(8)]
    arm = [RequestScore(s.request_id, 2 * s.num_tokens, s.num_rounds) for s in first]
    seen = [SeenRound(np.array([0.5, 1.0]), np.array([1, 1])), SeenRound(np.array([1.5]), np.array([2]))]
    row = figures(arm, first, seen)
    assert row["acceptance_length"] == pytest.approx(2 * sum(10 + i for i in range(8)) / 80)
    assert row["over_first"] == 2.0 and row["over_first_interval"] == [2.0, 2.0]
    assert row["predicted_over_realised"] == 0.75
    assert row["interval"][0] < row["acceptance_length"] < row["interval"][1]
    assert figures(arm, first, [])["predicted_over_realised"] is None


def test_the_command_writes_every_arm_at_every_budget(tmp_path):
    options = BudgetsOptions(
        **SMALL, nodes=(2, 8), policies=("ddtree", "bundle"), json=tmp_path / "b.json", html=tmp_path / "b.html"
    )
    document = run_budgets(options, Console(quiet=True))
    arms = {(r["drafter"], r["policy"], r["num_nodes"]) for r in document["rows"]}
    assert len(arms) == len(document["rows"]) == 8
    assert json.loads((tmp_path / "b.json").read_text())["is_complete"]
    assert "predicted / realised" in (tmp_path / "b.html").read_text()


def test_an_unknown_bucket_or_drafter_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match="must be among tools, code, math, facts, got 'poems'"):
        run_budgets(BudgetsOptions(buckets=("poems",)), Console(quiet=True))
    with pytest.raises(ConfigError, match="must propose something, got 'none'"):
        BudgetsOptions(drafters=("none",))
