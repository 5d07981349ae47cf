"""Soak: random traffic over a long time, to find leaks, lost requests and corrupted pages.

Traffic is a function of the seed. Half of the prompts begin with one of a few long shared prefixes (system prompts, in
practice), lengths are log-uniform, a tenth of the requests is aborted within its next 40 rounds, most of them early.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated as A
from typing import Any, NamedTuple

import numpy as np
import psutil
from rich.console import Console
from scipy import stats

from paceline.bench.common.engine_run import encode, load_named_drafter, load_target, set_threads
from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import progress, say_file
from paceline.bench.common.workloads import BUNDLED_BUCKETS, load_prompts
from paceline.bench.engine.arms import new_engine
from paceline.config import EngineConfig
from paceline.contracts import Group
from paceline.errors import ConfigError
from paceline.records import DataFolder, Device, Drafter, JsonFile, Model, Setting, Threads, record
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import GenerationRequest, RoundEvent, SamplingParams

NUM_BLOCKS = 12


class Trend(NamedTuple):
    """Slope per second with its 95% interval."""

    slope: float
    low: float
    high: float
    num_samples: int


def trend(times_s: Sequence[float], values: Sequence[float], *, num_blocks: int = NUM_BLOCKS) -> Trend | None:
    """Least-squares slope over the means of blocks of equal length in time; None when there are too few samples.

    Neighbouring samples of a process's memory are nearly equal, so the usual error of a slope through all samples is far
    too small. Means of long blocks are close to independent (method of batch means); the interval is Student's t on them.
    """
    t, y = np.asarray(times_s, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(t) < 2 * num_blocks or t[-1] <= t[0]:
        return None
    block = np.minimum(((t - t[0]) / (t[-1] - t[0]) * num_blocks).astype(int), num_blocks - 1)
    used = [b for b in range(num_blocks) if (block == b).any()]
    if len(used) < 4:
        return None
    x, z = (np.array([v[block == b].mean() for b in used]) for v in (t, y))
    x, z = x - x.mean(), z - z.mean()
    slope, spread = float(x @ z / (x @ x)), float(x @ x)
    rest = z - slope * x
    error = np.sqrt(rest @ rest / (len(used) - 2) / spread)  # 0, not NaN, for a series that does not move
    half = float(stats.t.ppf(0.975, len(used) - 2) * error)
    return Trend(slope=slope, low=slope - half, high=slope + half, num_samples=len(t))


def second_half(times_s: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The samples of the later half of the time."""
    if not times_s:
        return [], []
    middle = (times_s[0] + times_s[-1]) / 2
    kept = [(t, v) for t, v in zip(times_s, values, strict=True) if t >= middle]
    return [t for t, _ in kept], [v for _, v in kept]


NUM_PREFIXES = 6
SHARED_SHARE = 0.5
ABORT_SHARE = 0.1
MAX_ABORT_ROUNDS = 40
TEMPERATURES = (0.0, 0.0, 0.5, 1.0)
GROUPS = (Group.ADAPTIVE, Group.ADAPTIVE, Group.ADAPTIVE, Group.PLAIN)


class SoakRequest(NamedTuple):
    """A request and when it is given up."""

    request: GenerationRequest
    abort_after_rounds: int | None
    """Rounds after its submission; None = never. It may have ended by then."""


