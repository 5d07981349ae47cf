"""Demo on vLLM: the whole loop on an engine that is not ours, on the CPU; it counts rounds, since a toy's speed says nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.adapt.versions.export_drafter import ExportDrafterOptions, export_drafter
from paceline.bench.common.lossless import LosslessChecker
from paceline.bench.common.result_file import write_json
from paceline.config import ServiceConfig
from paceline.contracts import Group
from paceline.errors import ConfigError, PacelineError
from paceline.infra.controller.snapshot import Snapshot, parse_state
from paceline.infra.demo.diary import Answer
from paceline.infra.demo.report import priced, within
from paceline.infra.demo.scenario import PlannedRequest
from paceline.infra.demo.stats import DemoStats, totals
from paceline.infra.engines.vllm_server import VllmServer
from paceline.infra.service.attached import Attached, put_first_drafter, wait_for_engine
from paceline.infra.service.stop_signals import StopSignals
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import claim_port
from paceline.paths import resolve_model

if TYPE_CHECKING:
    from paceline.infra.demo.run import DemoOptions, Schedule

MAX_TOKENS = 96
WINDOW_S = 10.0
MIN_ROWS = 1600
"""Some 30 answers: half of what our own engine's demo waits for, since this one is slower."""
BANK_S = 150.0
"""What a burst may take at most comes from the bank, and beside a vLLM on the same two cores it takes long."""


class VllmClient:
    """Sends planned requests to vLLM and reads the state of the control plane; not thread-safe."""

    def __init__(self, url: str, state_url: str, model: str, began: float) -> None:
        self._http, self._url, self._state_url = (
            httpx.Client(timeout=httpx.Timeout(180.0, connect=10.0)),
            url,
            state_url,
        )
        self._model, self._began = model, began

    def close(self) -> None:
        self._http.close()

    def send(self, plan: PlannedRequest, phase: str) -> Answer:
        """Send one completion; raises PacelineError when it was refused or cut off.

        Which drafter an answer gets is drawn for windows of time, so its group is not known here: all but plain ones count
        as adaptive.
        """
        start = time.monotonic()
        group = Group.PLAIN if plan.group == Group.PLAIN else Group.ADAPTIVE
        response = self._http.post(
            f"{self._url}/v1/completions",
            json={
                "model": self._model, "prompt": plan.prompt.text, "max_tokens": MAX_TOKENS, "seed": plan.seed,
                "temperature": plan.temperature, "return_token_ids": True,
                "vllm_xargs": {"bucket": plan.prompt.bucket} | ({"group": "plain"} if group == Group.PLAIN else {}),
            },
        )  # fmt: skip
        if response.status_code != 200:
            raise PacelineError(
                f"request {plan.place} of {plan.prompt.bucket} got HTTP {response.status_code}: {response.text[:200]}"
            )
        body = response.json()
        (choice,) = body["choices"]
        if choice["finish_reason"] not in ("stop", "length"):
            raise PacelineError(f"request {plan.place} of {plan.prompt.bucket} ended with {choice['finish_reason']}")
        drafts = (body.get("metrics") or {}).get("speculative_decoding") or {}
        accepted = drafts.get("per_step_accepted") or []
        return Answer(
            phase=phase, place=plan.place, bucket=plan.prompt.bucket, traffic_class=plan.prompt.bucket, group=group, temperature=plan.temperature,
            num_tokens=body["usage"]["completion_tokens"], num_rounds=len(accepted), num_accepted_tokens=sum(accepted),
            device_s=0.0, latency_s=time.monotonic() - start, ended=time.monotonic() - self._began, drafter_version="",
            prompt_token_ids=tuple(choice["prompt_token_ids"]), output_token_ids=tuple(choice["token_ids"]),
        )  # fmt: skip

    def state(self) -> Snapshot | None:
        """What the control plane knows, None while it cannot be had."""
        try:
            response = self._http.get(f"{self._state_url}/paceline/state", timeout=5.0)
            return parse_state(response.content) if response.status_code == 200 else None
        except httpx.HTTPError:
            return None


def check_options(options: DemoOptions) -> Path:
    """The interpreter of the environment that has vLLM. Raises: ConfigError where there is none, or for what only our own
    engine's demo has."""
    if options.html is not None or options.replicas != 1 or options.data_dir is not None:
        raise ConfigError(
            "engine vllm writes no --html, has one replica and goes on nowhere; use --json, and leave --replicas and --data-dir out"
        )
    if options.model != "bundled" or options.scenario == "day":
        raise ConfigError("engine vllm has --model bundled and no --scenario day; leave --engine out for these")
    python = options.vllm_python or Path(".venv-vllm/bin/python")
    if not os.access(python, os.X_OK):
        raise ConfigError(
            f"vllm_python (--vllm-python) must be the Python of an environment with vLLM and the plugin, got {python}; in a "
            "checkout `make test-vllm` installs one"
        )
    return python.absolute()


