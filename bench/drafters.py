"""How fast is each drafter? Arms alternate prompt by prompt in one process against the plain loop."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.bench.engine_run import (  # fmt: skip
    GroupRun,
    build_engine,
    encode,
    greedy_or_sampled,
    load_named_drafter,
    load_target,
    run_group,
    set_threads,
    trained_domains,
)
from paceline.bench.intervals import ratio_of_rates
from paceline.bench.lossless import LosslessChecker
from paceline.bench.workloads import load_prompts
from paceline.config import EngineConfig
from paceline.contracts import Group
from paceline.errors import ConfigError
from paceline.paths import resolve_model


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What to compare; see `paceline bench drafters --help`."""

    drafters: tuple[str, ...]
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    buckets: tuple[str, ...]
    num_prompts: int = 16
    max_tokens: int = 128
    num_threads: int | None = 2
    model: str = "bundled"
    baseline: str | None = None
    seed: int = 0
    data: Path | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        if not self.drafters or any(b < 1 for b in self.batches) or self.num_prompts < 1:
            raise ConfigError("drafters must not be empty, batch sizes and num_prompts must be >= 1")
        if self.baseline not in (None, "transformers"):
            raise ConfigError(f"baseline must be 'transformers', got {self.baseline!r}")


@dataclass(slots=True)
class _Arm:
    name: str
    runs: list[GroupRun] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, run: GroupRun) -> None:
        self.runs.append(run)
        self.tokens.append(run.num_tokens)
        self.seconds.append(run.seconds)

    @property
    def rate(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


def _row(name: str, arm: _Arm, plain: _Arm, batch: int, temperature: float, bucket: str, lossless: str | None) -> dict:
    outputs = [o for r in arm.runs for o in r.outputs]
    rounds = sum(o.stats.num_rounds for o in outputs) or 1
    accepted = sum(o.stats.num_accepted_tokens for o in outputs)
    draft = sum(o.stats.draft_ms for o in outputs) * batch / rounds
    verify = sum(o.stats.verify_ms for o in outputs) * batch / rounds
    round_ms = sum(o.stats.round_ms for o in outputs) * batch / rounds
    speedup, interval = ratio_of_rates(arm.tokens, arm.seconds, plain.tokens, plain.seconds)
    return {
        "drafter": name,
        "batch": batch,
        "temperature": temperature,
        "bucket": bucket,
        "in_domain": bucket in trained_domains(name),
        "acceptance_length": round(accepted / rounds + 1, 3),
        "tokens_per_s": round(arm.rate, 1),
        "plain_tokens_per_s": round(plain.rate, 1),
        "speedup": round(speedup, 3),
        "speedup_interval": [round(v, 3) for v in interval] if len(arm.tokens) > 1 else None,
        "draft_ms": round(draft, 3),
        "verify_ms": round(verify, 3),
        "overhead_ms": round(max(0.0, round_ms - draft - verify), 3),
        "num_draft_tokens": round(sum(o.stats.num_draft_tokens for o in outputs) / rounds, 2),
        "lossless": lossless,
        "num_prompts": len(outputs),
        "num_tokens": int(sum(arm.tokens)),
    }


def _baseline_rows(arms: dict[str, _Arm], plain: _Arm, batch: int, temperature: float, bucket: str) -> list[dict]:
    rows = []
    for name, arm in arms.items():
        ratio, interval = ratio_of_rates(plain.tokens, plain.seconds, arm.tokens, arm.seconds)
        rows.append(
            {
                "drafter": name, "batch": batch, "temperature": temperature, "bucket": bucket,
                "tokens_per_s": round(arm.rate, 1), "plain_tokens_per_s": round(plain.rate, 1),
                "plain_over_baseline": round(ratio, 3), "plain_over_baseline_interval": [round(v, 3) for v in interval] if len(arm.tokens) > 1 else None,
                "num_tokens": int(sum(arm.tokens)),
            }
        )  # fmt: skip
    return rows


def _groups(prompts: list[list[int]], batch: int) -> list[list[list[int]]]:
    return [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]


def run_bench_drafters(options: BenchOptions, console: Console) -> dict:
    """Run every (bucket, batch, temperature) cell with all drafters alternating; prints a table, returns the document."""
    set_threads(options.num_threads)
    target = load_target(options.model, drafters=options.drafters)
    names = [d for d in options.drafters if d != "none"]
    engines = {n: build_engine(target, load_named_drafter(n, target), EngineConfig(max_running=max(options.batches), prefix_caching=False), n) for n in names}  # fmt: skip
    plain_engine = build_engine(target, None, EngineConfig(max_running=max(options.batches), prefix_caching=False))
    checker = LosslessChecker(resolve_model(options.model)) if 0.0 in options.temperatures else None
    hf = None
    if options.baseline:
        from paceline.bench.transformers_baseline import TransformersBaseline

        hf = TransformersBaseline(str(resolve_model(options.model)), target.dtype, target.tokenizer.pad_token_id or 0)
    cells = [(b, n, t) for b in options.buckets for n in options.batches for t in options.temperatures]
    rows: list[dict] = []
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as bar:  # fmt: skip
        task = bar.add_task("benchmark", total=sum(max(1, options.num_prompts // b) for _, b, _ in cells))
        for bucket, batch, temperature in cells:
            bar.update(task, description=f"{bucket} batch {batch} T={temperature:g}")
            count = max(options.num_prompts, batch)
            prompts = [encode(target, p.text) for p in load_prompts(bucket, options.data, count, options.seed)]
            arms = {n: _Arm(n) for n in names}
            plain = _Arm("none")
            baseline = {n: _Arm(n) for n in ("transformers.generate", "transformers.prompt_lookup")} if hf else {}
            for i, group in enumerate([prompts[:batch], *_groups(prompts, batch)]):  # the first group warms up
                params = [greedy_or_sampled(temperature, options.max_tokens, options.seed + i * batch + j) for j in range(len(group))]  # fmt: skip
                order = [("none", plain_engine, Group.PLAIN), *((n, engines[n], Group.ADAPTIVE) for n in names)]
                turn = i % len(order)
                for name, engine, kind in order[turn:] + order[:turn]:
                    run = run_group(engine, group, params, group=kind, bucket=bucket, tag=f"{name}-{bucket}-{batch}-{temperature}-{i}")  # fmt: skip
                    if i > 0:
                        (plain if name == "none" else arms[name]).add(run)
                for name, arm in baseline.items():
                    if hf is None or (batch > 1 and "lookup" in name):
                        continue
                    tokens, seconds = hf.run(group, params[0], lookup="lookup" in name)
                    if i > 0:
                        arm.tokens.append(tokens)
                        arm.seconds.append(seconds)
                if i > 0:
                    bar.advance(task)
            for name, arm in [("none", plain), *arms.items()]:
                lossless = None
                if temperature == 0 and checker is not None:
                    report = checker.check([(o.prompt_token_ids, o.token_ids) for r in arm.runs for o in r.outputs])
                    lossless = f"{report.mismatches} mismatches, {report.near_ties} near ties of {report.checked}"
                if name != "none" or "none" in options.drafters:
                    rows.append(_row(name, arm, plain, batch, temperature, bucket, lossless))
            rows += _baseline_rows({n: a for n, a in baseline.items() if a.tokens}, plain, batch, temperature, bucket)
    result = {"options": _plain(options), "dtype": str(target.dtype), "rows": rows, "summary": summarise(rows)}
    console.print(_table(rows))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        console.print(f"JSON: {options.json}")
    return result


def summarise(rows: list[dict]) -> list[dict]:
    """Geometric mean speedup per drafter, batch, temperature and in-domain flag."""
    keys = sorted({(r["drafter"], r["batch"], r["temperature"], r["in_domain"]) for r in rows if "speedup" in r})
    return [
        {
            "drafter": d, "batch": b, "temperature": t, "in_domain": i,
            "speedup": round(float(np.exp(np.mean([np.log(r["speedup"]) for r in rows if "speedup" in r and (r["drafter"], r["batch"], r["temperature"], r["in_domain"]) == (d, b, t, i)]))), 3),
        }
        for d, b, t, i in keys
    ]  # fmt: skip


def _plain(options: BenchOptions) -> dict:
    import dataclasses

    return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(options).items()}


def _interval_text(interval: list[float] | None) -> str:
    """Both ends, or a dash where one group of requests gives no interval."""
    return "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def _table(rows: list[dict]) -> Table:
    table = Table(title="Drafters against the plain loop (alternating, 95% interval of the ratio)")
    for i, name in enumerate(("drafter", "bucket", "batch", "T", "accept. length", "tok/s", "plain tok/s", "speedup", "interval", "draft ms", "verify ms", "other ms")):  # fmt: skip
        table.add_column(name, justify="left" if i < 2 else "right")
    for r in rows:
        if "speedup" in r:
            interval = _interval_text(r["speedup_interval"])
            table.add_row(r["drafter"], r["bucket"] + (" *" if r["in_domain"] else ""), str(r["batch"]), f"{r['temperature']:g}", f"{r['acceptance_length']:.2f}", f"{r['tokens_per_s']:.0f}", f"{r['plain_tokens_per_s']:.0f}", f"{r['speedup']:.2f}", interval, f"{r['draft_ms']:.2f}", f"{r['verify_ms']:.2f}", f"{r['overhead_ms']:.2f}")  # fmt: skip
        else:
            interval = _interval_text(r["plain_over_baseline_interval"])
            table.add_row(r["drafter"], r["bucket"], str(r["batch"]), f"{r['temperature']:g}", "-", f"{r['tokens_per_s']:.0f}", f"{r['plain_tokens_per_s']:.0f}", f"plain is {r['plain_over_baseline']:.2f}x", interval, "-", "-", "-")  # fmt: skip
    table.caption = "* the drafter was trained on this bucket's domain"
    return table
