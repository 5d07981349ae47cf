"""Every kind of fault happens to a real service whose answers must outlive their replica, several at once where they can."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from paceline.bench.chaos.run import ChaosOptions, has_failed, run_chaos
from paceline.bench.common.result_file import read_json
from paceline.serving.loading.target import read_target
from tests.helpers.service_load import write_drafter, write_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]
SEED = 7
"""A proxy is killed, beside other faults, right behind a step of the clock backwards."""


def test_faults_of_every_kind_take_no_token_and_all_comes_back(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_drafter(tmp_path / "drafter", read_target(tmp_path / "model"), seed=0)
    options = ChaosOptions(
        num_faults=1, seed=SEED, num_at_once=3, is_resuming_answers=True, width=3, pause_s=0.8, model=str(tmp_path / "model"),
        drafter=str(tmp_path / "drafter"), resume=tmp_path / "run", json=tmp_path / "r.json", html=tmp_path / "r.html",
    )  # fmt: skip
    options = dataclasses.replace(options, num_faults=len(options.drawn()))
    said = io.StringIO()
    document = run_chaos(options, Console(file=said, width=190))
    assert not has_failed(document), said.getvalue()
    assert all(
        o["status"] == "ok" and o["recovery_s"] is not None and o["num_answers"] > 0 for o in document["outcomes"]
    )
    turns = [[o["name"], *o["beside"]] for o in document["outcomes"]]
    names = [name for turn in turns for name in turn]
    # one that finds what it would strike away, because of another, does not happen
    assert {turn[0] for turn in turns} <= set(names) <= set(options.drawn()) and len(names) == len(set(names))
    assert len(turns) == len(options.turns()) < 2 * len(names) / 3 and document["num_faults"] == len(names)
    if "clock-step" in names:
        at = turns.index(["clock-step"])
        assert document["outcomes"][at]["note"].startswith("-") and "proxy-kill" in turns[at + 1]
        assert document["outcomes"][at + 1]["recovery_s"] < 40.0, "replicas were not replaced, which takes a minute"
    for outcome, turn in zip(document["outcomes"], turns, strict=True):
        assert not outcome["num_broken"] or {"ingress-kill", "proxy-kill"} & set(turn)
    assert document["num_tokens"] > 0
    assert read_json(tmp_path / "r.json")["is_complete"] and "replica-kill" in (tmp_path / "r.html").read_text()
    # the run is over: the same command starts no service, and says the same
    again = run_chaos(options, Console(file=io.StringIO(), width=190))
    assert again["by_name"] == document["by_name"]