def run_vllm_demo(options: DemoOptions, config: ServiceConfig, console: Console) -> dict:
    """Run the demo and return its JSON document; starts and stops Redis, vLLM, Ray and the controller.

    Raises: ConfigError, PacelineError when something does not come up or no request succeeded.
    """
    import ray

    from paceline.infra.app import http_options, start_ray
    from paceline.infra.demo.run import Schedule, drive, final_state, pools_of, with_end

    python = check_options(options)
    folder = Path(tempfile.mkdtemp(prefix="paceline-demo-"))
    target, stats = resolve_model(config.model), DemoStats()
    drafter = "eagle3" if config.drafter == "bundled" else config.drafter  # vLLM has no network for SpecBlock
    policy = replace(config.policy, min_rows=MIN_ROWS, bank_s=BANK_S)
    config = replace(config, drafter=drafter, data_dir=str(folder), port=claim_port("127.0.0.1", 0), policy=policy)
    redis: EmbeddedRedis | None = None
    vllm: VllmServer | None = None
    attached: Attached | None = None
    owns_ray = False
    with StopSignals() as signals:
        try:
            with console.status("starting Redis, Ray, the controller and vLLM (about 90 s)"):
                redis = EmbeddedRedis(folder).start()
                config = replace(config, redis_url=redis.url)
                first = put_first_drafter(config)
                made = export_drafter(
                    ExportDrafterOptions(version=config.drafter, format="vllm", out=folder / "drafter")
                )
                settings = {
                    "redis_url": redis.url, "service": config.model_name, "data_dir": str(folder), "trusts_groups": True,
                    "window_s": WINDOW_S, "shard_rows": 256,
                }  # fmt: skip
                vllm = VllmServer(
                    python, target=target, drafter=folder / "drafter", method=made.method,
                    num_draft_tokens=made.num_draft_tokens, settings=settings, log=folder / "vllm.log",
                    arguments=(
                        "--max-num-seqs", "8", "--no-enable-prefix-caching",
                        "--per-request-spec-decode-metrics", "detailed",
                    ),
                )  # fmt: skip
                owns_ray = start_ray(config)
                vllm.wait(900.0)
                facts = wait_for_engine(config, signals.stop.wait)
                signals.check()
                assert facts is not None, "only a stop ends the wait without an engine"
                config = with_end(config, options, time.time())
                attached = Attached(config, first, facts, http_options(config))
                _wait_for_drafter(vllm.url, first.version, signals)
            schedule = Schedule(options, pools_of(options))
            state_url, url = f"http://127.0.0.1:{config.port}", vllm.url

            def client() -> VllmClient:
                return VllmClient(url, state_url, str(target), schedule.began)

            drive(client, schedule, options, console, stats, signals)
            monitor = client()
            with console.status("waiting for the last statistics"):
                state = final_state(monitor, signals)
            engine = httpx.get(f"{vllm.url}/paceline/state", timeout=60.0).json()["engine"]
            monitor.close()
            if not stats.answers:
                raise PacelineError(f"no request succeeded; the first failure was: {(stats.failures or ['none'])[0]}")
        finally:
            with console.status("stopping vLLM, the controller, Ray and Redis"):
                if vllm is not None:
                    vllm.stop()
                if attached is not None:
                    attached.close()
                if owns_ray:
                    ray.shutdown()
                if redis is not None:
                    redis.stop()
                shutil.rmtree(folder, ignore_errors=True)
    greedy = [(a.prompt_token_ids, a.output_token_ids) for a in stats.answers if a.temperature == 0]
    with console.status(f"checking {len(greedy)} greedy answers against the target in fp32"):
        lossless = LosslessChecker(target).check(greedy)
    result = _result(options, stats, schedule, state, engine)
    result["lossless"] = {
        "checked": lossless.checked, "near_ties": lossless.near_ties, "mismatches": lossless.mismatches,
        "largest_gap_share": round(lossless.largest_gap, 5),
    }  # fmt: skip
    _show(result, console)
    if options.json:
        write_json(options.json, result)
        console.print(f"JSON: {options.json}")
    return result


