"""Trace store: place and format of the traces of served requests.

A shard is one safetensors file with the traces of R requests of one bucket and one target version:

| tensor | shape, type | meaning |
|---|---|---|
| `token_ids` | (sum T,) int32 | prompt and output of each request, packed |
| `cu_tokens` | (R + 1,) int64 | offsets of each request in `token_ids` |
| `prompt_lens` | (R,) int64 | prompt tokens of each request |
| `temperatures` | (R,) float32 | 0 = greedy |
| `features` | (sum (T - 1), m * Dm), target's type | tapped hidden states of rows 0..T-2 |
| `topk_ids`, `topk_logprobs` | (sum outputs, k) int32, float32 | the target's top-k for each output token |

Its metadata (JSON under the key `paceline`) holds request ids, finish reasons, bucket, target version, tapped layers and
creation time. The file name repeats what a listing needs, so that listing a store opens no shard; the bucket comes last.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from paceline.adapt.data.blob_io import delete_unfinished, open_store, pack_tensors, unpack_tensors, write_atomic
from paceline.contracts import ArmSpec
from paceline.errors import TraceError
from paceline.machine import Clock, SystemClock
from paceline.serving.sampling.request import RequestTrace

if TYPE_CHECKING:  # a controller handles no tensor
    import torch

log = logging.getLogger(__name__)
_SUFFIX = ".safetensors"
_MAX_NAME_CHARS = 200


MAX_TRACE_ROWS = 1024
"""Rows of a request that a learner's step takes: its memory and seconds are bounded by them."""


