"""The GPU check runs on a bare machine, survives every stage that ends badly, and keeps to its budget."""

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from paceline.bench.gpu_check.__main__ import main
from paceline.bench.gpu_check.forwards import CHAIN, MAX_ERROR, OPTIONAL, driver_version, kernel_errors, outcomes
from paceline.bench.gpu_check.measure import NO_EVENTS, CaptureLog, alternating, device_figures, union
from paceline.bench.gpu_check.stages import NO_GPU, STAGES, SUMMARY, TIMES, CheckOptions, run_stages, table
from paceline.bench.shapes.kernel_cases import CASES, Bench
from paceline.bench.shapes.kernel_shapes import MODELS
from paceline.kernels.dispatch import select_kernels
from paceline.serving.target_model.graph_capture import CaptureJob, EagerGraphs, capture_all
from tests.helpers.bare_machine import CARRIED, NEEDED, write_bare_site
from tests.helpers.gpu_stages import named

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SLACK_S = 8.0
"""Beyond the budget: the end of a process that was killed, on a machine whose cores are busy."""


def check(tmp_path, stages, budget_s=60.0, **options):
    """A check of these stages: (rows by stage, summary)."""
    summary = run_stages(CheckOptions(out=tmp_path, budget_s=budget_s, **options), stages)
    assert json.loads((tmp_path / SUMMARY).read_text()) == summary
    return {row["stage"]: row for row in summary["stages"]}, summary