def _wait_for_drafter(url: str, version: str, signals: StopSignals, timeout_s: float = 120.0) -> None:
    """Return when vLLM serves the version."""
    deadline = time.monotonic() + timeout_s
    while httpx.get(f"{url}/paceline/state", timeout=60.0).json()["engine"]["version"] != version:
        signals.check()
        if time.monotonic() > deadline:
            raise PacelineError(f"vLLM did not take over drafter {version} within {timeout_s:g} s")
        time.sleep(0.5)


def _result(
    options: DemoOptions, stats: DemoStats, schedule: Schedule, state: Snapshot, engine: dict[str, Any]
) -> dict:
    """The JSON document, without the check of answers."""
    plain, pauses = msgspec.to_builtins, [ms for ms in state.swaps.pause_ms if ms > 0]
    phases = []
    for phase in schedule.phases:
        answers = [a for a in stats.of_phase(phase.name) if a.group == Group.ADAPTIVE]
        third = max(1, len(answers) // 3)
        phases.append({
            "name": phase.name, "bucket": phase.bucket, "requests": len(stats.of_phase(phase.name)),
            "rounds": totals(answers, Group.ADAPTIVE).rounds, "begin": _length(answers[:third]), "end": _length(answers[-third:]),
        })  # fmt: skip
    return {
        "engine": plain(state.replicas[0].engine) if state.replicas else None,
        "drafter": {"name": options.drafter, "first_version": state.first_version, "class_versions": state.class_versions},
        "policy": options.policy, "scenario": options.scenario, "seed": options.seed, "phases": phases,
        "traffic": {
            bucket: {name: plain(sums) for name, sums in seen.groups().items()}
            for bucket, seen in state.buckets.items()
        },
        "decisions": [plain(d) | {"t_s": round(schedule.at(d.ts), 2)} for d in state.decisions],
        "rollout": plain(state.rollout), "notes": plain(state.notes),
        "ledger": plain(state.ledger), "ledger_cells": plain(state.ledger_cells),
        "saved_interval_s": list(state.saved_interval_s), "trainer_price": options.trainer_price,
        "swaps": {
            "count": engine["num_switches"], "pause_ms_p50": float(np.median(pauses)) if pauses else None,
            "requests_mixed": engine["num_mixed"], "requests_dropped": len(stats.failures),
        },
        "feedback": plain(state.feedback), "failures": stats.failures[:20],
    }  # fmt: skip


def _length(answers: list[Answer]) -> float | None:
    length = totals(answers, Group.ADAPTIVE).acceptance_length
    return None if length is None else round(length, 3)


def _show(result: dict, console: Console) -> None:
    table = Table(title="Acceptance length of drafted answers by phase: its first and its last third")
    for name in ("phase", "traffic", "requests", "rounds", "begin", "end"):
        table.add_column(name, justify="right" if name not in ("phase", "traffic") else "left")
    for p in result["phases"]:
        table.add_row(
            p["name"],
            p["bucket"],
            *(str(p[k]) if p[k] is not None else "-" for k in ("requests", "rounds", "begin", "end")),
        )
    console.print(table)
    ledger, swaps, lossless, feedback = (result[k] for k in ("ledger", "swaps", "lossless", "feedback"))
    acted = [d for d in result["decisions"] if d["action"] != "hold"]
    for line in (
        f"decisions: {len(result['decisions'])} logged, {len(acted)} acted on",
        *(f"  t={d['t_s']:.0f} s  {d['action']} {d.get('arm') or d.get('version') or ''} ({d.get('outcome') or 'done'}): {d['reason']}" for d in acted),
        *(f"  {note['text']}" for note in result["notes"] if "guard" in note["text"] or "canary" in note["text"]),
        f"ledger: spent {ledger['spent_s']:.1f} s, saved {ledger['saved_s']:.1f} s{within(result['saved_interval_s'])}, "
        f"net {ledger['net_s']:+.1f} s{priced(ledger, result['trainer_price'])}",
        f"drafters exchanged: {swaps['count']}, {swaps['requests_mixed']} requests lived through one, "
        f"requests dropped {swaps['requests_dropped']}",
        f"lossless: {lossless['checked']} greedy tokens checked in fp32, {lossless['near_ties']} near ties, "
        f"{lossless['mismatches']} mismatches",
        f"feedback: {feedback['produced']} rows produced, {feedback['delivered']} delivered, {feedback['dropped']} dropped",
    ):  # fmt: skip
        console.print(line, highlight=False)