def learned_span(trace: RequestTrace, max_rows: int = MAX_TRACE_ROWS) -> slice:
    """Tokens of a trace that make at most max_rows rows, some of its output among them: a longer one loses the beginning of its
    prompt, down to half of max_rows, and then its end."""
    start = max(0, min(len(trace.token_ids) - 1 - max_rows, trace.prompt_len - 1 - max_rows // 2))
    return slice(start, min(len(trace.token_ids), start + max_rows + 1))


def count_rows(traces: Iterable[RequestTrace]) -> int:
    """Supervised rows: the output tokens of their `learned_span`; what is cut off teaches nothing and is counted nowhere."""
    return sum(learned_span(t).stop - t.prompt_len for t in traces)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """What a listing says about a shard."""

    shard_id: str
    bucket: str
    num_rows: int
    """Supervised rows: output tokens of all its requests."""
    num_bytes: int
    created: float
    """Seconds since the epoch."""
    target_version: str


def newest(shards: Sequence[ShardInfo], num_rows: float) -> list[ShardInfo]:
    """The newest shards that hold num_rows together, oldest first."""
    out: list[ShardInfo] = []
    total = 0
    for shard in reversed(shards):
        if total >= num_rows:
            break
        out.append(shard)
        total += shard.num_rows
    return out[::-1]


def handed_over(
    arm: ArmSpec, own: Sequence[ShardInfo], others: Sequence[Sequence[ShardInfo]]
) -> tuple[list[ShardInfo], list[ShardInfo]]:
    """(shards of the class, shards of other classes to rehearse) of a burst, out of all that there are, oldest first.

    Twice the arm's rows of each, since the learner may have read part of them.
    """
    share = 2 * int(arm.num_rows * arm.rehearsal_share / max(1, len(others))) + 1
    return newest(own, 2 * arm.num_rows), [s for shards in others for s in newest(shards, share)]


def _quote(text: str) -> str:
    return quote(text, safe="").replace("_", "%5F")


def _is_corrupt(trace: RequestTrace, features: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> str | None:
    num_tokens, num_outputs = len(trace.token_ids), len(trace.token_ids) - trace.prompt_len
    if not 1 <= trace.prompt_len < num_tokens:
        return f"prompt_len must be in [1, {num_tokens - 1}], got {trace.prompt_len}"
    if features.shape[0] != num_tokens - 1:
        return f"features must have {num_tokens - 1} rows, got {features.shape[0]}"
    if ids.shape != logprobs.shape or ids.shape[0] != num_outputs:
        return f"top-k tensors must have {num_outputs} rows, got {tuple(ids.shape)} and {tuple(logprobs.shape)}"
    return None


class TraceStore:
    """Shards below one fsspec location; safe for one writer process per shard and any number of readers."""

    def __init__(self, root: str | Path, *, clock: Clock | None = None) -> None:
        self._fs, self._root = open_store(root)
        self._clock = clock or SystemClock()

    def write_shard(self, traces: list[RequestTrace], bucket: str) -> str:
        """Write the traces of one bucket and target version as one shard; return its id.

        Raises: TraceError when the traces are inconsistent; OSError when the store refuses.
        """
        if not traces:
            raise TraceError("a shard must hold at least one trace, got none")
        versions = {t.target_version for t in traces}
        if len(versions) != 1:
            raise TraceError(f"a shard must hold one target version, got {', '.join(sorted(versions))}")
        import torch

        feats = [torch.as_tensor(t.features) for t in traces]
        ids = [torch.as_tensor(t.topk_ids).int() for t in traces]
        logprobs = [torch.as_tensor(t.topk_logprobs).float() for t in traces]
        for trace, f, i, lp in zip(traces, feats, ids, logprobs, strict=True):
            if problem := _is_corrupt(trace, f, i, lp):
                raise TraceError(f"trace of request {trace.request_id}: {problem}")
        kinds = {(f.shape[1:], f.dtype, t.tap_layers) for f, t in zip(feats, traces, strict=True)}
        if len(kinds) != 1 or len({i.shape[1] for i in ids}) != 1:
            raise TraceError(
                "traces of a shard must agree in tapped layers, feature size, feature type and top-k width"
            )
        lengths = torch.tensor([0] + [len(t.token_ids) for t in traces])
        created = self._clock.now()
        data = pack_tensors(
            {
                "token_ids": torch.tensor([x for t in traces for x in t.token_ids], dtype=torch.int32),
                "cu_tokens": lengths.cumsum(0),
                "prompt_lens": torch.tensor([t.prompt_len for t in traces]),
                "temperatures": torch.tensor([t.temperature for t in traces], dtype=torch.float32),
                "features": torch.cat(feats),
                "topk_ids": torch.cat(ids),
                "topk_logprobs": torch.cat(logprobs),
            },
            {
                "bucket": bucket,
                "target_version": traces[0].target_version,
                "tap_layers": traces[0].tap_layers,
                "created": created,
                "request_ids": [t.request_id for t in traces],
                "finish_reasons": [t.finish_reason for t in traces],
                "extra": [t.extra for t in traces],
            },
        )
        num_rows = count_rows(traces)
        parts = (f"{int(created * 1e6):016d}", str(num_rows), _quote(versions.pop()), uuid.uuid4().hex[:8])
        shard_id = "_".join((*parts, quote(bucket, safe="")))
        if len(shard_id) > _MAX_NAME_CHARS:
            raise TraceError(
                f"bucket name must give a file name of at most {_MAX_NAME_CHARS} characters, got {bucket!r}"
            )
        write_atomic(self._fs, self._path(shard_id), data)
        return shard_id

    def read_bytes(self, shard_id: str) -> bytes:
        """The shard's file as it was written. Raises TraceError when it is gone (deleted by the limits)."""
        try:
            return self._fs.cat_file(self._path(shard_id))
        except FileNotFoundError as e:
            raise TraceError(f"trace shard {shard_id} is gone; list the shards again") from e

    def read_shard(self, shard_id: str) -> list[RequestTrace]:
        """Read a shard back. Raises TraceError when it is gone (deleted by the limits) or damaged."""
        data = self.read_bytes(shard_id)
        try:
            t, info = unpack_tensors(data)
            cu, prompts = t["cu_tokens"].tolist(), t["prompt_lens"].tolist()
            token_ids, temps = t["token_ids"].tolist(), t["temperatures"].tolist()
            taps = None if (found := info.get("tap_layers")) is None else tuple(found)
            traces, out = [], 0
            for r, request_id in enumerate(info["request_ids"]):
                a, b, num_outputs = cu[r], cu[r + 1], cu[r + 1] - cu[r] - prompts[r]
                traces.append(
                    RequestTrace(
                        request_id=request_id,
                        bucket=info["bucket"],
                        temperature=temps[r],
                        prompt_len=prompts[r],
                        token_ids=token_ids[a:b],
                        features=t["features"][a - r : b - r - 1],
                        topk_ids=t["topk_ids"][out : out + num_outputs],
                        topk_logprobs=t["topk_logprobs"][out : out + num_outputs],
                        target_version=info["target_version"],
                        finish_reason=info["finish_reasons"][r],
                        extra=info["extra"][r],
                        tap_layers=taps,
                    )
                )
                out += num_outputs
            return traces
        except (ValueError, KeyError, IndexError, TypeError) as e:
            raise TraceError(f"trace shard {shard_id} is damaged ({e}); delete it") from e

    def list_shards(self, bucket: str | None = None) -> list[ShardInfo]:
        """List complete shards, oldest first; files that are not shards are ignored."""
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        infos = [info for e in entries if (info := self._info(e)) is not None]
        return sorted((i for i in infos if bucket in (None, i.bucket)), key=lambda i: (i.created, i.shard_id))

    def delete_shard(self, shard_id: str) -> None:
        """Delete a shard; it is no error when it is gone already."""
        try:
            self._fs.rm_file(self._path(shard_id))
        except FileNotFoundError:
            log.debug("trace shard %s was gone already", shard_id)

    def delete_all(self) -> int:
        """Delete every shard, and half-written ones, which a writer that lives writes again; returns how many shards."""
        shards = self.list_shards()
        for shard in shards:
            self.delete_shard(shard.shard_id)
        delete_unfinished(self._fs, self._root, math.inf)
        return len(shards)

    def delete_tenant(self, tenant: str) -> int:
        """Delete every shard that holds a trace of the tenant, or cannot be read, and half-written ones, which a writer that
        lives writes again; returns how many shards.

        Whole shards go: a rewritten one would look younger than its data. Opt the tenant out first
        (trace.opt_out_tenants), or a running replica may write what it still holds.
        """
        deleted = 0
        for shard in self.list_shards():
            try:
                is_hit = any(t.extra.get("tenant") == tenant for t in self.read_shard(shard.shard_id))
            except TraceError as e:
                log.warning("trace shard %s is deleted unread: %s", shard.shard_id, e)
                is_hit = True
            if is_hit:
                self.delete_shard(shard.shard_id)
                deleted += 1
        delete_unfinished(self._fs, self._root, math.inf)
        return deleted

    def enforce_limits(self, max_bytes: int, max_age_s: float, now: float) -> int:
        """Delete the oldest shards until all are younger than max_age_s and together at most max_bytes.

        Files that a killed writer left unfinished go at the same age. Returns the number of deleted shards.
        """
        shards = self.list_shards()
        delete_unfinished(self._fs, self._root, now, max_age_s)
        total, deleted = sum(s.num_bytes for s in shards), 0
        for shard in shards:
            if total <= max_bytes and now - shard.created <= max_age_s:
                break
            self.delete_shard(shard.shard_id)
            total -= shard.num_bytes
            deleted += 1
        return deleted

    def _path(self, shard_id: str) -> str:
        if "/" in shard_id or "\\" in shard_id:
            raise TraceError(f"shard id must come from list_shards, got {shard_id!r}")
        return f"{self._root}/{shard_id}{_SUFFIX}"

    def _info(self, entry: dict) -> ShardInfo | None:
        name = entry["name"].rsplit("/", 1)[-1]
        parts = name.removesuffix(_SUFFIX).split("_", 4)
        if not name.endswith(_SUFFIX) or len(parts) != 5 or not (parts[0].isdigit() and parts[1].isdigit()):
            return None
        return ShardInfo(
            shard_id=name.removesuffix(_SUFFIX),
            bucket=unquote(parts[4]),
            num_rows=int(parts[1]),
            num_bytes=int(entry["size"]),
            created=int(parts[0]) / 1e6,
            target_version=unquote(parts[2]),
        )
