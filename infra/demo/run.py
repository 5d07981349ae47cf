"""Demo run: the whole loop on this computer under drifting traffic, with a live view and a report."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import math
import os
import platform
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated as A
from typing import Any, Protocol

import msgspec
import numpy as np
from rich.console import Console
from rich.live import Live

from paceline.bench.common.lossless import LosslessChecker, LosslessReport
from paceline.bench.common.padded import TARGET_NAME, copy_drafter, pad_target
from paceline.bench.common.result_file import write_json
from paceline.bench.common.workloads import has_template
from paceline.config import (
    POLICIES,
    POLICY_HELP,
    PolicyConfig,
    RolloutConfig,
    ServeOptions,
    ServiceConfig,
    TraceConfig,
    leave_tokens,
)  # fmt: skip
from paceline.contracts import Decision
from paceline.errors import ConfigError, PacelineError
from paceline.infra.controller.snapshot import Snapshot
from paceline.infra.controller.store import held_entries
from paceline.infra.demo import report as demo_report
from paceline.infra.demo import view as demo_view
from paceline.infra.demo.client import MAX_TOKENS, DemoClient
from paceline.infra.demo.day_report import day_dict, kind_table
from paceline.infra.demo.diary import Answer, Diary, Starts, open_diary, run_seconds
from paceline.infra.demo.pools import NUM_KINDS, Pools, bucket_pools, fitting_pools, kind_pools
from paceline.infra.demo.scenario import (
    DAY_GROUPS,
    GROUP_PATTERN,
    Phase,
    PlannedRequest,
    Traffic,
    day_scenario,
    shifting_scenario,
    steady_scenario,
)  # fmt: skip
from paceline.infra.demo.stats import DemoStats, own_version_s
from paceline.infra.service.stop_signals import StopSignals
from paceline.infra.service.stores import StorePaths, is_adaptive
from paceline.infra.state.log import LogFile
from paceline.paths import DECISIONS, resolve_model
from paceline.records import DataFolder, Drafter, HtmlFile, JsonFile, Model, Setting, record, require

log = logging.getLogger(__name__)

START_S = 25.0
"""What Ray, Redis and a replica take to start on two cores, about."""
DAY_TRACES = TraceConfig(max_bytes=16 * 2**30, max_age_s=30 * 86_400.0)
"""A day's text stays whole, which others can learn from later: 0.4 MB an answer of SmolLM2."""
NUM_CHECKED_ANSWERS = 200
"""Greedy answers of a target of other people's that are checked in fp32, which takes a second for each."""


