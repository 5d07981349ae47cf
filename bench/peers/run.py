"""Peer benchmark: options, turns and the result of servers of several projects with the same weights and the same client."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated as A
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape

from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import Bar, progress
from paceline.bench.common.workloads import asked_text, load_prompts
from paceline.bench.peers.arms import PeerArm, TokenCounter, breathe
from paceline.bench.peers.catalog import (
    PACELINE,
    PAGE_TOKENS,
    PLAIN,
    MissingPeer,
    Peer,
    chosen,
    find_peer,
    kinds,
    parse_given,
)
from paceline.bench.peers.process import PeerProcess, ending_on_sigterm
from paceline.bench.peers.report import cell_row, has_failed, mean_ratios, print_peers
from paceline.bench.peers.weights import gguf_file, transformers_folder
from paceline.bench.serve.client import StreamRequest
from paceline.bench.serve.local_service import LOAD, REQUESTS, SERVER
from paceline.errors import ConfigError
from paceline.paths import MODEL_NAMES, default_drafter, drafters_for, is_gguf, resolve_model
from paceline.records import DataFolder, JsonFile, Model, Setting, changed, record, require
from paceline.serving.loading.checkpoint import open_checkpoint

__all__ = ["PeersOptions", "has_failed", "run_peers"]
_CONTEXT_STEP = 256
_QUICK: dict[str, Any] = {
    "concurrencies": (1,),
    "temperatures": (0.0,),
    "num_groups": 2,
    "waves": 1,
    "warmup": 0,
    "max_tokens": 32,
}
"""What --quick takes for options that were left at their defaults."""


@record()
class PeersOptions:
    """Servers of several projects with the same weights, threads, prompts and client take turns, group by group: tokens per
    second in all and a request, time to the first token, with 95% intervals, and the share of equal greedy tokens. The
    others are stopped in their tracks meanwhile.

    Exit code 1 when an arm of Paceline failed or nothing could be measured. docs/benchmarks.md.

    Example: paceline bench peers --peer vllm=ENVIRONMENT/bin/python --json peers.json.
    """

    model: Model = "smollm2"
    gguf: A[
        Path | None,
        Setting("The same weights for llama.cpp; default: a bfloat16 copy of a GGUF --model.", panel=SERVER),
    ] = None
    peers: A[
        tuple[str, ...],
        Setting("Comma list of names and patterns, such as 'paceline,llamacpp*'; '*' is whatever is there.", panel=SERVER, non_empty=True),
    ] = ("*",)  # fmt: skip
    commands: A[
        tuple[str, ...],
        Setting(
            "NAME=PROGRAM, or NAME=COMMAND with {port} and as it needs {model}, {folder}, {gguf}, {threads}, {concurrency}, {context}, "
            "{total_context}, {pages}, {room}; variables may stand before; again and again.",
            flag="peer", panel=SERVER, is_repeated=True,
        ),
    ] = ()  # fmt: skip
    num_threads: A[int, Setting("Threads of every server.", flag="threads", panel=SERVER, ge=1)] = 2
    start_timeout_s: A[
        float, Setting("Seconds that a server may take to start.", flag="start-timeout", panel=SERVER, gt=0)
    ] = 600.0
    keep_free_gib: A[
        float, Setting("GiB of memory below which no further server is started.", flag="keep-free", panel=SERVER, ge=0)
    ] = 2.0
    baseline: A[str | None, Setting("Arm that ratios are over; default: Paceline without a drafter.", panel=SERVER)] = (
        None
    )
    concurrencies: A[
        tuple[int, ...],
        Setting("Comma list: clients that send again when answered.", flag="concurrency", panel=LOAD, ge=1, le=256, non_empty=True),
    ] = (1, 4, 16)  # fmt: skip
    num_groups: A[int, Setting("Counted turns of every arm in a cell.", flag="groups", panel=LOAD, ge=1)] = 5
    warmup: A[int, Setting("Turns of every arm before those, not counted.", panel=LOAD, ge=0)] = 1
    waves: A[int, Setting("Requests of a turn over its clients.", panel=LOAD, ge=1)] = 2
    max_s: A[float, Setting("A turn sends no request later than this.", flag="seconds", panel=LOAD, gt=0)] = 600.0
    quick: A[bool, Setting("Defaults become one client, greedy, two short turns.", panel=LOAD)] = False
    buckets: A[
        tuple[str, ...], Setting("Comma list of workloads: tools, code, chat, math, facts.", panel=REQUESTS, non_empty=True)
    ] = ("code", "chat", "tools")  # fmt: skip
    temperatures: A[
        tuple[float, ...],
        Setting("Comma list; 0 = greedy.", flag="temperature", panel=REQUESTS, ge=0, non_empty=True),
    ] = (0.0, 0.8)  # fmt: skip
    max_tokens: A[int, Setting("Longest answer.", panel=REQUESTS, ge=2)] = 128
    timeout_s: A[
        float, Setting("Seconds of silence after which an answer counts as lost.", flag="timeout", panel=REQUESTS, gt=0)
    ] = 120.0
    seed: A[int, Setting("Seed of prompts and sampling.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None
    note: A[str, Setting("Words kept in the JSON: what else ran.")] = ""

    def __post_init__(self) -> None:
        parse_given(self.commands)
        require(self.gguf is None or self.gguf.is_file(), "gguf must be a file", str(self.gguf))

    def chosen(self) -> PeersOptions:
        """What is measured."""
        if not self.quick:
            return self
        given = changed(self)
        return dataclasses.replace(self, quick=False, **{k: v for k, v in _QUICK.items() if k not in given})

    def cells(self) -> list[dict[str, Any]]:
        """Workload, temperature and concurrency of every cell."""
        buckets, temperatures = dict.fromkeys(self.buckets), dict.fromkeys(self.temperatures)
        places = itertools.product(buckets, temperatures, sorted(set(self.concurrencies)))
        return [dict(zip(("workload", "temperature", "concurrency"), place, strict=True)) for place in places]


def run_peers(options: PeersOptions, console: Console) -> dict[str, Any]:
    """Start the servers, let them take turns, print tables, return (and keep on disk) the document.

    Raises: PacelineError when the model or its prompts are missing, or no server is there.
    """
    options = options.chosen()
    model = resolve_model(options.model)
    tokenizer = open_checkpoint(model).tokenizer()
    counter = TokenCounter(tokenizer)
    cells = options.cells()
    plan, num_repeated = _plan(options, cells, tokenizer)
    longest = max(len(counter.ids(r.prompt)) for groups in plan for group in groups for r in group)
    context = -(-(longest + options.max_tokens + 1) // _CONTEXT_STEP) * _CONTEXT_STEP
    with tempfile.TemporaryDirectory(prefix="paceline-peers-") as folder, ending_on_sigterm():
        room = Path(folder)
        peers, skipped = _find(options, model)
        values = _values(options, model, peers, room, context)
        with _started(options, peers, values, room, console) as arms:
            baseline = _baseline(options, arms)
            given = tuple(f"{name}=..." for name in parse_given(options.commands))  # no paths in a file
            shown = dataclasses.replace(options, commands=given)
            extra = {
                "baseline": baseline, "context_tokens": context, "num_repeated_prompts": num_repeated, "skipped": skipped,
                "servers": [_server(arm) for arm in arms], "cells": [],
            }  # fmt: skip
            result = ResultFile(options.json, command="bench peers", options=shown, extra=extra)
            rows: list[dict[str, Any]] = []
            with progress(console, "turns", sum(map(len, plan)) * len(arms)) as bar:
                for index, (cell, groups) in enumerate(zip(cells, plan, strict=True)):
                    bar.name(f"{cell['workload']} T={cell['temperature']:g} x {cell['concurrency']}")
                    _run_cell(options, arms, index, groups, cell["concurrency"], bar)
                    row = cell_row(cell, index, options.num_groups, arms, baseline, counter)
                    rows += [row] if row["arms"] else []
                    result.update(cells=rows, servers=[_server(arm) for arm in arms])
            document = result.close(means=mean_ratios(rows, baseline))
    print_peers(document, console)
    return document


def _plan(
    options: PeersOptions, cells: Sequence[dict[str, Any]], tokenizer: Any
) -> tuple[list[list[list[StreamRequest]]], int]:
    """(Requests of each group of each cell, warm-up first; requests whose prompt an earlier one had).

    A workload's prompts go round over all of its cells.
    """
    num_groups = options.warmup + options.num_groups
    needed = sum(c["concurrency"] for c in cells if c["workload"] == cells[0]["workload"]) * options.waves * num_groups
    pools = {
        b: iter([asked_text(p.text, tokenizer) for p in load_prompts(b, options.data, needed, options.seed)])
        for b in dict.fromkeys(options.buckets)
    }
    seeds = itertools.count(options.seed)
    plan = [
        [
            [
                StreamRequest(
                    prompt=next(pools[c["workload"]]), bucket=c["workload"], max_tokens=options.max_tokens,
                    temperature=c["temperature"], seed=next(seeds),
                )
                for _ in range(c["concurrency"] * options.waves)
            ]
            for _ in range(num_groups)
        ]
        for c in cells
    ]  # fmt: skip
    prompts = [(r.bucket, r.prompt) for groups in plan for group in groups for r in group]
    return plan, len(prompts) - len(set(prompts))


def _find(options: PeersOptions, model: Path) -> tuple[list[Peer], dict[str, str]]:
    """(Peers that are here, why others are not, by name)."""
    given = parse_given(options.commands)
    drafters, default = drafters_for(options.model), default_drafter(options.model)
    known = kinds(drafters, drafters[0] if default == "bundled" else default)
    peers: list[Peer] = []
    skipped: dict[str, str] = {}
    for name in chosen(options.peers, known, given):
        try:
            peer = find_peer(name, known, given)
        except MissingPeer as e:
            skipped[name] = str(e)
            continue
        if peer.needs("gguf") and options.gguf is None and not is_gguf(model):
            skipped[name] = "it reads GGUF files only: give --gguf FILE with the same weights"
        else:
            peers.append(peer)
    if not peers:
        raise ConfigError("; ".join(f"{name}: {words}" for name, words in skipped.items()))
    if options.baseline is not None and options.baseline not in {peer.name for peer in peers}:
        raise ConfigError(f"baseline must be one of {', '.join(p.name for p in peers)}, got {options.baseline!r}")
    return peers, skipped


def _values(options: PeersOptions, model: Path, peers: Sequence[Peer], room: Path, context: int) -> dict[str, str]:
    """What the commands' fields stand for; weights are written in the forms that a command names."""
    concurrency = max(options.concurrencies)
    folder = transformers_folder(model, room) if any(p.needs("folder") for p in peers) else ""
    given = None if options.gguf is None else options.gguf.resolve()  # servers have folders of their own
    gguf = gguf_file(model, given, room) if any(p.needs("gguf") for p in peers) else ""
    return {
        "model": options.model if options.model in MODEL_NAMES else str(model),
        "folder": str(folder), "gguf": str(gguf), "threads": str(options.num_threads), "concurrency": str(concurrency),
        "context": str(context), "total_context": str(context * concurrency),
        "pages": str((context // PAGE_TOKENS + 1) * concurrency),
    }  # fmt: skip


def _baseline(options: PeersOptions, arms: Sequence[PeerArm]) -> str:
    """The arm that ratios are over: the one asked for, else Paceline's plain or default one, else the first that runs."""
    names = [arm.name for arm in arms if arm.problem is None] or [arms[0].name]
    return options.baseline or next((name for name in (PLAIN, PACELINE) if name in names), names[0])


@contextlib.contextmanager
def _started(
    options: PeersOptions, peers: Sequence[Peer], values: dict[str, str], room: Path, console: Console
) -> Iterator[list[PeerArm]]:
    """Every peer's arm; their servers end with the block."""
    arms = [PeerArm(server=PeerProcess(peer, values, room / peer.name), timeout_s=options.timeout_s) for peer in peers]
    try:
        for arm in arms:
            free = psutil.virtual_memory().available / 2**30
            if free < options.keep_free_gib:
                arm.problem = (
                    f"not started with {free:.1f} GiB of memory left (--keep-free); choose fewer --peers at a time"
                )
            else:
                with console.status(f"starting {arm.name}"):
                    arm.start(options.start_timeout_s)
            words = f"[red]{escape(arm.problem)}[/red]" if arm.problem else "ready"
            console.print(f"{arm.name}: {words}", soft_wrap=True)
        yield arms
    finally:
        for arm in reversed(arms):
            arm.server.stop()


def _run_cell(
    options: PeersOptions, arms: Sequence[PeerArm], index: int, groups: Sequence[Sequence[StreamRequest]], concurrency: int, bar: Bar
) -> None:  # fmt: skip
    """Every group through every living arm, another one first each time."""
    for turn, requests in enumerate(groups):
        first = turn % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            breathe(arms)
            if arm.problem is None:
                arm.take((index, turn - options.warmup), requests, concurrency, options.max_s)
            bar.step(1, arm.name)


def _server(arm: PeerArm) -> dict[str, Any]:
    """What a result says of a server."""
    peer, features = arm.server.peer, arm.features
    return {
        "name": peer.name, "is_own": peer.name.partition("-")[0] == PACELINE, "command": peer.shown,
        "versions": dict(peer.versions), "env": sorted(peer.env), "body": dict(peer.kind.body), "problem": arm.problem,
        "has_token_ids": features is not None and features.has_token_ids,
        "has_usage": features is not None and features.has_usage, "rss_bytes": arm.server.rss_bytes(),
    }  # fmt: skip
