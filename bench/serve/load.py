"""Stream load: what many concurrent streaming clients see: errors, lost tokens, time to the first token, gaps."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from typing import Annotated as A
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import Bar, new_table, progress, say_file
from paceline.bench.common.workloads import load_prompts
from paceline.bench.serve.client import REFUSED, StreamClient, StreamRequest, StreamResult, find_features
from paceline.bench.serve.local_service import ServerOptions, watch_lag
from paceline.bench.serve.stats import StreamTotals, explain_difference, first_difference, percentiles_ms
from paceline.records import Setting, record, require

_SAVE_EVERY_S = 10.0
_REFUSED_WAIT_S = 0.25
_NUM_BINS = 60
_GIVE_UP_S = 10.0
"""A client that got nothing but broken connections for so long asks whether the server is there at all, and ends if not."""
_GONE = "the server at {} does not answer any more"


@record()
class StreamLoadOptions(ServerOptions):
    """Errors, answers without [DONE], lost tokens, time to the first token, gaps between chunks, tokens per second over
    time; with --check, greedy answers are asked again one at a time and compared. Each request asks for a quarter of
    --max-tokens to all of them.

    Exit code 1 on any error or changed answer. docs/benchmarks.md.
    """

    clients: A[int, Setting("Clients; each sends its next request when its answer is complete.", ge=1, le=4096)] = 32
    minutes: A[float, Setting("Minutes of load; answers then under way may finish.", gt=0)] = 10.0
    temperatures: A[
        tuple[float, ...], Setting("Comma list; each request draws one.", flag="temperature", ge=0, non_empty=True)
    ] = (0.0, 0.8)
    is_chat: A[bool, Setting("Use /v1/chat/completions.", flag="chat")] = False
    is_checking: A[bool, Setting("Ask greedy answers again at the end and compare.", flag="check")] = False
    num_check: A[int, Setting("With --check: how many.", ge=1)] = 32
    api_token: A[str | None, Setting("Bearer token of the server.", env="PACELINE_API_TOKEN")] = None

    def __post_init__(self) -> None:
        ServerOptions.__post_init__(self)  # a class with slots has no super() without arguments
        has_greedy = not self.is_checking or 0.0 in self.temperatures
        require(has_greedy, "temperature must include 0 with --check, which compares greedy answers", self.temperatures)


def run_stream_load(options: StreamLoadOptions, console: Console) -> dict[str, Any]:
    """Load the server, print what the clients saw, return (and keep on disk) the document.

    Raises: PacelineError when the server cannot be reached or started, or refuses a plain streaming request.
    """
    shown = dataclasses.replace(options, api_token="given" if options.api_token else None)  # never written to a file
    prompts = {b: [p.text for p in load_prompts(b, options.data, 64, options.seed)] for b in options.buckets}
    with options.server(console) as url:
        result = ResultFile(options.json, command="bench streams", options=shown, extra={"url": url})
        document = asyncio.run(_Load(options, url, prompts, result, console).run())
    _print(document, console)
    return document


class _Load:
    """One run: the clients, their totals, and what is checked afterwards."""

    def __init__(self, options: StreamLoadOptions, url: str, prompts: dict[str, list[str]], result: ResultFile, console: Console) -> None:  # fmt: skip
        self._options, self._url, self._prompts = options, url, prompts
        self._result, self._console = result, console
        self._rng = random.Random(options.seed)
        self._window_s = 60 * options.minutes
        self._lags_s: list[float] = []
        self._kept: list[StreamResult] = []
        self._num_greedy = 0
        self._count = 0
        self._gone_s: float | None = None

    async def run(self) -> dict[str, Any]:
        options = self._options
        async with options.client(self._url, options.api_token) as http:
            features = await find_features(http, self._url, is_chat=options.is_chat)
            self._result.update(server={"model": features.model, "has_token_ids": features.has_token_ids, "has_usage": features.has_usage})  # fmt: skip
            client = StreamClient(http, is_chat=options.is_chat, features=features)
            began = time.perf_counter()
            totals = StreamTotals(began_s=began, bin_s=max(0.5, self._window_s / _NUM_BINS))
            with progress(self._console, f"{options.clients} clients", self._window_s) as bar:
                await self._load(client, totals, began, bar)
            checked = await self._check(client) if options.is_checking else None
        return self._result.close(
            **totals.summary(self._window_s), client_lag_ms=percentiles_ms(self._lags_s), check=checked,
            gone_after_s=self._gone_s,
        )  # fmt: skip

    async def _load(self, client: StreamClient, totals: StreamTotals, began: float, bar: Bar) -> None:  # fmt: skip
        ends = began + self._window_s
        watch = asyncio.create_task(self._watch(totals, began, bar))
        workers = [asyncio.create_task(self._worker(client, totals, ends)) for _ in range(self._options.clients)]
        try:
            _, late = await asyncio.wait(workers, timeout=self._window_s + self._options.timeout_s)
            for worker in late:
                worker.cancel()
                totals.num_answers += 1
                totals.problems["unfinished"] += 1
                totals.examples.setdefault("unfinished", f"unfinished: still open {self._options.timeout_s:g} s after the end")  # fmt: skip
            for done in await asyncio.gather(*workers, return_exceptions=True):
                if isinstance(done, Exception):
                    raise done
        finally:
            watch.cancel()

    async def _worker(self, client: StreamClient, totals: StreamTotals, ends: float) -> None:
        """One client: the next request goes out when the answer before is complete. Ends early when the server is gone."""
        lost_since: float | None = None
        while time.perf_counter() < ends:
            result = await client.stream(self._next())
            lost_since = (lost_since or result.began_s) if result.is_lost else None
            totals.add(result)
            self._keep(result)
            if result.problem is not None:  # a server that is full or gone is not asked in a tight loop
                await asyncio.sleep(_REFUSED_WAIT_S)
            if lost_since is not None and time.perf_counter() - lost_since >= _GIVE_UP_S:
                if not await client.answers():
                    self._gone_s = self._gone_s or round(lost_since - totals.began_s, 3)
                    return
                lost_since = None

    def _next(self) -> StreamRequest:
        self._count += 1
        bucket = self._rng.choice(self._options.buckets)
        return StreamRequest(
            prompt=self._rng.choice(self._prompts[bucket]), bucket=bucket,
            max_tokens=self._rng.randint(max(1, self._options.max_tokens // 4), self._options.max_tokens),
            temperature=self._rng.choice(self._options.temperatures), seed=self._options.seed + self._count,
        )  # fmt: skip

    def _keep(self, result: StreamResult) -> None:
        """A uniform sample of the whole greedy answers (reservoir)."""
        if not self._options.is_checking or result.problem is not None or result.request.temperature > 0:
            return
        self._num_greedy += 1
        if len(self._kept) < self._options.num_check:
            self._kept.append(result)
        elif (at := self._rng.randrange(self._num_greedy)) < self._options.num_check:
            self._kept[at] = result

    async def _watch(self, totals: StreamTotals, began: float, bar: Bar) -> None:
        """Progress, the document so far, and how late this client's own loop runs."""
        next_save_s = _SAVE_EVERY_S

        def on_tick(now: float) -> None:
            nonlocal next_save_s
            bar.at(min(now - began, self._window_s), f"{totals.num_answers} answers, {totals.num_errors} errors")  # fmt: skip
            if now - began >= next_save_s:
                next_save_s += _SAVE_EVERY_S
                self._result.update(**totals.summary(min(now - began, self._window_s)))

        await watch_lag(self._lags_s, on_tick)

    async def _check(self, client: StreamClient) -> dict[str, Any]:
        """Ask the kept greedy answers again, one at a time, and explain what changed."""
        counts = dict.fromkeys(("equal", "near_tie", "mismatch", "unexplained", "failed"), 0)
        examples: list[dict[str, str]] = []
        was_lost = False
        with progress(self._console, "asking again", len(self._kept)) as bar:
            for i, first in enumerate(self._kept):
                again = await self._ask_again(client, first)
                if was_lost and again.is_lost and not await client.answers():
                    counts["failed"] += len(self._kept) - i
                    examples.append({"kind": "failed", "prompt": first.request.prompt[:80], "what": f"{again.problem}; {_GONE.format(self._url)}"})  # fmt: skip
                    break
                was_lost = again.is_lost
                kind, words = "equal", ""
                if again.problem is not None:
                    kind, words = "failed", again.problem
                elif first.token_ids and again.token_ids:
                    if first_difference(first.token_ids, again.token_ids) is not None:
                        try:
                            third = await client.top_two(first.request, len(again.token_ids))
                            kind, words = explain_difference(first.token_ids, again.token_ids, third)
                        except httpx.HTTPError as e:
                            kind, words = "failed", f"connection: {type(e).__name__}: {e}"
                elif first.text != again.text:
                    kind, words = "unexplained", "the texts differ and the server names no token ids"
                counts[kind] += 1
                if words and len(examples) < 5:
                    examples.append({"kind": kind, "prompt": first.request.prompt[:80], "what": words})
                bar.step()
        return {"num_answers": len(self._kept), **counts, "examples": examples}

    async def _ask_again(self, client: StreamClient, first: StreamResult) -> StreamResult:
        """The answer once more; one that takes much longer than under load counts as silent, whatever trickles in."""
        limit_s = self._options.timeout_s + first.ended_s - first.began_s
        try:
            return await asyncio.wait_for(client.stream(first.request), limit_s)
        except TimeoutError:
            problem = f"timeout: not complete after {limit_s:.0f} s"
            return StreamResult(request=first.request, began_s=first.began_s, problem=problem)


