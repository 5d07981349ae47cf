"""The main job: the whole loop on this computer under drifting traffic, with a live view and a report."""

from __future__ import annotations

import logging
import os
import platform
import queue
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.live import Live

from paceline.bench.common.lossless import LosslessChecker, LosslessReport
from paceline.config import EngineConfig, PolicyConfig, RolloutConfig, ServiceConfig, TraceConfig
from paceline.errors import ConfigError, PacelineError
from paceline.infra.demo import report as demo_report
from paceline.infra.demo import view as demo_view
from paceline.infra.demo.client import DemoClient
from paceline.infra.demo.scenario import Phase, Traffic, shifting_scenario, steady_scenario
from paceline.infra.demo.stats import DemoStats
from paceline.infra.service.stop_signals import StopSignals

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """What the command line can set."""

    minutes: float = 5.2
    """Minutes of traffic; starting, checking and reporting come on top (about one minute)."""
    replicas: int = 1
    policy: str = "payoff"
    drafter: str = "bundled"
    scenario: str = "shift"
    """shift: A -> B -> A -> B; steady: A only."""
    concurrency: int = 1
    """Requests in flight."""
    seed: int = 0
    data: Path | None = None
    json: Path | None = None
    html: Path | None = None
    known: tuple[str, ...] = ("tools", "code")
    """Buckets that the first drafter was trained on."""
    shifted: tuple[str, ...] = ("math",)
    data_dir: Path | None = None
    """Where stores and logs go; None: a temporary folder that is removed at the end."""

    def __post_init__(self) -> None:
        if not 0.2 <= self.minutes <= 600:
            raise ConfigError(f"minutes must be in [0.2, 600], got {self.minutes}")
        if self.scenario not in ("shift", "steady"):
            raise ConfigError(f"scenario must be shift or steady, got {self.scenario!r}")
        if not 1 <= self.concurrency <= 64:
            raise ConfigError(f"concurrency must be in [1, 64], got {self.concurrency}")


def demo_config(options: DemoOptions, data_dir: Path) -> ServiceConfig:
    """The service's configuration: one torch thread for serving and one for training, short decision epochs."""
    return ServiceConfig(
        drafter=options.drafter,
        model_name=f"paceline-demo-{os.getpid()}",  # its own keys, should PACELINE_REDIS_URL name a shared Redis
        num_replicas=options.replicas,
        data_dir=str(data_dir),
        port=0,
        trainer_threads=1,
        engine=EngineConfig(num_threads=1, max_running=16),
        trace=TraceConfig(shard_rows=512, flush_interval_s=2.0),
        policy=PolicyConfig(
            policy=options.policy,
            epoch_s=5.0,
            bank_s=20.0,
            hysteresis=1.1,
            interval_s=max(20.0, options.minutes * 60 / 8),
            min_rows=1000,
            min_dwell_s=8.0,
            horizon_s=options.minutes * 60 / 3,
            holdback_percent=25,
            seed=options.seed,
        ),
        # half the requests and half a minute at most: a demo of minutes must see the verdict
        rollout=RolloutConfig(
            canary_percent=50, min_requests=4, max_requests=30, max_s=30.0, freeze_s=60.0, quiet_s=1.0
        ),
    )


