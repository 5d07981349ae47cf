"""Stages with an engine: tokens and graphs of the bundled models, rounds at 8B size, staging, traces, a training job."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from paceline.bench.common.engine_run import encode, load_named_drafter, load_target
from paceline.bench.common.lossless import LosslessChecker
from paceline.bench.common.workloads import load_prompts
from paceline.bench.engine.arms import BenchGroup, EngineArm, GroupTiming, make_groups
from paceline.bench.engine.cells import PLAIN, lossless_row, split_of_rounds
from paceline.bench.engine.shapes import random_target
from paceline.bench.gpu_check.measure import (
    SteadyLoad,
    alternating,
    drafter_faults,
    drafter_taps,
    make_engine,
    ms_summary,
    random_drafter,
)
from paceline.bench.gpu_check.stages import NO_GPU, Check, reason_of
from paceline.contracts import ArmSpec, Group, TrainJob
from paceline.errors import PacelineError
from paceline.kernels.dispatch import BACKEND_VARIABLE
from paceline.paths import BUNDLED_DRAFTER, BUNDLED_DRAFTERS, resolve_drafter, resolve_model
from paceline.serving.drafters.interface import Drafter
from paceline.serving.sampling.request import RequestTrace
from paceline.serving.target_model.model import TargetModel

_LEAST_S = 10.0
"""Nothing new is begun with less time than this; the figures so far are kept."""
_SHAPE = "qwen3-8b"
_ARMS = (("eager", "", 0.0), ("reference", "reference", 0.0), ("graphs", "", 12.0))
"""Name, kernel backend ('' = the device's own), seconds for capturing graphs."""


def engine(check: Check) -> None:
    """Greedy answers of the bundled models: eager, captured and reference rounds against plain decoding and fp32."""
    device = check.device()
    size, max_tokens = (2, 8) if check.is_dry else (6, 64)
    targets: dict[str, TargetModel] = {}
    for backend in ("", "reference"):
        with _kernel_backend(backend):
            targets[backend] = load_target("bundled", device=device.type, drafters=BUNDLED_DRAFTERS)
    prompts = [tuple(encode(targets[""], p.text))[:96] for p in load_prompts("code", None, size)]
    (group,) = make_groups(
        prompts, bucket="code", batch=size, group_size=size, temperature=0.0, max_tokens=max_tokens, seed=0
    )
    plain, plain_figures = _run_arm(PLAIN, "none", targets[""], group, 0.0)
    check.save(num_prompts=size, max_tokens=max_tokens, plain=plain_figures)
    checker = LosslessChecker(resolve_model("bundled"))
    rows: list[dict[str, Any]] = [{"drafter": name, "arms": {}} for name in BUNDLED_DRAFTERS]
    texts = {name: {plain.token_ids} for name in BUNDLED_DRAFTERS}
    for (arm, backend, capture_s), row in itertools.product(_ARMS, rows):
        name = row["drafter"]
        if capture_s and check.is_dry:
            row["arms"][arm] = {"skipped": NO_GPU}
        elif _is_late(check):
            row["arms"][arm] = {"skipped": "no time left"}
        else:
            try:
                with _kernel_backend(backend):
                    timing, figures = _run_arm(arm, name, targets[backend], group, capture_s)
                figures["lossless"] = lossless_row([group], {PLAIN: [plain], arm: [timing]}, checker, 1, arm)
                texts[name].add(timing.token_ids)
            except Exception as e:  # other arms may run
                figures = {"error": reason_of(e)}
            row["arms"][arm] = figures
            row["arms_agree"] = len(texts[name]) == 1
        words, fault = _engine_words(rows)
        check.save(words, drafters=rows)
        _free(device)
    check.fault(fault)


def _run_arm(
    arm: str, drafter: str, target: TargetModel, group: BenchGroup, capture_s: float
) -> tuple[GroupTiming, dict[str, Any]]:
    """The answers of one engine, and what is told of it."""
    context = max(map(len, group.prompts)) + group.params[0].max_tokens + 32
    began = time.perf_counter()
    made, facts = make_engine(
        target, load_named_drafter(drafter, target), batch=group.batch, context=context, capture_s=capture_s
    )
    facts["start_s"] = round(time.perf_counter() - began, 2)
    timing = EngineArm(arm, made, Group.PLAIN if arm == PLAIN else Group.ADAPTIVE).run(group)
    assert timing.whole is not None
    accepted = timing.num_accepted_tokens / max(timing.num_request_rounds, 1)
    figures = {
        "backend": target.kernels.backend,
        "forward": target.forward_name,
        "acceptance_length": round(1 + accepted, 3),
    }
    return timing, {**figures, **facts, **split_of_rounds([timing.whole]), "failures": drafter_faults(made, facts)}


@contextlib.contextmanager
def _kernel_backend(name: str) -> Iterator[None]:
    """Let models that are loaded meanwhile choose these kernels; '' leaves the choice."""
    before = os.environ.get(BACKEND_VARIABLE)
    if name:
        os.environ[BACKEND_VARIABLE] = name
    try:
        yield
    finally:
        if name:
            os.environ.pop(BACKEND_VARIABLE)
            if before is not None:
                os.environ[BACKEND_VARIABLE] = before


def _engine_words(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """The line of the table, and what is wrong, '' for nothing."""
    arms = [arm for row in rows for arm in row["arms"].values()]
    checked = [arm["lossless"] for arm in arms if "lossless" in arm]
    mismatches, ties = (sum(found[key] for found in checked) for key in ("num_mismatches", "num_near_ties"))
    graphs = "/".join(str(row["arms"].get("graphs", {}).get("num_graphs", "-")) for row in rows)
    agree = sum(bool(row.get("arms_agree")) for row in rows)
    words = f"{agree} of {len(rows)} drafters: all arms give the same tokens; {mismatches} mismatches, {ties} near ties"
    faults = [f"{mismatches} tokens are not the target's"] if mismatches else []
    for row in rows:
        for arm, found in row["arms"].items():
            wrong = found.get("error") or next(iter(found.get("failures", ())), "")
            faults += [f"{row['drafter']} {arm}: {wrong}"] if wrong else []
    return f"{words}; graphs {graphs}", "; ".join(faults)


def _is_late(check: Check) -> bool:
    return check.left_s() < (1.0 if check.is_dry else _LEAST_S)


def _sized_target(check: Check, device: torch.device, taps: tuple[int, ...] | None = None) -> TargetModel:
    return random_target(_SHAPE, device, is_scaled_down=check.is_dry, tap_layers=taps)


def _num_layers(check: Check) -> int:
    return 4 if check.is_dry else 36


def drafters(check: Check) -> None:
    """Rounds of the four drafters at 8B size, 8 nodes verified: where the time goes, launches, waits."""
    device = check.device()
    rows: list[dict[str, Any]] = []
    prompt, rounds = (16, 3) if check.is_dry else (512, 20)
    order = [(name, 1) for name in BUNDLED_DRAFTERS]
    if not check.is_dry:
        order += [
            (name, 16) for name in reversed(BUNDLED_DRAFTERS)
        ]  # so that a target made is used as long as possible
    for taps, cells in itertools.groupby(order, key=lambda cell: drafter_taps(cell[0], _num_layers(check))):
        target = _sized_target(check, device, taps)
        for name, batch in cells:
            if _is_late(check):
                break
            row: dict[str, Any] = {"drafter": name, "batch": batch}
            try:
                make, _ = random_drafter(name, target)
                row |= _steady_row(target, make(), batch, prompt, 6.0, rounds, num_top=0 if check.is_dry else 12)
                del make
            except Exception as e:  # the other drafters may run
                row["error"] = reason_of(e)
            rows.append(row)
            check.save(_round_words(rows), rows=rows)
            _free(device)
        del target
        _free(device)
    check.fault(_row_fault(rows))


def _row_fault(rows: list[dict[str, Any]]) -> str:
    """The first thing that went wrong."""
    found = (f"{r['drafter']}: {wrong}" for r in rows for wrong in (r.get("error"), *r.get("failures", ())) if wrong)
    return next(found, "")


def _steady_row(
    target: TargetModel, drafter: Drafter | None, batch: int, prompt_tokens: int, capture_s: float, num_rounds: int,
    num_top: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Full rounds of one engine, which lives no longer, and what is told of its graphs."""
    made, facts = make_engine(target, drafter, batch=batch, context=prompt_tokens + 128, capture_s=capture_s)
    load = SteadyLoad(made, batch=batch, prompt_tokens=prompt_tokens)
    figures = load.figures(num_rounds, num_top=num_top)
    return {**facts, **figures, "failures": drafter_faults(made, facts)}


def _round_words(rows: list[dict[str, Any]]) -> str:
    """Each row's round in short."""
    words = []
    for row in rows:
        name = f"{row['drafter']} x{row['batch']}" + ("" if row.get("has_graphs", True) else " eager")
        if "error" in row:
            words.append(f"{name}: {row['error'][:60]}")
        elif "num_operators" in row:
            words.append(f"{name}: {row['num_operators']:.0f} operators")
        elif row["device_ms"] is None:
            words.append(f"{name}: {row['round_ms']:.1f} ms, {row['null_because']}")
        else:
            words.append(f"{name}: {row['round_ms']:.1f} ms, idle {row['idle_share']:.0%}")
    return "; ".join(words)


def idle(check: Check) -> None:
    """Share of whole rounds in which the device does nothing: plain and with SpecBlock, with graphs and eager."""
    device = check.device()
    target = _sized_target(check, device)
    rows: list[dict[str, Any]] = []
    prompt, rounds, batches = (16, 3, (1,)) if check.is_dry else (256, 30, (1, 64, 16))
    make, _ = random_drafter(BUNDLED_DRAFTER, target)
    captures = (0.0,) if check.is_dry else (6.0, 0.0)
    for capture_s, batch, name in itertools.product(captures, batches, (PLAIN, BUNDLED_DRAFTER)):
        if _is_late(check):
            break
        row: dict[str, Any] = {"drafter": name, "batch": batch, "has_graphs": capture_s > 0}
        try:
            row |= _steady_row(target, None if name == PLAIN else make(), batch, prompt, capture_s, rounds)
        except Exception as e:  # other batches may fit
            row["error"] = reason_of(e)
        rows.append(row)
        check.save(_round_words(rows), rows=rows)
        _free(device)
    check.fault(_row_fault(rows))


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()  # an engine and its parts know one another
        torch.cuda.empty_cache()


def swap(check: Check) -> None:
    """Rounds while another thread stages weights over and over, against rounds without, in turn; then one publication."""
    device = check.device()
    target = _sized_target(check, device)
    make, model = random_drafter(BUNDLED_DRAFTER, target)
    state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    num_bytes = sum(value.numel() * value.element_size() for value in state.values())
    prompt, rounds, batch, turns = (16, 4, 2, 2) if check.is_dry else (256, 40, 16, 4)
    # Requests must outlive all rounds; none of them is pinned to the slot that is staged into.
    context = prompt + 2 * turns * rounds * 2 + 128
    made, facts = make_engine(target, make(), batch=batch, context=context, capture_s=6.0, spawn=make)
    load = SteadyLoad(made, batch=batch, prompt_tokens=prompt)
    stage_s: list[float] = []
    faults: list[Exception] = []

    def stage(version: str) -> None:
        began = time.perf_counter()
        if not made.slots.stage(version, state):
            raise PacelineError("the second slot must be free to stage into")
        stage_s.append(time.perf_counter() - began)

    def stage_until(is_over: threading.Event) -> None:
        try:
            while not is_over.is_set():
                stage(f"v{len(stage_s)}")
        except Exception as e:
            faults.append(e)

    def staged_rounds() -> list[float]:
        is_over = threading.Event()
        thread = threading.Thread(target=stage_until, args=(is_over,), name="staging")
        thread.start()
        try:
            return load.round_s(rounds)
        finally:
            is_over.set()
            thread.join()
            if faults:
                raise faults[0]

    stage("first")  # makes what the second slot needs
    stage_s.clear()
    alone, beside = alternating(lambda: load.round_s(rounds), staged_rounds, turns)
    figures: dict[str, Any] = {"without": ms_summary(alone), "with": ms_summary(beside), "batch": batch, **facts}
    figures["p50_ratio"] = round(figures["with"]["p50_ms"] / figures["without"]["p50_ms"], 4)
    figures["p99_ratio"] = round(figures["with"]["p99_ms"] / figures["without"]["p99_ms"], 4)
    figures |= {"weight_bytes": num_bytes, "num_staged": len(stage_s), "stage_s": round(sum(stage_s) / len(stage_s), 3)}
    pause = made.call_between_rounds(made.slots.publish)
    load.round_s(1)
    figures["publish_pause_ms"] = round(pause.result(1.0), 4)
    words = f"p50 x{figures['p50_ratio']:.2f}, p99 x{figures['p99_ratio']:.2f} while staging; staging {figures['stage_s']:.2f} s"
    check.save(f"{len(stage_s)} times staged; {NO_GPU}" if check.is_dry else words, **figures)


class KeptTraces:
    """A trace sink in memory, which can be switched off; also the shard of a training job."""

    def __init__(self) -> None:
        self.is_on = True
        self.traces: list[RequestTrace] = []

    def wants(self, request_id: str, bucket: str) -> bool:
        return self.is_on

    def record_trace(self, trace: RequestTrace) -> None:
        self.traces.append(trace)

    def read_shard(self, shard_id: str) -> list[RequestTrace]:
        """All of them, whatever the shard is called."""
        return self.traces


def traces(check: Check) -> None:
    """Rounds of traced requests against rounds without traces, in turn, at a real vocabulary."""
    device = check.device()
    target = _sized_target(check, device)
    sink = KeptTraces()
    prompt, rounds, batch, turns = (16, 6, 4, 2) if check.is_dry else (64, 30, 64, 3)
    made, facts = make_engine(target, None, batch=batch, context=prompt + rounds + 64, capture_s=6.0, traces=sink)
    count = itertools.count()

    def rounds_of(is_on: bool) -> list[float]:
        sink.is_on = is_on
        load = SteadyLoad(made, batch=batch, prompt_tokens=prompt, tag=f"traces{next(count)}")
        try:
            return load.round_s(rounds)
        finally:
            load.end()

    without, traced = alternating(lambda: rounds_of(False), lambda: rounds_of(True), turns)
    figures: dict[str, Any] = {"without": ms_summary(without), "with": ms_summary(traced), "batch": batch}
    figures |= {"vocab_size": target.vocab_size, "num_graphs": facts["num_graphs"]}
    more = figures["with"]["p50_ms"] - figures["without"]["p50_ms"]
    figures["p50_ratio"] = round(figures["with"]["p50_ms"] / figures["without"]["p50_ms"], 4)
    figures["request_round_ms"] = round(more / batch, 5)
    words = f"p50 x{figures['p50_ratio']:.2f} with traces" if not check.is_dry else NO_GPU
    check.save(f"V {target.vocab_size}, {batch} requests: {words}", **figures)


def training(check: Check) -> None:
    """One order of the online trainer on the device, over traces that the bundled target leaves here."""
    from paceline.adapt.online.trainer import run_training_job
    from paceline.adapt.versions.registry import DrafterRegistry
    from paceline.serving.loading.families import read_drafter_files

    device = check.device()
    folder = resolve_drafter(BUNDLED_DRAFTER)
    assert folder is not None
    target = load_target("bundled", device=device.type, drafters=[BUNDLED_DRAFTER])
    sink = KeptTraces()
    count, max_tokens = (24, 12) if check.is_dry else (48, 64)
    prompts = [tuple(encode(target, p.text))[:64] for p in load_prompts("math", None, count)]
    groups = make_groups(
        prompts, bucket="math", batch=8, group_size=count, temperature=0.0, max_tokens=max_tokens, seed=0
    )
    drafter = load_named_drafter(BUNDLED_DRAFTER, target)
    made, _ = make_engine(target, drafter, batch=8, context=64 + max_tokens + 32, capture_s=0.0, traces=sink)
    EngineArm("training", made, Group.ADAPTIVE).run(groups[0])
    check.save(num_traces=len(sink.traces), trace_rows=sum(len(t.token_ids) for t in sink.traces))
    config, state = read_drafter_files(folder)
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as root:
        registry = DrafterRegistry(root)
        base = registry.put(state, drafter_type=config["drafter_type"], config=config, target_version=target.version)
        job = TrainJob(
            job_id="gpu-check", bucket="math", arm=ArmSpec(name="full", parameters="full", num_rows=10**6, rehearsal_share=0.0),
            base_version=base.version, first_version=base.version, shard_ids=["all"], rehearsal_shard_ids=[], seed=0,
            time_limit_s=max(check.left_s() - 3.0, 1.0),
        )  # fmt: skip
        result = run_training_job(
            job, sink, registry, resolve_model("bundled"), device=device.type,
            progress=lambda done, total, info: losses.append(float(info["nll"])),
        )  # fmt: skip
    figures = {"status": result.status, "reason_of_status": result.reason, "num_steps": len(losses), "losses": losses}
    figures |= {"train_s": round(result.train_s, 3), "score_s": round(result.shadow_s, 3)}
    words = NO_GPU if check.is_dry else f"{result.train_s:.2f} s, scores {result.shadow_s:.2f} s"
    check.save(f"{result.status}, {len(losses)} steps; {words}", **figures)
    if result.status not in ("accepted", "rejected", "learning"):
        raise PacelineError(f"the burst must score what it learns, got {result.status}: {result.reason}")