class SoakTraffic:
    """An endless series of requests."""

    def __init__(
        self,
        texts: Mapping[str, Sequence[Sequence[int]]],
        *,
        context_tokens: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        """texts: prompts by bucket. context_tokens: what one request may have; max_tokens: longest answer."""
        self._rng = np.random.default_rng(seed)
        self._texts = {b: [tuple(p) for p in prompts] for b, prompts in texts.items()}
        self._buckets = list(self._texts)
        self._max_tokens = max_tokens
        self._room = context_tokens - max_tokens - 1
        longest = max(1, self._room // 2)
        self._prefixes = [self._text_of(self._length(longest // 2 + 1, longest)) for _ in range(NUM_PREFIXES)]
        self.num_made = 0

    def next(self) -> SoakRequest:
        """The next request."""
        rng, i = self._rng, self.num_made
        self.num_made += 1
        bucket = self._buckets[int(rng.integers(len(self._buckets)))]
        own = self._texts[bucket][int(rng.integers(len(self._texts[bucket])))]
        if rng.random() < SHARED_SHARE:
            prompt = self._prefixes[int(rng.integers(NUM_PREFIXES))] + own
        elif rng.random() < 0.5:
            prompt = self._text_of(self._length(1, self._room))
        else:
            prompt = own
        params = SamplingParams(
            temperature=float(rng.choice(TEMPERATURES)), max_tokens=self._length(1, self._max_tokens), seed=i,
            top_p=float(rng.choice((1.0, 0.9))), ignore_eos=bool(rng.random() < 0.3),
            repetition_penalty=1.1 if rng.random() < 0.05 else 1.0, logprobs=2 if rng.random() < 0.05 else None,
            stop=("\n\n",) if rng.random() < 0.1 else (),
        )  # fmt: skip
        request = GenerationRequest(
            request_id=f"soak-{i}", prompt_token_ids=prompt[: self._room] or own[:1], params=params, bucket=bucket,
            group=GROUPS[int(rng.integers(len(GROUPS)))],
        )  # fmt: skip
        abort = self._length(1, MAX_ABORT_ROUNDS) - 1 if rng.random() < ABORT_SHARE else None
        return SoakRequest(request, abort)

    def wanted(self, limit: int) -> int:
        """How many requests should be in flight now: bursts and lulls between none and `limit`."""
        return int(self._rng.integers(0, limit + 1))

    def _length(self, low: int, high: int) -> int:
        """Log-uniform in [low, high]: most are short, some are as long as allowed."""
        return int(math.exp(self._rng.uniform(math.log(low), math.log(high + 1)))) if high > low else low

    def _text_of(self, num_tokens: int) -> tuple[int, ...]:
        """Prompts in a row, cut to a length."""
        out: list[int] = []
        while len(out) < num_tokens:
            prompts = self._texts[self._buckets[int(self._rng.integers(len(self._buckets)))]]
            out += prompts[int(self._rng.integers(len(prompts)))]
        return tuple(out[:num_tokens])


_CHANGE_EVERY_ROUNDS = 50
"""Rounds after which the wanted number of requests in flight is drawn anew."""
MIN_JUDGED_S = 300.0
"""Shorter runs are not judged on memory: torch's CPU library keeps one compiled kernel per shape it has seen, and the KV
pool becomes resident page by page, so that memory rises for minutes without any leak."""
_SAVES = 20
"""Times that a run writes its document."""


@record()
class SoakOptions:
    """Random traffic (mixed lengths and temperatures, shared prefixes, aborts, few KV pages) for some minutes, then the
    slope of resident memory over the second half with its interval, and whether pages, pins and requests balance.

    Exit code 1 if something does not balance or memory surely grows. docs/benchmarks.md.
    """

    minutes: A[float, Setting("Minutes of traffic; memory is judged from 5 on.", gt=0)] = 20.0
    concurrency: A[int, Setting("Requests that run at once; up to twice as many wait or run.", ge=1)] = 16
    max_tokens: A[int, Setting("Longest answer.", ge=1)] = 96
    kv_share: A[
        float, Setting("KV pages over what all requests need; the fewer, the more preemptions.", gt=0, le=4)
    ] = 0.2
    max_growth_mib_per_h: A[
        float, Setting("MiB per hour of resident memory, second half, that are a leak.", flag="max-growth", gt=0)
    ] = 32.0
    sample_s: A[float, Setting("Seconds between samples of resident memory.", flag="sample", gt=0)] = 1.0
    model: Model = "bundled"
    drafter: Drafter = "specblock"
    device: Device = "cpu"
    num_threads: Threads = None
    seed: A[int, Setting("Seed of the traffic.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None


def run_soak(options: SoakOptions, console: Console, timer: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Run the traffic until the time is over, drain, check the balance; prints the verdict, returns the document.

    Raises: ConfigError (unknown model or drafter, context too short).
    """
    set_threads(options.num_threads)
    result = ResultFile(options.json, command="bench soak", options=options, extra={"samples": []})
    target = load_target(options.model, device=options.device, drafters=[options.drafter])
    room = target.context_tokens - options.max_tokens - 1
    if room < 8:
        raise ConfigError(f"max-tokens must leave at least 8 prompt tokens in the context of {target.context_tokens}, got {options.max_tokens}")  # fmt: skip
    num_tokens = max(target.context_tokens * 2, int(options.kv_share * options.concurrency * target.context_tokens))
    engine = new_engine(
        target, load_named_drafter(options.drafter, target), version=options.drafter, num_tokens=num_tokens,
        config=EngineConfig(max_running=options.concurrency, max_waiting=2 * options.concurrency),
    )  # fmt: skip
    texts = {b: [encode(target, p.text) for p in load_prompts(b, options.data, 64, options.seed)] for b in BUNDLED_BUCKETS}  # fmt: skip
    traffic = SoakTraffic(
        texts, context_tokens=engine.max_context_tokens, max_tokens=options.max_tokens,
        seed=options.seed,
    )  # fmt: skip
    driver = SoakDriver(engine, traffic, 2 * options.concurrency)
    seconds = 60 * options.minutes
    samples: list[dict[str, float]] = []
    began, next_sample, next_save = timer(), 0.0, seconds / _SAVES
    with progress(console, "soak", seconds) as bar:
        while (now := timer() - began) < seconds:
            driver.round()
            if now >= next_sample:
                samples.append(_sample(now, engine, driver))
                next_sample = now + options.sample_s
                bar.at(now, f"{samples[-1]['rss_bytes'] / 2**20:.0f} MiB, {driver.num_ended} requests")
            if now >= next_save:
                result.update(samples=samples)
                next_save += seconds / _SAVES
        bar.at(seconds, "draining")
        problems = driver.drain()
    wall_s = timer() - began
    samples.append(_sample(wall_s, engine, driver))
    growth = memory_trend(samples)
    stats = engine.stats()
    document = result.close(
        samples=samples,
        totals={
            "seconds": round(wall_s, 3), "num_requests": traffic.num_made, "ends": dict(sorted(driver.ends.items())),
            "num_rounds": stats["num_rounds"], "num_tokens": stats["num_tokens"],
            "tokens_per_s": round(stats["num_tokens"] / wall_s, 2), "num_preemptions": stats["num_preemptions"],
            "num_pages": stats["num_pages"], "num_free_pages": stats["num_free_pages"],
            "num_callback_errors": stats["num_callback_errors"], "num_drafter_failures": stats["num_drafter_failures"],
        },
        memory=growth,
        problems=problems,
        verdict=soak_verdict(growth, problems, limit=options.max_growth_mib_per_h, seconds=wall_s),
    )  # fmt: skip
    _print(document, console)
    return document


def has_failed(document: dict[str, Any]) -> bool:
    """Whether something does not balance or memory surely grows."""
    return document["verdict"] in ("failed", "leaks")


class SoakDriver:
    """Feeds one engine in the caller's thread and counts how every request ends."""

    def __init__(self, engine: Engine, traffic: SoakTraffic, max_in_flight: int) -> None:
        self._engine, self._traffic, self._max = engine, traffic, max_in_flight
        self._wanted = max_in_flight
        self._open: set[str] = set()
        self._aborts: deque[tuple[int, str]] = deque()
        self._num_rounds = 0
        self._repeated = 0
        self.ends: dict[str, int] = {}
        self.errors: list[str] = []

    @property
    def num_in_flight(self) -> int:
        return len(self._open)

    @property
    def num_ended(self) -> int:
        return sum(self.ends.values())

    def round(self) -> None:
        """Submit and abort what is due, then one engine step."""
        if self._num_rounds % _CHANGE_EVERY_ROUNDS == 0:
            self._wanted = max(1, self._traffic.wanted(self._max))
        self._num_rounds += 1
        while len(self._open) < self._wanted:
            self._submit()
        due = [r for at, r in self._aborts if at <= self._num_rounds]
        if due:
            self._aborts = deque(a for a in self._aborts if a[0] > self._num_rounds)
            for request_id in due:
                self._engine.abort(request_id)
        self._engine.step()

    def drain(self) -> list[str]:
        """Let everything finish; returns what does not balance, [] when all is well."""
        while self._engine.step():
            pass
        problems = [*self.errors[:5]]
        try:
            self._engine.check_integrity()
        except AssertionError as e:
            problems.append(f"check_integrity: {e}")
        stats = self._engine.stats()
        counts = {
            "pages are not free after the drain": stats["num_pages"]
            - stats["num_free_pages"],  # but for the prefix cache's
            "requests never ended": len(self._open),
            "requests ended twice": self._repeated,
            "callbacks failed": stats["num_callback_errors"],
            "drafter failures": stats["num_drafter_failures"],
        }
        return problems + [f"{count} {what}" for what, count in counts.items() if count]

    def _submit(self) -> None:
        item = self._traffic.next()
        request_id = item.request.request_id
        self._open.add(request_id)
        self._engine.submit(item.request, self._on_event)
        if item.abort_after_rounds is not None:
            self._aborts.append((self._num_rounds + item.abort_after_rounds, request_id))

    def _on_event(self, event: RoundEvent) -> None:
        if event.finish_reason is None:
            return
        if event.request_id in self._open:
            self._open.remove(event.request_id)
        else:
            self._repeated += 1
        self.ends[event.finish_reason] = self.ends.get(event.finish_reason, 0) + 1
        if event.finish_reason == "error":
            self.errors.append(f"{event.request_id}: {event.error}")


def _sample(at_s: float, engine: Engine, driver: SoakDriver) -> dict[str, float]:
    gc.collect(0)  # garbage of the sampler itself must not look like growth
    stats = engine.stats()
    return {
        "at_s": round(at_s, 3),
        "rss_bytes": psutil.Process().memory_info().rss,
        "num_in_flight": driver.num_in_flight,
        "num_free_pages": stats["num_free_pages"],
        "num_tokens": stats["num_tokens"],
        "num_rounds": stats["num_rounds"],
    }


def memory_trend(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Slope of resident memory over the second half in MiB per hour, with its interval (null when too few samples)."""
    times, rss = ([s[key] for s in samples] for key in ("at_s", "rss_bytes"))
    found = trend(*second_half(times, rss))
    scale = 3600 / 2**20
    return {
        "first_rss_bytes": rss[0],
        "last_rss_bytes": rss[-1],
        "peak_rss_bytes": max(rss),
        "slope_mib_per_h": None if found is None else round(found.slope * scale, 3),
        "interval": None if found is None else [round(found.low * scale, 3), round(found.high * scale, 3)],
        "num_samples": 0 if found is None else found.num_samples,
    }


def soak_verdict(memory: dict[str, Any], problems: list[str], *, limit: float, seconds: float) -> str:
    """failed: something does not balance; leaks: memory surely grows faster than the limit; clean: surely slower."""
    if problems:
        return "failed"
    if memory["interval"] is None or seconds < MIN_JUDGED_S:
        return "too short"
    low, high = memory["interval"]
    return "leaks" if low > limit else "clean" if high <= limit else "unclear"


def _print(document: dict[str, Any], console: Console) -> None:
    totals, memory, verdict = document["totals"], document["memory"], document["verdict"]
    ends = ", ".join(f"{n} {reason}" for reason, n in totals["ends"].items())
    console.print(
        f"{totals['num_requests']} requests ({ends}), {totals['num_tokens']} tokens in {totals['num_rounds']} rounds, "
        f"{totals['tokens_per_s']:.0f} tokens/s, {totals['num_preemptions']} preemptions", soft_wrap=True,
    )  # fmt: skip
    console.print(
        f"pages: {totals['num_free_pages']} of {totals['num_pages']} free after the drain; integrity: "
        f"{'; '.join(document['problems']) or 'holds'}", soft_wrap=True,
    )  # fmt: skip
    limit = document["options"]["max_growth_mib_per_h"]
    slope = "too few samples for a slope" if memory["interval"] is None else (
        f"slope over the second half {memory['slope_mib_per_h']:+.1f} MiB/h, 95% [{memory['interval'][0]:+.1f}, {memory['interval'][1]:+.1f}], limit {limit:g}"
    )  # fmt: skip
    console.print(f"memory: {memory['last_rss_bytes'] / 2**20:.0f} MiB now, peak {memory['peak_rss_bytes'] / 2**20:.0f}; {slope}", soft_wrap=True)  # fmt: skip
    advice = {
        "clean": "[green]clean[/green]",
        "failed": "[red]failed[/red]",
        "leaks": "[red]leaks[/red]",
        "unclear": "[yellow]unclear[/yellow]: more --minutes narrow the interval",
        "too short": f"[yellow]too short[/yellow]: nothing was lost; memory is judged from {MIN_JUDGED_S / 60:g} minutes on",
    }[verdict]
    console.print(f"verdict: {advice}", soft_wrap=True)
    say_file(console, "JSON", document["options"]["json"])