def hardware() -> dict:
    """Processor name and cores of this machine."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "platform": f"{platform.system()} {platform.machine()}"}


class _Sender(threading.Thread):
    """One closed-loop client: takes the next request when the last one has ended."""

    def __init__(self, client: DemoClient, take, out: queue.Queue, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._client, self._take, self._out, self._stop_event = client, take, out, stop

    def run(self) -> None:
        while not self._stop_event.is_set():
            phase, plan = self._take()
            if plan is None:
                return
            try:
                self._out.put(self._client.send(plan, phase.name))
            except Exception as e:  # the report counts every failure, whatever it was
                self._out.put(e)
                if self._stop_event.wait(0.2):
                    return


@dataclass(slots=True)
class _PhaseClock:
    phase: Phase
    started_s: float
    ended_s: float


def _drive(
    url: str, config: ServiceConfig, options: DemoOptions, console: Console, stats: DemoStats, signals: StopSignals
) -> tuple[list[_PhaseClock], float]:
    """Send the scenario's traffic; returns phase times and the start in epoch seconds."""
    phases = shifting_scenario(options.known, options.shifted) if options.scenario == "shift" else steady_scenario(options.known)  # fmt: skip
    total_s = options.minutes * 60
    traffic = Traffic(tuple(dict.fromkeys(b for p in phases for b in p.buckets)), options.data, options.seed)
    began, began_epoch = time.monotonic(), time.time()
    ends, at = [], 0.0
    for p in phases:
        at += p.share * total_s
        ends.append(at)
    clocks = [_PhaseClock(p, 0.0, 0.0) for p in phases]
    lock, stop = threading.Lock(), threading.Event()
    out: queue.Queue = queue.Queue()

    def current() -> int:
        now = time.monotonic() - began
        return next((i for i, end in enumerate(ends) if now < end), len(ends))

    def take():
        with lock:
            i = current()
            if i >= len(phases):
                return None, None
            return phases[i], traffic.next(phases[i])

    senders = [_Sender(DemoClient(url, config.model_name, began), take, out, stop) for _ in range(options.concurrency)]
    monitor = DemoClient(url, config.model_name, began)
    state: dict = {}
    for s in senders:
        s.start()
    try:
        with Live(console=console, refresh_per_second=2, transient=False, redirect_stderr=False) as live:
            polled = 0.0
            while any(s.is_alive() for s in senders) or not out.empty():
                signals.check()
                try:
                    item = out.get(timeout=0.25)
                    if isinstance(item, Exception):
                        stats.failures.append(str(item))
                    else:
                        stats.answers.append(item)
                except queue.Empty:
                    pass
                now = time.monotonic() - began
                if now - polled >= 1.0:
                    polled = now
                    fresh = monitor.state()
                    if fresh:
                        state = fresh
                    i = min(current(), len(phases) - 1)
                    live.update(
                        demo_view.render(
                            phase=phases[i].name,
                            bucket=phases[i].bucket,
                            elapsed_s=now,
                            total_s=total_s,
                            answers=stats.of_phase(phases[i].name),
                            state=state,
                            decisions=[d for d in state.get("decisions") or [] if d.get("action") != "hold"],
                        )
                    )
    finally:
        stop.set()
        monitor.close()
    starts = [0.0, *ends[:-1]]
    for c, start, end in zip(clocks, starts, ends, strict=True):
        c.started_s, c.ended_s = start, end
    return clocks, began_epoch


def _check_lossless(stats: DemoStats, target_dir: Path, console: Console) -> LosslessReport:
    greedy = [(a.prompt_token_ids, a.output_token_ids) for a in stats.answers if a.temperature == 0]
    with console.status(f"checking {len(greedy)} greedy answers against the target in fp32"):
        return LosslessChecker(target_dir).check(greedy)


