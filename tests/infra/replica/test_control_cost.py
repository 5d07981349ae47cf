"""The control benchmark folds what its replicas publish, all of it and once, and prices it for every size."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from paceline.errors import ConfigError
from paceline.infra.replica.control_cost import ControlCostOptions, run_control_cost
from paceline.records import build

SMALL = {"replicas": (1, 3), "buckets": (2, 5), "bucket_replicas": 2, "idle": (4,), "running": 3, "seconds": 3.0}


def run(**fields) -> tuple[dict, str]:
    out = io.StringIO()
    result = run_control_cost(ControlCostOptions(**{**SMALL, "batches": 30, **fields}), Console(file=out, width=140))
    return result, out.getvalue()


def test_every_point_is_measured_and_no_row_is_lost(tmp_path):
    path = tmp_path / "results" / "control.json"
    result, text = run(json=path)
    stored = json.loads(path.read_text())
    assert stored["is_complete"] and stored["rows"] == result["rows"] and stored["options"]["running"] == 3
    sizes = [(r["replicas"], r["buckets"], r["running"]) for r in result["rows"]]
    assert sizes == [(1, 2, 3), (3, 2, 3), (2, 5, 3), (4, 1, 0)]
    one, three, _, idle = result["rows"]
    assert (one["num_batches"], one["seconds"]) == (12, 3.0)
    assert (three["num_batches"], three["seconds"]) == (30, 2.5), "limited by the number of batches"
    assert one["num_rows"] == 90 * 3, "30 rounds a second for 3 s"
    assert all(r["cores"] > 0 for r in result["rows"])
    assert one["state_bytes_per_s"] > 0 and idle["state_bytes_per_s"] < one["state_bytes_per_s"]
    assert idle["num_rows"] == 0 and idle["ms_per_batch"] is None
    assert "rows/CPU-s" in text and str(path) in text


@pytest.mark.parametrize("values", [{"replicas": (0,)}, {"buckets": ()}, {"flush_s": 0.0}, {"batches": 0}])
def test_sizes_out_of_range_are_refused(values):
    with pytest.raises(ConfigError):
        build(ControlCostOptions, values)