@record()
class DemoOptions:
    """Ends with a table; exit code 1 if an answer was not the target's own or a request was lost.

    The bundled target gets more neurons, all of weight zero: it says the same at the speed of a model of 24 M parameters. vLLM serves
    the bundled one itself.

    Examples: paceline demo. paceline demo --scenario day --model smollm2 --minutes 120 --data DIR --data-dir day (goes on where it
    stopped).
    """

    minutes: A[
        float, Setting("Minutes of traffic; start and closing checks add about one, of a real model some more.", ge=0.2, le=600)
    ] = 6.0  # fmt: skip
    replicas: A[int, Setting("Serving replicas.", ge=1)] = 1
    policy: A[str, Setting(POLICY_HELP, choices=POLICIES)] = "payoff"
    model: Model = "bundled"
    drafter: Drafter = "bundled"
    scenario: A[
        str,
        Setting(
            "shift: known -> unseen -> other unseen -> the first unseen traffic again; steady: known only; day: kinds of text that "
            "come, go and return; give it an hour or more.",
            choices=("shift", "steady", "day"),
        ),
    ] = "shift"
    kinds: A[
        tuple[str, ...], Setting(f"Kinds of text of a day; default: the {NUM_KINDS} of which --data has most.")
    ] = ()
    trainer_price: A[
        float,
        Setting(
            "What a second of the trainer's core counts in seconds of serving; 1: as if it could serve.", ge=0, le=100
        ),
    ] = 0.25  # it would idle; what serving loses beside it is measured and comes on top
    engine: A[
        str,
        Setting(
            "paceline: our own engine; vllm: a real vLLM with our plugin, on the CPU.", choices=("paceline", "vllm")
        ),
    ] = "paceline"
    vllm_python: A[Path | None, Setting("Python of the environment with vLLM; default: .venv-vllm/bin/python.")] = None
    deltas: A[
        int, Setting("Classes whose versions are deltas of the first drafter; 0: they are whole weights.", ge=0, le=64)
    ] = 0
    concurrency: A[int | None, Setting("Requests in flight; default: 1, on vLLM 4.", ge=1, le=64)] = None
    seed: A[int, Setting("Seed of traffic and sampling.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None
    html: HtmlFile = None
    verbose: A[bool, Setting("Show the processes' logs.", short="-v")] = False
    known: tuple[str, ...] = ("tools", "code")
    """Buckets that the first drafter was trained on."""
    shifted: tuple[str, ...] = ("math",)
    brief: tuple[str, ...] = ("facts",)
    """Unseen, too, but gone before learning it could pay."""
    data_dir: A[
        Path | None,
        Setting(
            "Keep stores, logs and answers in this folder, where the same command goes on if it was stopped; default: a temporary "
            "one.",
        ),
    ] = None  # fmt: skip

    def __post_init__(self) -> None:
        require(not self.deltas or self.engine == "paceline", "--deltas must be 0 on another engine", self.deltas)
        require(not self.kinds or self.scenario == "day", "--kinds must be those of --scenario day", self.scenario)

    @property
    def num_clients(self) -> int:
        return self.concurrency or (4 if self.engine == "vllm" else 1)

    def settings(self) -> dict[str, Any]:
        """What must be equal in all parts of a run, as JSON values; a longer day begins like a shorter one."""
        names = ("model", "drafter", "policy", "scenario", "trainer_price", "deltas", "replicas", "seed")
        more = {
            "data": None if self.data is None else str(self.data.resolve()), "concurrency": self.num_clients,
            "minutes": None if self.scenario == "day" else self.minutes,
        }  # fmt: skip
        return {name: getattr(self, name) for name in names} | {"kinds": list(self.kinds)} | more


def _residual_s(options: DemoOptions) -> float:
    """Mean time from a random moment to the end of its phase: the sum of squared lengths over twice their sum."""
    return options.minutes * 60 * sum(p.share**2 for p in _phases(options)) / 2


def with_end(config: ServiceConfig, options: DemoOptions, begins_at: float) -> ServiceConfig:
    """The configuration that knows when the demo will end: what is learned last could not pay back."""
    end = datetime.datetime.fromtimestamp(begins_at + options.minutes * 60, datetime.UTC)
    return replace(config, policy=replace(config.policy, ends_at=end.isoformat()))


def _phases(options: DemoOptions) -> tuple[Phase, ...]:
    if options.scenario == "steady":
        return steady_scenario(options.known)
    if options.scenario == "day":
        return day_scenario(options.kinds, options.minutes, options.seed)
    return shifting_scenario(options.known, options.shifted, options.brief)


def pools_of(options: DemoOptions, tokenizer: Any = None) -> Pools:
    """Bucket -> its prompts. Raises: ConfigError."""
    if options.scenario == "day":
        return kind_pools(options.kinds, options.data, tokenizer)
    return bucket_pools(dict.fromkeys(b for p in _phases(options) for b in p.buckets), options.data, tokenizer)


def demo_config(options: DemoOptions) -> ServiceConfig:
    """The service's configuration: one thread for serving and one for training; short decision epochs, except for a day.

    Raises: ConfigError for a day with a drafter that has nothing to train.
    """
    named = {"model": options.model} | ({} if options.drafter == "bundled" else {"drafter": options.drafter})
    base = ServeOptions(changes=named).service()
    if options.scenario == "day":
        require(is_adaptive(base), "--drafter must be one with weights, which a day can train", base.drafter)
    config = replace(
        base,
        model_name=f"paceline-demo-{os.getpid()}",  # its own keys, should PACELINE_REDIS_URL name a shared Redis
        num_replicas=options.replicas,
        port=0,
        trainer_threads=1,
        engine=replace(base.engine, num_threads=1, max_running=16, max_class_deltas=options.deltas),
    )
    # the demo's client draws the groups
    policy = PolicyConfig(
        policy=options.policy, trainer_price=options.trainer_price, trusts_groups=True, seed=options.seed
    )
    if options.scenario == "day":
        return replace(config, trace=DAY_TRACES, policy=policy)
    return replace(
        config,
        trace=TraceConfig(shard_rows=512, flush_interval_s=2.0),
        policy=replace(
            policy,
            epoch_s=5.0,
            bank_s=30.0,
            interval_s=max(20.0, options.minutes * 60 / 8),
            min_rows=3200,  # some 32 requests: the learner learns 16 before any is scored, and fewer scores are not sure
            horizon_s=_residual_s(options),
            holdback_percent=25,
        ),
        rollout=RolloutConfig(min_requests=4, freeze_s=60.0, quiet_s=1.0),
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


class Schedule:
    """The phases and what is sent in each, by the time since the demo began. Thread-safe."""

    def __init__(
        self, options: DemoOptions, pools: Pools, *, starts: Starts = (),
        sent: Mapping[str, Collection[int]] | None = None,
    ) -> None:  # fmt: skip
        """starts: of all parts of the run, the last of which begins now; sent: places that were answered; see Diary."""
        self.phases = _phases(options)
        self.total_s = options.minutes * 60
        self.ends = list(itertools.accumulate(p.share * self.total_s for p in self.phases))
        self._starts = starts or [(0.0, time.time())]
        self.began = time.monotonic() - self._starts[-1][0]
        groups = DAY_GROUPS if options.scenario == "day" else GROUP_PATTERN
        self._traffic, self._lock = Traffic(pools, options.seed, groups=groups, sent=sent), threading.Lock()

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def at(self, ts: float) -> float:
        """Seconds since the demo began of a moment in seconds since the epoch."""
        return run_seconds(self._starts, ts)

    def current(self) -> Phase | None:
        """The phase of now, None after the last one."""
        now = self.elapsed_s()
        return next((p for p, end in zip(self.phases, self.ends, strict=True) if now < end), None)

    def take(self) -> tuple[Phase, PlannedRequest] | None:
        """The next request, None at the end."""
        with self._lock:
            phase = self.current()
            return None if phase is None else (phase, self._traffic.next(phase))

    def spans(self) -> list[tuple[Phase, float, float]]:
        """(phase, its begin, its end) in seconds since the demo began; the last one ends never."""
        starts, ends = [0.0, *self.ends[:-1]], [*self.ends[:-1], float("inf")]
        return list(zip(self.phases, starts, ends, strict=True))


class Client(Protocol):
    """Who sends requests and reads the state; used by one thread."""

    def send(self, plan: PlannedRequest, phase: str) -> Answer: ...

    def state(self) -> Snapshot | None: ...

    def close(self) -> None: ...


class _Sender(threading.Thread):
    """One closed-loop client: takes the next request when the last one has ended."""

    def __init__(self, client: Client, schedule: Schedule, out: queue.Queue, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._client, self._schedule, self._out, self._stop_event = client, schedule, out, stop

    def run(self) -> None:
        while not self._stop_event.is_set() and (taken := self._schedule.take()) is not None:
            phase, plan = taken
            try:
                self._out.put(self._client.send(plan, phase.name))
            except Exception as e:  # the report counts every failure, whatever it was
                self._out.put(e)
                if self._stop_event.wait(0.2):
                    return


def drive(
    make_client: Callable[[], Client], schedule: Schedule, options: DemoOptions, console: Console, stats: DemoStats,
    signals: StopSignals, diary: Diary | None = None,
) -> None:  # fmt: skip
    """Send the schedule's traffic. diary: notes what comes."""
    stop = threading.Event()
    out: queue.Queue = queue.Queue()
    monitor, *clients = [make_client() for _ in range(options.num_clients + 1)]
    senders = [_Sender(client, schedule, out, stop) for client in clients]
    for s in senders:
        s.start()
    state, polled, lines = Snapshot(), 0.0, demo_view.Lines(console)
    try:
        with Live(console=console, refresh_per_second=2, transient=False, redirect_stderr=False) as live:
            while any(s.is_alive() for s in senders) or not out.empty():
                signals.check()
                with contextlib.suppress(queue.Empty):
                    stats.take(item := out.get(timeout=0.25))
                    if diary is not None:
                        diary.note(item)
                now = schedule.elapsed_s()
                if now - polled >= 1.0:
                    polled, state = now, monitor.state() or state
                    phase = schedule.current() or schedule.phases[-1]
                    shown: dict[str, Any] = {
                        "phase": phase.name, "bucket": phase.bucket, "elapsed_s": now, "total_s": schedule.total_s,
                        "answers": stats.of_phase(phase.name), "state": state,
                    }  # fmt: skip
                    if console.is_terminal:
                        live.update(demo_view.render(**shown))
                    else:
                        lines.say(**shown)
    finally:
        stop.set()
        monitor.close()


def _check_lossless(stats: DemoStats, model: str, console: Console) -> LosslessReport:
    greedy = [(a.prompt_token_ids, a.output_token_ids) for a in stats.answers if a.temperature == 0]
    if model != "bundled":
        greedy = greedy[:: max(1, math.ceil(len(greedy) / NUM_CHECKED_ANSWERS))]
    with console.status(f"checking {len(greedy)} greedy answers against the target in fp32"):
        return LosslessChecker(resolve_model(model)).check(greedy)


def _result(
    options: DemoOptions, drafter: str, stats: DemoStats, schedule: Schedule, state: Snapshot, lossless: LosslessReport
) -> dict:
    """The JSON document."""
    phases = []
    for phase, start, end in schedule.spans():
        spent = [e.seconds for e in state.ledger_entries if e.kind != "saving" and start <= schedule.at(e.ts) < end]
        own_s = own_version_s(stats.of_phase(phase.name), state.first_version, start)
        more = {"started_s": round(start, 1), "own_version_s": None if own_s is None else round(own_s, 2)}
        phases.append(stats.phase_dict(phase.name, phase.bucket, sum(spent)) | more)
    pauses = state.swaps.pause_ms
    plain = msgspec.to_builtins
    return {
        "target": {
            "name": TARGET_NAME if options.model == "bundled" else options.model,
            "version": state.target_version,
        },
        "drafter": {
            "name": drafter,
            "first_version": state.first_version,
            "class_versions": state.class_versions,
        },
        "policy": options.policy,
        "trainer_price": options.trainer_price,
        "scenario": options.scenario,
        "seed": options.seed,
        "hardware": hardware(),
        "phases": phases,
        "decisions": [plain(d) | {"t_s": round(schedule.at(d.ts), 2)} for d in state.decisions],
        "ledger": plain(state.ledger),
        "ledger_cells": plain(state.ledger_cells),
        "saved_interval_s": list(state.saved_interval_s),
        "rows": {
            name: (belief.fresh_rows, belief.required_rows)
            for name, belief in (state.bandit.beliefs if state.bandit else {}).items()
        },
        "ledger_entries": [plain(e) | {"t_s": round(schedule.at(e.ts), 2)} for e in state.ledger_entries],
        "swaps": {
            "count": state.swaps.count,
            "pause_ms_p50": float(np.percentile(pauses, 50)) if pauses else None,
            "pause_ms_p99": float(np.percentile(pauses, 99)) if pauses else None,
            "requests_dropped": len(stats.failures),
            "times_s": [round(schedule.at(t), 2) for t in state.swaps.times],
        },
        "lossless": {
            "checked": lossless.checked,
            "near_ties": lossless.near_ties,
            "mismatches": lossless.mismatches,
            "largest_gap_share": round(lossless.largest_gap, 5),
        },
        "feedback": plain(state.feedback),
        "failures": stats.failures[:20],
    } | ({"day": day_dict(stats.answers, state)} if options.scenario == "day" else {})


def run_demo(options: DemoOptions, console: Console) -> dict:
    """Run the demo and return its JSON document; the caller prints nothing else.

    Starts Ray, Redis, the application and the controller, and stops them all at the end, also on Ctrl-C.
    Raises: PacelineError when the service cannot start or no request succeeded.
    """
    from paceline.infra.app import run_service, stop_service
    from paceline.infra.demo.vllm_run import run_vllm_demo
    from paceline.serving.loading.checkpoint import open_checkpoint

    leave_tokens()
    if options.engine == "vllm":
        return run_vllm_demo(options, demo_config(options), console)
    config = demo_config(options)
    drafter = config.drafter
    with console.status("reading the prompts"):
        tokenizer = open_checkpoint(resolve_model(options.model)).tokenizer()
        pools, is_raw = pools_of(options, tokenizer), not has_template(tokenizer)
    settings, has_kinds = options.settings(), options.scenario == "day"
    options = replace(options, kinds=tuple(pools) if has_kinds else ())
    # SIGTERM stops like Ctrl-C: what was begun is cleaned up
    with contextlib.ExitStack() as stack, StopSignals() as signals:
        data_dir = options.data_dir
        if data_dir is None:
            data_dir = Path(tempfile.mkdtemp(prefix="paceline-demo-"))
            stack.callback(shutil.rmtree, data_dir, ignore_errors=True)
        diary = stack.enter_context(open_diary(data_dir, settings))
        if diary.asked_s > options.minutes * 60:
            raise ConfigError(
                f"--minutes must be {math.ceil(diary.asked_s / 60)} or more, got {options.minutes:g}: the run in {data_dir} came so far"
            )
        config = replace(config, data_dir=str(data_dir), model_name=diary.model_name)
        stats, service = DemoStats(answers=[*diary.answers], failures=[*diary.failures]), None
        try:
            with console.status("starting Ray, Redis, the replica and the controller (about 30 s)"):
                if options.model == "bundled":
                    config = _padded(config, data_dir)
                if not has_kinds:  # who serves a day does not know its end
                    config = with_end(config, options, time.time() + START_S - diary.elapsed_s)
                service = run_service(config, check=signals.check)
            signals.check()
            url = service.url
            monitor = DemoClient(url, config.model_name, time.monotonic())
            room = monitor.context_tokens() - MAX_TOKENS
            pools = fitting_pools(pools, tokenizer, room)
            diary.begin(time.time())
            schedule = Schedule(options, pools, starts=diary.starts, sent=diary.places())

            def client() -> DemoClient:
                return DemoClient(url, config.model_name, schedule.began, adds_special_tokens=is_raw)

            drive(client, schedule, options, console, stats, signals, diary)
            with console.status("waiting for the last statistics"):
                state = final_state(monitor, signals)
            monitor.close()
            if not stats.answers:
                raise PacelineError(f"no request succeeded; the first failure was: {(stats.failures or ['none'])[0]}")
        finally:
            with console.status("stopping the service"):
                if service is not None:
                    stop_service(service)
        state = with_history(state, StorePaths.of(config).home)
    lossless = _check_lossless(stats, options.model, console)
    result = _result(options, drafter, stats, schedule, state, lossless)
    console.print(kind_table(result) if has_kinds else demo_report.result_table(result))
    for line in demo_report.summary_lines(result):
        console.print(line, highlight=False)
    if options.json:
        write_json(options.json, result)
        console.print(f"JSON: {options.json}")
    if options.html:
        demo_report.write_html(result, stats.answers, options.html)
        console.print(f"HTML report: {options.html}")
    return result


def _padded(config: ServiceConfig, folder: Path) -> ServiceConfig:
    """The configuration with the padded target and its drafter, which a run that goes on has in the folder."""
    target, drafter = folder / "target", folder / "drafter"
    if not (target / "config.json").is_file():
        pad_target(target)
    own = str(drafter) if (drafter / "config.json").is_file() else copy_drafter(config.drafter, target, drafter)
    return replace(config, model=str(target), drafter=own)


def with_history(state: Snapshot, home: Path) -> Snapshot:
    """The snapshot with all decisions and ledger entries up to its own last ones, of which it has the latest: from the log."""
    lines, decisions = list(LogFile(home / DECISIONS).newest_first()), {d.decision_id: d for d in state.decisions}
    newest = max(decisions, default=-1)
    for line in lines:
        if line["kind"] == "decision" and line["decision_id"] <= newest:
            decisions.setdefault(line["decision_id"], msgspec.convert(line, Decision))
    entries, ids = list(state.ledger_entries), {e.entry_id for e in state.ledger_entries}
    if entries:
        number = next((line["number"] for line in lines if line.get("entry_id") == entries[-1].entry_id), 0)
        older = [e for e in held_entries(lines, number, number) if e.entry_id not in ids]
        entries = [*reversed(older), *entries]
    return msgspec.structs.replace(state, decisions=[decisions[i] for i in sorted(decisions)], ledger_entries=entries)


def final_state(client: Client, signals: StopSignals, timeout_s: float = 20.0) -> Snapshot:
    """Wait until produced feedback has been folded and no job runs, or the time is up. Raises: PacelineError without any state."""
    deadline, state = time.monotonic() + timeout_s, None
    while time.monotonic() < deadline:
        signals.check()
        found = client.state()
        if found is not None and (found.has_controller or not found.is_adaptive):  # else it has none of the figures
            state, sent = found, found.feedback
            if state.job is None and sent.produced <= sent.delivered + sent.dropped:
                break
        time.sleep(0.5)
    if state is None:
        raise PacelineError(
            f"the service did not tell its state within {timeout_s:g} s of its end: there are no figures"
        )
    return state
