"""`paceline bench classes`: arms that answer alike, each counted under buckets of its own."""

from __future__ import annotations

import json

from rich.console import Console

from paceline.bench.engine.classes import ARMS, CLASSES, NAMED, ONE, ClassBenchOptions, run_class_bench


def test_arms_take_turns_on_the_same_text_and_only_one_has_classes(tmp_path):
    path = tmp_path / "r.json"
    options = ClassBenchOptions(num_groups=15, batch=2, max_tokens=4, buckets=("tools", "code"), json=path)
    result = run_class_bench(options, Console(quiet=True))
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    rows = {r["arm"]: r for r in result["rows"]}
    assert tuple(rows) == ARMS and result["num_classes"] >= 2
    assert set(rows[ONE]["buckets"]["tools"]) == {"default"}
    assert all(set(found) == {kind} for kind, found in rows[NAMED]["buckets"].items())
    tools, code = (rows[CLASSES]["buckets"][kind] for kind in ("tools", "code"))
    assert max(tools, key=tools.get) != max(code, key=code.get)
    assert all(rows[name]["over_one"]["ratio"] > 0 for name in ARMS)
