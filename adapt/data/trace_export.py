"""Trace export: shards as safetensors with a JSON-lines index that any program can read.

Layout below the export's folder (docs/api/exports.md has every field):

    traces.jsonl                 one line a request: which file, and where in its tensors
    traces/<shard id>.safetensors  the shards, byte for byte as the service wrote them

Requests that opted out (`x-paceline-trace: off`) were never stored, so they cannot be exported.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.adapt.data.blob_io import unpack_tensors
from paceline.adapt.data.trace_store import ShardInfo, TraceStore
from paceline.errors import TraceError
from paceline.serving.sampling.request import RequestTrace

log = logging.getLogger(__name__)

INDEX = "traces.jsonl"
FOLDER = "traces"


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request in the index: spans are [start, end) rows of the file's tensors."""

    request_id: str
    file: str
    """Path of the safetensors file, relative to the index."""
    bucket: str
    target_version: str
    created: float
    """When the shard was written, seconds since the epoch."""
    temperature: float
    """0 = greedy."""
    prompt_len: int
    """Prompt tokens; the others are output."""
    tokens: tuple[int, int]
    """Rows of token_ids."""
    features: tuple[int, int]
    """Rows of features: one fewer than tokens, since the last token was never fed to the target."""
    outputs: tuple[int, int]
    """Rows of topk_ids and topk_logprobs."""
    finish_reason: str
    """'stop' | 'length' | 'abort' | 'error'."""
    extra: dict[str, Any] = {}


class TraceExport(msgspec.Struct, frozen=True, kw_only=True):
    """What an export wrote."""

    num_requests: int
    num_shards: int
    num_bytes: int
    sha256: dict[str, str]
    """File -> checksum."""
    num_gone: int
    """Shards that the running service deleted (limits) before they were read."""
    num_damaged: int


def export_traces(
    store: TraceStore, out: Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> TraceExport:
    """Copy every complete shard of `store` below `out` and write the index; nothing is written for an empty store.

    Args:
        progress: (shards done, shards in all).
    Raises: OSError when `out` cannot be written.
    """
    shards = store.list_shards()
    sums: dict[str, str] = {}
    num_requests = num_bytes = num_gone = num_damaged = 0
    if shards:
        (out / FOLDER).mkdir(parents=True, exist_ok=True)
    lines = bytearray()
    for done, shard in enumerate(shards, start=1):
        progress(done, len(shards))
        try:
            data = store.read_bytes(shard.shard_id)
        except TraceError:
            num_gone += 1
            continue
        try:
            rows = index_rows(shard, data)
        except TraceError as e:
            num_damaged += 1
            log.warning("left out: %s", e)
        else:
            file = f"{FOLDER}/{shard.shard_id}.safetensors"
            (out / file).write_bytes(data)
            sums[file] = hashlib.sha256(data).hexdigest()
            num_requests, num_bytes = num_requests + len(rows), num_bytes + len(data)
            for row in rows:
                lines += msgspec.json.encode(row) + b"\n"
    if sums:
        (out / INDEX).write_bytes(lines)
    return TraceExport(
        num_requests=num_requests, num_shards=len(sums), num_bytes=num_bytes, sha256=sums,
        num_gone=num_gone, num_damaged=num_damaged,
    )  # fmt: skip


def index_rows(shard: ShardInfo, data: bytes) -> list[TraceRow]:
    """The index lines of a shard; raises TraceError when its tensors do not fit together."""
    try:
        tensors, info = unpack_tensors(data)
        cu, prompts = tensors["cu_tokens"].tolist(), tensors["prompt_lens"].tolist()
        rows, out = [], 0
        for r, request_id in enumerate(info["request_ids"]):
            start, end = cu[r], cu[r + 1]
            num_outputs = end - start - prompts[r]
            rows.append(
                TraceRow(
                    request_id=request_id,
                    file=f"{FOLDER}/{shard.shard_id}.safetensors",
                    bucket=info["bucket"],
                    target_version=info["target_version"],
                    created=float(info["created"]),
                    temperature=float(tensors["temperatures"][r]),
                    prompt_len=prompts[r],
                    tokens=(start, end),
                    features=(start - r, end - r - 1),
                    outputs=(out, out + num_outputs),
                    finish_reason=info["finish_reasons"][r],
                    extra=info["extra"][r] or {},
                )
            )
            out += num_outputs
        ends = {"token_ids": cu[-1], "features": cu[-1] - len(rows), "topk_ids": out, "topk_logprobs": out}
        wrong = [name for name, end in ends.items() if tensors[name].shape[0] != end]
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise TraceError(f"trace shard {shard.shard_id} is damaged ({e}); delete it") from e
    if wrong:
        raise TraceError(f"trace shard {shard.shard_id} is damaged ({', '.join(wrong)} do not fit); delete it")
    return rows


def load_traces(out: Path) -> Iterator[RequestTrace]:
    """The exported traces in index order, each file read once: the folder of files is a trace store itself.

    Raises: TraceError when a file is missing or damaged; FileNotFoundError without an index.
    """
    with (out / INDEX).open("rb") as lines:
        files = dict.fromkeys(msgspec.json.decode(line, type=TraceRow).file for line in lines)
    for file in files:
        try:
            yield from TraceStore(out / FOLDER).read_shard(Path(file).stem)
        except TraceError as e:
            raise TraceError(f"exported file {file} is missing or damaged ({e}); export again") from e