def named_times(value, at=""):
    """(name, value) of everything below that is named as a time, a rate or a ratio of them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key.endswith(TIMES):
                yield f"{at}{key}", inner
            else:
                yield from named_times(inner, f"{at}{key}.")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from named_times(inner, f"{at}{i}.")


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """Every stage on the CPU, in processes that see a bare machine with carried wheels and scipy."""
    folder = tmp_path_factory.mktemp("dry")
    site = write_bare_site(folder / "bare", (*CARRIED, "scipy"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(site), os.environ.get("PYTHONPATH", ""))))
        code = main(["--out", str(folder / "out"), "--dry-run", "--budget", "800"])
    summary = json.loads((folder / "out" / SUMMARY).read_text())
    return SimpleNamespace(
        code=code, out=folder / "out", summary=summary, rows={r["stage"]: r for r in summary["stages"]}
    )


def test_every_stage_runs_with_the_named_packages_alone(dry):
    assert {name: (row["state"], row.get("reason")) for name, row in dry.rows.items()} == {
        s.name: ("done", None) for s in STAGES
    }
    assert dry.code == 0 and dry.summary["is_complete"] and dry.summary["is_dry"]
    assert [p.name for p in dry.out.iterdir()] == [SUMMARY]
    imports = {row["module"]: row["error"] for row in dry.rows["machine"]["data"]["imports"]}
    assert [name for name in CHAIN if imports[name]] == []
    assert set(imports) == {*CHAIN, *OPTIONAL}


def test_a_dry_run_gives_no_time_and_says_why(dry):
    for name, row in dry.rows.items():
        assert row["data"]["null_because"] == NO_GPU
        assert [found for found in named_times(row["data"]) if found[1] is not None] == [], name
        assert not any(unit in row["headline"] for unit in (" ms", " s,", "GB/s", "%")), row["headline"]


def test_a_dry_run_checks_tokens_kernels_and_a_training_job(dry):
    kernels = dry.rows["kernels"]["data"]["correctness"]
    assert [k["kernel"] for k in kernels] == [*CASES] and all(k["is_right"] for k in kernels)
    drafters = dry.rows["engine"]["data"]["drafters"]
    assert [d["drafter"] for d in drafters] == ["specblock", "eagle3", "jetspec", "dflash"]
    for row in drafters:
        assert row["arms_agree"] and row["arms"]["graphs"] == {"skipped": NO_GPU}
        assert {row["arms"][arm]["lossless"]["num_mismatches"] for arm in ("eager", "reference")} == {0}
    assert [row["drafter"] for row in dry.rows["drafters"]["data"]["rows"]] == [d["drafter"] for d in drafters]
    assert all(row["num_operators"] > 0 for row in dry.rows["drafters"]["data"]["rows"])
    assert dry.rows["swap"]["data"]["num_staged"] > 0
    training = dry.rows["training"]["data"]
    assert (
        training["status"] in ("accepted", "rejected", "learning")
        and training["num_steps"] == len(training["losses"]) > 0
    )


def test_the_table_has_a_line_for_every_stage(dry):
    lines = table(dry.summary).splitlines()
    assert [line.split()[0] for line in lines[2 : 2 + len(STAGES)]] == [s.name for s in STAGES]
    assert "9 of 9 stages done" in lines[-2] and "no figure says anything about a GPU" in lines[-1]


def test_a_bare_machine_is_told_what_to_carry(tmp_path, monkeypatch):
    site = write_bare_site(tmp_path / "bare")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(site), os.environ.get("PYTHONPATH", ""))))
    stages = tuple(s for s in STAGES if s.name in ("machine", "engine"))
    rows, _ = check(tmp_path / "out", stages, budget_s=300.0, is_dry=True)
    imports = {row["module"]: row["error"] for row in rows["machine"]["data"]["imports"]}
    needed = {imports[name] for name in CHAIN if imports[name]}
    assert needed == {f"needs {name}: carry its wheel (--wheels DIR)" for name in NEEDED}
    assert rows["engine"]["state"] == "failed" and rows["engine"]["reason"] in needed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_real_run_says_so_and_keeps_what_it_found(tmp_path):
    rows, _ = check(tmp_path, tuple(s for s in STAGES if s.name == "machine"))
    assert rows["machine"]["state"] == "failed" and "torch sees no CUDA device" in rows["machine"]["reason"]
    assert rows["machine"]["data"]["torch"] == torch.__version__


def test_a_stage_that_ends_badly_ends_alone(tmp_path):
    rows, summary = check(tmp_path, named("wrong", "missing", "die", "fine"))
    assert rows["wrong"]["state"] == "failed" and rows["wrong"]["reason"] == "ValueError: the device answered 42"
    assert rows["wrong"]["data"]["rows"] == [1, 2] and "on the way to the fault" in rows["wrong"]["log"]
    assert any("raise ValueError" in line for line in rows["wrong"]["log"])
    assert rows["missing"]["reason"] == "needs a_package_that_nobody_has: carry its wheel (--wheels DIR)"
    assert rows["die"]["state"] == "failed" and rows["die"]["reason"] == "its process ended with code 7"
    assert rows["fine"]["state"] == "done" and rows["fine"]["headline"] == "all is well" and "log" not in rows["fine"]
    assert summary["is_complete"] and "1 of 4 stages done" in table(summary)


def test_a_stage_that_finds_a_fault_has_failed_and_keeps_its_figures(tmp_path):
    rows, _ = check(tmp_path, named("blamed"))
    assert rows["blamed"]["state"] == "failed" and rows["blamed"]["reason"] == "a kernel is wrong"
    assert rows["blamed"]["headline"] == "7 of 8 kernels right" and rows["blamed"]["data"] == {"rows": [1], "more": 2}


def test_an_entry_that_is_not_there_fails_alone(tmp_path):
    stages = (
        *named("fine"),
        *(dataclasses.replace(s, name="nowhere", entry="tests.helpers.nowhere:x") for s in named("fine")),
    )
    rows, _ = check(tmp_path, stages[::-1])
    assert rows["nowhere"]["reason"] == "ModuleNotFoundError: No module named 'tests.helpers.nowhere'"
    assert rows["fine"]["state"] == "done"


def test_a_stage_that_hangs_with_the_lock_in_hand_is_ended_in_time(tmp_path):
    began = time.monotonic()
    rows, _ = check(tmp_path, (*named("hang", share=1.0), *named("fine", share=3.0)), budget_s=16.0)
    assert time.monotonic() - began < 16.0 + SLACK_S
    hung = rows["hang"]
    assert hung["state"] == "timed out" and hung["limit_s"] == pytest.approx(4.0, abs=0.5)
    assert hung["seconds"] < hung["limit_s"] + SLACK_S and hung["data"]["rows"] == [1] and hung["headline"] == "begun"
    assert any("in hang" in line for line in hung["log"]), "where it hung"
    assert rows["fine"]["state"] == "done"


def test_what_a_stage_has_started_ends_with_it(tmp_path):
    rows, _ = check(tmp_path, named("children"), budget_s=5.0)
    pid = rows["children"]["data"]["pid"]
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.05)
    assert rows["children"]["state"] == "timed out" and not _runs(pid)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_budget_holds_and_stages_without_time_are_skipped(tmp_path):
    stages = (
        *named("hang", share=8.0),
        *(dataclasses.replace(s, name=f"late{i}", share=1.0) for i in range(2) for s in named("fine")),
    )
    began = time.monotonic()
    rows, summary = check(tmp_path, stages, budget_s=4.0)
    assert time.monotonic() - began < 4.0 + SLACK_S and summary["seconds"] < 4.0 + SLACK_S
    assert rows["hang"]["state"] == "timed out" and rows["hang"]["limit_s"] == pytest.approx(3.2, abs=0.5)
    assert rows["late1"]["state"] == "skipped" and rows["late1"]["reason"] == "no time left"


def test_time_that_a_stage_leaves_goes_to_the_later_ones(tmp_path):
    stages = (*named("fine", share=9.0), *(dataclasses.replace(s, name="later") for s in named("fine", share=1.0)))
    rows, _ = check(tmp_path, stages, budget_s=30.0)
    assert rows["fine"]["limit_s"] == pytest.approx(27.0, abs=1.0)
    assert rows["later"]["data"]["left_s"] > 15.0


def test_the_summary_is_whole_after_every_stage(tmp_path):
    seen = []

    def look(line):
        kept = json.loads((tmp_path / SUMMARY).read_text())
        seen.append(([row["stage"] for row in kept["stages"]], kept["is_complete"], line.split()[:2]))

    run_stages(CheckOptions(out=tmp_path, budget_s=60.0), named("fine", "wrong", "numbers"), look)
    assert [names for names, *_ in seen] == [["fine"], ["fine", "wrong"], ["fine", "wrong", "numbers"]]
    assert not any(is_complete for _, is_complete, _ in seen)
    assert [line for *_, line in seen] == [["fine", "done"], ["wrong", "failed"], ["numbers", "done"]]


def test_numbers_without_a_word_in_json_become_null(tmp_path):
    rows, _ = check(tmp_path, named("numbers"))
    assert rows["numbers"]["data"] == {"nan": None, "inf": [None], "deep": {"round_ms": 1.5, "3": 4}}


def test_a_dry_run_hides_times_whatever_a_stage_saves(tmp_path):
    rows, _ = check(tmp_path, named("numbers", "fine"), is_dry=True)
    assert rows["numbers"]["data"]["deep"] == {"round_ms": None, "3": 4}
    assert rows["fine"]["data"] == {"left_s": None, "is_dry": True, "null_because": NO_GPU}


def test_carried_wheels_are_found(tmp_path):
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "carried_package-1-py3-none-any.whl", "w") as archive:
        archive.writestr("carried_package/__init__.py", "VALUE = 17\n")
        archive.writestr("carried_package-1.dist-info/METADATA", "Name: carried-package\n")
    rows, summary = check(tmp_path / "out", named("carried"), wheels=tmp_path / "wheels")
    assert rows["carried"]["data"]["value"] == 17
    assert summary["wheels"] == ["carried_package-1-py3-none-any.whl"]


def test_a_process_that_nobody_waits_for_ends(tmp_path):
    command = [sys.executable, "-m", "paceline.bench.gpu_check", "--stage-entry", "tests.helpers.gpu_stages:hang"]
    done = subprocess.run([*command, "--stage-result", str(tmp_path / "r.json")], stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 0 and not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out DIR must be given"),
        (["--out", "x", "--budget", "0"], "--budget must be > 0 and finite, got 0"),
        (["--out", "x", "--budget", "inf"], "--budget must be > 0 and finite, got inf"),
        (["--out", "x", "--stages", "machine,moon"], "got moon"),
        (["--out", "/proc/nowhere"], "--out must be a folder, or one that can be made, got /proc/nowhere"),
        (["--out", "x", "--wheels", "/nowhere"], "--wheels must be a folder, got /nowhere"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_help_names_every_stage_and_what_to_carry(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(s.name in text and s.question in text for s in STAGES)
    assert all(name in text for name in NEEDED)
    assert "--stage-entry" not in text


@pytest.mark.parametrize("name", ["scatter_rows", "topk_lse"])
def test_a_wrong_kernel_is_found(name):
    shape = dataclasses.replace(MODELS["qwen3-8b"], context=64, requests=16, nodes=4).scaled_down()
    right = select_kernels("cpu", "reference")

    def scatter_rows(pool, rows, keys, values):
        right.scatter_rows(pool, rows.flip(0), keys, values)

    def topk_lse(logits, k):
        values, ids, lse = right.topk_lse(logits, k)
        return values, ids.flip(1), lse

    broken = dataclasses.replace(right, **{name: {"scatter_rows": scatter_rows, "topk_lse": topk_lse}[name]})
    for kernels, is_right in ((right, True), (broken, False)):
        found = kernel_errors(name, shape, Bench(device=torch.device("cpu"), dtype=torch.bfloat16, kernels=kernels))
        assert found["is_right"] == is_right
        assert (found["relative_error"] <= MAX_ERROR and found["num_different"] == 0) == is_right


def test_a_kernel_that_gives_nan_for_an_infinite_number_is_wrong():
    shape = dataclasses.replace(MODELS["qwen3-8b"], context=64, requests=16, nodes=4).scaled_down()
    right = select_kernels("cpu", "reference")

    def topk_lse(logits, k, value):
        values, ids, lse = right.topk_lse(logits, k)
        values[0, -1] = value
        return values, ids, lse

    cpu = torch.device("cpu")
    for value, is_right in ((-math.inf, True), (math.nan, False), (math.inf, False)):
        exact = dataclasses.replace(right, topk_lse=functools.partial(topk_lse, value=-math.inf))
        kernels = dataclasses.replace(right, topk_lse=functools.partial(topk_lse, value=value))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("paceline.kernels.dispatch.select_kernels", lambda *_, exact=exact: exact)
            found = kernel_errors("topk_lse", shape, Bench(device=cpu, dtype=torch.bfloat16, kernels=kernels))
        assert found["is_right"] == is_right, value


@pytest.mark.parametrize(
    ("code", "said", "version"),
    [(0, "550.54\n550.54\n", "550.54"), (9, "NVIDIA-SMI has failed because it couldn't communicate", None)],
)
def test_a_driver_tool_that_fails_tells_no_version(tmp_path, monkeypatch, code, said, version):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert driver_version() == version


def event(name, kind, start, end):
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, device_type=kind, time_range=span)


def test_device_time_is_what_kernels_cover_and_launches_and_waits_are_counted():
    host, device = DeviceType.CPU, DeviceType.CUDA
    events = [
        event("aten::mm", host, 0, 10), event("cudaLaunchKernel", host, 1, 2), event("cuLaunchKernelEx", host, 3, 4),
        event("cudaGraphLaunch", host, 5, 6), event("cudaMemcpyAsync", host, 7, 8),
        event("cudaStreamSynchronize", host, 10, 510),
        event("gemm", device, 100, 300), event("copy", device, 200, 400), event("gemm", device, 500, 600),
    ]  # fmt: skip
    found = device_figures(events, repeats=2, num_top=1)
    assert found == {
        "device_ms": 0.2, "wait_ms": 0.25, "num_launches": 1.0, "num_graph_launches": 0.5, "num_waits": 0.5, "num_copies": 0.5, "num_kernels": 1.5,
        "top_kernels": [{"name": "gemm", "num_calls": 1.0, "total_us": 150.0}],
    }  # fmt: skip
    blind = device_figures([e for e in events if e.device_type == host], repeats=2, num_top=1)
    assert blind["device_ms"] is None and blind["null_because"] == NO_EVENTS


def test_what_could_not_be_captured_is_told():
    def fail(backend):
        raise RuntimeError("no capture here")

    jobs = [
        CaptureJob(name="one", family="a", rank=0, run=lambda backend: backend.capture(lambda: None)),
        CaptureJob(name="two", family="b", rank=1, run=fail),
    ]
    with CaptureLog() as log:
        capture_all(jobs, EagerGraphs(), budget_s=60.0)
    assert (log.facts["jobs_done"], log.facts["jobs_planned"]) == (1, 2) and log.facts["capture_s"] >= 0
    assert log.facts["failures"] == ["graph two could not be captured; b runs eagerly: no capture here"]


def test_two_measurements_take_turns():
    order = []
    first, second = alternating(lambda: order.append("a") or [1.0], lambda: order.append("b") or [2.0], turns=3)
    assert order == ["a", "b", "b", "a", "a", "b"] and (first, second) == ([1.0] * 3, [2.0] * 3)


def test_spans_that_overlap_count_once():
    assert union([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    assert union([]) == 0


def test_outcomes_are_read_from_whole_and_from_broken_off_output():
    plain = [
        "tests/kernels/gpu/test_a.py::test_x[cuda-a b] PASSED                     [ 10%]",
        "tests/kernels/gpu/test_a.py::test_y FAILED                               [ 20%]",
        "tests/kernels/gpu/test_b.py::test_z SKIPPED (needs a CUDA device)        [ 30%]",
        "tests/kernels/gpu/test_b.py::test_running ",
    ]  # fmt: skip
    bad = "tests/kernels/gpu/test_a.py::test_y"
    expected = ({"passed": 1, "failed": 1, "skipped": 1}, [bad])
    assert outcomes(plain) == expected
    assert outcomes([*plain, f"FAILED {bad} - AssertionError: 3 != 4"]) == expected
    workers = [f"[gw0] [ 10%] PASSED {bad} ", "[gw3] [ 20%] ERROR tests/c.py::test_w[x] "]
    assert outcomes(workers) == ({"passed": 1, "error": 1}, ["tests/c.py::test_w[x]"])


def test_tests_marked_gpu_run_as_the_check_calls_them(tmp_path):
    """The command line that stage `kernels` uses, on a folder of its own."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\n@pytest.mark.timeout(5)\ndef test_it():\n    assert True\n\n"
        "@pytest.mark.gpu\ndef test_not():\n    assert False\n\ndef test_other():\n    assert False\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", str(tmp_path), "-o",
         "addopts=--import-mode=importlib", "--continue-on-collection-errors", "-W", "ignore"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    counts, bad = outcomes(done.stdout.splitlines())
    assert counts == {"passed": 1, "failed": 1} and len(bad) == 1 and "test_not" in bad[0]
