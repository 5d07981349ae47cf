"""Scenarios refuse nonsense; the named grid is what docs/policies.md lists."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from paceline.bandit.replay.grid import grid, named_cells
from paceline.bandit.replay.scenario import Scenario, regimes
from paceline.bandit.replay.simulate import draw_world
from paceline.bandit.replay.table import table_of
from paceline.errors import ConfigError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "policies.md"


@pytest.mark.parametrize(
    "change",
    [
        {"recurrence": "often"},
        {"regime_s": 1.0},
        {"load": 0.0},
        {"bad_jobs": 1.5},
        {"batch_size": 0},
        {"step_s": -1.0},
        {"duration_s": 1e6, "step_s": 1.0},
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        Scenario(name="x", **change)


def test_a_world_too_large_for_memory_is_refused_before_it_is_drawn():
    longest = Scenario(name="long", recurrence="fresh", regime_s=10.0, duration_s=2e6)
    with pytest.raises(
        ConfigError, match=r"'long' must take at most 8 GiB of memory, got about \d+ GiB for 200000 steps"
    ):
        draw_world(longest, 0)
    classes = {f"c{i}": {"acceptance_length": 1.5} for i in range(6000)}
    jobs = {"full": {"fixed_s": 1, "row_s": 1, "scoring_s": 1}}
    table = {"name": "wide", "rounds": {"drafted_s": 1, "plain_s": 1}, "jobs": jobs, "classes": classes}
    with pytest.raises(ConfigError, match=r"'wide' must take .* for 200000 steps of 6000 domains; .*fewer classes"):
        draw_world(table_of({**table, "traffic": [{"steps": 200_000, "tokens": {"c0": 1}}]}), 0)


def test_the_synthetic_grid_has_at_least_24_cells_of_every_axis():
    cells = grid("synthetic")
    assert len(cells) == len({c.name for c in cells}) >= 24
    for axis in ("regime_s", "train_cost", "recurrence", "load", "batch_size", "bad_jobs", "forgetting", "diurnal"):
        assert len({getattr(c, axis) for c in cells}) >= 2, axis


def test_every_named_cell_is_in_the_documentation():
    page = "".join(p.read_text(encoding="utf-8") for p in (PAGE, PAGE.parent / "results" / "README.md"))
    assert [name for name in named_cells() if f"`{name}`" not in page] == []


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"medium-cheap-cycle.*'nope'"):
        grid("nope")


def test_regimes_follow_their_pattern_and_cover_the_time():
    for kind, expected in {"steady": [0, 1, 0, 1], "cycle": [0, 1, 0, 2], "fresh": [0, 1, 2, 3]}.items():
        cell = Scenario(name="x", recurrence=kind, regime_s=300.0, duration_s=6000.0)
        plan = regimes(cell, np.random.default_rng(0))
        assert [d for _, d in plan[:4]] == expected
        starts = [s for s, _ in plan]
        assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < cell.num_steps


def test_mean_regime_length_is_as_asked():
    cell = Scenario(name="x", recurrence="fresh", regime_s=400.0, duration_s=200_000.0)
    starts = [s for s, _ in regimes(cell, np.random.default_rng(1))]
    assert np.mean(np.diff(starts)) * cell.step_s == pytest.approx(400.0, rel=0.1)


def test_scenarios_are_plain_values():
    assert Scenario(**dataclasses.asdict(grid("idle")[0])) == grid("idle")[0]