def _result(
    options: DemoOptions,
    stats: DemoStats,
    clocks: list[_PhaseClock],
    state: dict,
    began_epoch: float,
    lossless: LosslessReport,
) -> dict:
    entries = state.get("ledger_entries") or []
    decisions = []
    for d in state.get("decisions") or []:
        decisions.append(d | {"t_s": round(float(d["ts"]) - began_epoch, 2)})
    phases = []
    for c in clocks:
        spent = sum(
            e["seconds"]
            for e in entries
            if e["kind"] != "saving"
            and c.started_s <= e["ts"] - began_epoch < (c.ended_s if c is not clocks[-1] else 1e12)
        )
        phases.append(stats.phase_dict(c.phase.name, c.phase.bucket, spent) | {"started_s": round(c.started_s, 1)})
    swaps = state.get("swaps") or {}
    pauses = [float(p) for p in swaps.get("pause_ms") or []]
    return {
        "target": {"name": state.get("target") or "bundled", "version": state.get("target_version")},
        "drafter": {"name": options.drafter, "first_version": state.get("first_version"), "final_version": state.get("version")},
        "policy": options.policy,
        "scenario": options.scenario,
        "seed": options.seed,
        "hardware": hardware(),
        "phases": phases,
        "decisions": decisions,
        "ledger": state.get("ledger") or {"spent_s": 0.0, "saved_s": 0.0, "net_s": 0.0},
        "ledger_cells": state.get("ledger_cells") or [],
        "saved_interval_s": state.get("saved_interval_s") or [0.0, 0.0],
        "ledger_entries": entries,
        "swaps": {
            "count": int(swaps.get("count") or 0),
            "pause_ms_p50": float(np.percentile(pauses, 50)) if pauses else None,
            "pause_ms_p99": float(np.percentile(pauses, 99)) if pauses else None,
            "requests_dropped": len(stats.failures),
            "times_s": [round(float(t) - began_epoch, 2) for t in swaps.get("times") or []],
        },
        "lossless": {
            "checked": lossless.checked,
            "near_ties": lossless.near_ties,
            "mismatches": lossless.mismatches,
            "largest_gap_share": round(lossless.largest_gap, 5),
        },
        "feedback": state.get("feedback") or {"produced": 0, "delivered": 0, "dropped": 0},
        "failures": stats.failures[:20],
    }  # fmt: skip


def run_demo(options: DemoOptions, console: Console) -> dict:
    """Run the demo and return its JSON document; the caller prints nothing else.

    Starts Ray, Redis, the application and the controller, and stops them all at the end, also on Ctrl-C.
    Raises: PacelineError when the service cannot start or no request succeeded.
    """
    from paceline.infra.app import run_service, stop_service
    from paceline.paths import resolve_model

    own_dir = options.data_dir is None
    data_dir = Path(tempfile.mkdtemp(prefix="paceline-demo-")) if options.data_dir is None else options.data_dir
    config = demo_config(options, data_dir)
    stats = DemoStats()
    service = None
    # SIGTERM stops like Ctrl-C: processes and folders are cleaned up
    with StopSignals() as signals:
        try:
            with console.status("starting Ray, Redis, the replica and the controller (about 30 s)"):
                service = run_service(config)
            signals.check()
            clocks, began_epoch = _drive(service.url, config, options, console, stats, signals)
            client = DemoClient(service.url, config.model_name, time.monotonic())
            with console.status("waiting for the last statistics"):
                state = _final_state(client, signals)
            client.close()
            if not stats.answers:
                raise PacelineError(f"no request succeeded; the first failure was: {(stats.failures or ['none'])[0]}")
        finally:
            with console.status("stopping the service"):
                if service is not None:
                    stop_service(service)
                if own_dir:
                    shutil.rmtree(data_dir, ignore_errors=True)
    lossless = _check_lossless(stats, resolve_model(config.model), console)
    result = _result(options, stats, clocks, state, began_epoch, lossless)
    console.print(demo_report.result_table(result))
    for line in demo_report.summary_lines(result):
        console.print(line, highlight=False)
    if options.json:
        demo_report.write_json(result, options.json)
        console.print(f"JSON: {options.json}")
    if options.html:
        demo_report.write_html(result, stats.answers, options.html)
        console.print(f"HTML report: {options.html}")
    return result


def _final_state(client: DemoClient, signals: StopSignals, timeout_s: float = 20.0) -> dict:
    """Wait until produced feedback has been folded and no job runs, or the time is up."""
    deadline = time.monotonic() + timeout_s
    state: dict = {}
    while time.monotonic() < deadline:
        signals.check()
        state = client.state() or state
        feedback = state.get("feedback") or {}
        if not state.get("job") and feedback.get("produced", 0) <= feedback.get("delivered", 0) + feedback.get(
            "dropped", 0
        ):
            break
        time.sleep(0.5)
    return state