def has_failed(document: dict[str, Any]) -> bool:
    """Whether a client saw an error, no answer was whole, or a greedy one changed by more than a near tie."""
    check = document["check"] or {}
    return bool(
        document["num_errors"]
        or not document["num_whole"]
        or check.get("mismatch")
        or check.get("unexplained")
        or check.get("failed")
    )


def _print(document: dict[str, Any], console: Console) -> None:
    title = f"{document['options']['clients']} streaming clients, {document['options']['minutes']:g} minutes"
    table = new_table(title, ("ms", "p50", "p95", "p99", "max"))
    for name, key in (("time to first token", "ttft_ms"), ("gap between chunks", "gap_ms"), ("lag of this client", "client_lag_ms")):  # fmt: skip
        table.add_row(name, *("-" if v is None else f"{v:.1f}" for v in document[key].values()))
    console.print(table)
    unit = "tokens" if document["server"]["has_token_ids"] else "chunks"
    console.print(
        f"{document['num_whole']} whole answers of {document['num_answers']}, {document['num_tokens']} {unit}, "
        f"{document['tokens_per_s'] or 0:.0f} {unit}/s after the first tenth", soft_wrap=True,
    )  # fmt: skip
    for kind, count in document["problems"].items():
        colour = "yellow" if kind == REFUSED else "red"
        console.print(f"[{colour}]{count} x {kind}[/{colour}]: {escape(document['examples'][kind])}", soft_wrap=True)
    if not (document["server"]["has_token_ids"] and document["server"]["has_usage"]):
        console.print("[yellow]lost tokens cannot be seen[/yellow]: the server does not take return_token_ids and stream_options.include_usage", soft_wrap=True)  # fmt: skip
    if document["gone_after_s"] is not None:
        text = f"{_GONE.format(document['url'])}, since {document['gone_after_s']:.1f} s after the start; the clients ended"
        console.print(f"[red]{text}[/red]", soft_wrap=True)
    check = document["check"]
    if check is not None:
        console.print(
            f"greedy answers asked again one at a time: {check['equal']} of {check['num_answers']} equal, {check['near_tie']} "
            f"near ties, {check['mismatch']} mismatches, {check['unexplained']} unexplained, {check['failed']} failed", soft_wrap=True,
        )  # fmt: skip
        for example in check["examples"]:
            console.print(f"  {example['kind']}: {escape(example['what'])} ({escape(repr(example['prompt']))})", soft_wrap=True)  # fmt: skip
    verdict = "[red]failed[/red]" if has_failed(document) else "[green]clean[/green]"
    console.print(f"verdict: {verdict}")
    say_file(console, "JSON", document["options"]["json"])
