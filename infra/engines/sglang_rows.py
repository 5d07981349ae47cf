"""Rows of SGLang: rounds of requests that have ended, from the records that it writes of each (`--export-metrics-to-file`).

A record is the `meta_info` of the answer and, as JSON in `request_parameters`, what was asked. It has sums of a request,
no order of its rounds and no sizes of batches: a request's rounds here have equal times, are spread evenly between its first
token and its end, and shared the device with as many requests as ran meanwhile.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import deque
from pathlib import Path
from typing import Any

from paceline.contracts import ASKED_GROUP, RoundStats

PATTERN = "sglang-request-metrics-*.log"
"""Files of records, one an hour."""
BUCKET_LABEL = "bucket"
"""Key of a request's class in its `custom_labels`."""
_LABEL_PREFIX = "paceline"
_KEPT_LOADS = 4096


def weight_version(group: str, version: str) -> str:
    """What SGLang's `weight_version` is while requests count as those of a group and a drafter version."""
    return f"{_LABEL_PREFIX}/{group}/{version}"


def label_of(name: str) -> tuple[str, str]:
    """The inverse; ('', '') for what others named so."""
    parts = name.split("/")
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == _LABEL_PREFIX else ("", "")


def is_ours(name: str) -> bool:
    """Whether a `weight_version` was set by an agent since the engine's start."""
    return name.startswith(f"{_LABEL_PREFIX}/")


class RecordTail:
    """Records that were written since it was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_to = {path: path.stat().st_size for path in folder.glob(PATTERN)}
        self.num_unreadable = 0
        """Lines that are no record."""

    def read(self) -> list[dict[str, Any]]:
        """The records since the latest call, of whole lines. Raises: OSError where the folder is gone."""
        out: list[dict[str, Any]] = []
        if not self._folder.is_dir():
            raise FileNotFoundError(f"{self._folder} must be a folder")
        paths = sorted(self._folder.glob(PATTERN))
        self._read_to = {path: self._read_to.get(path, 0) for path in paths}
        for path, begin in list(self._read_to.items()):
            try:
                if path.stat().st_size == begin:  # one an hour, and none is ever deleted
                    continue
                with path.open("rb") as file:
                    file.seek(begin)
                    data = file.read()
            except FileNotFoundError:  # somebody tidied up meanwhile
                continue
            whole = data.rfind(b"\n") + 1
            self._read_to[path] = begin + whole
            for line in data[:whole].splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    record = None
                if isinstance(record, dict):
                    out.append(record)
                else:
                    self.num_unreadable += 1
        return out


class Loads:
    """How many requests ran when, by looks at the engine; times are the engine's, s."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=_KEPT_LOADS)
        self._running: deque[int] = deque(maxlen=_KEPT_LOADS)

    def add(self, at: float, num_running: int) -> None:
        if not self._at or at > self._at[-1]:
            self._at.append(at)
            self._running.append(num_running)

    def mean(self, begin: float, end: float) -> float:
        """Requests that ran at a time in between, at least the one that asks; the nearest looks where there was none."""
        times = list(self._at)
        low, high = bisect_left(times, begin), bisect_right(times, end)
        if low == high:
            low, high = max(0, low - 1), min(len(times), high + 1)
        seen = [max(1, n) for n in list(self._running)[low:high]]
        return sum(seen) / len(seen) if seen else 1.0


def bucket_of(record: dict[str, Any]) -> str:
    """The class that a request named, '' = none."""
    labels = _asked(record).get("custom_labels") or {}
    return str(labels.get(BUCKET_LABEL, "")) if isinstance(labels, dict) else ""


def _asked(record: dict[str, Any]) -> dict[str, Any]:
    found = json.loads(record.get("request_parameters") or "{}")
    return found if isinstance(found, dict) else {}


def label_of_request(record: dict[str, Any], max_stale_tokens: int, *, has_switched: bool) -> tuple[str, str]:
    """Group and drafter version that a request counts as.

    One that lived through an exchange of drafters, began with more than `max_stale_tokens` cached tokens that another drafter
    may have left, was taken off the device for a while or began before anything was published is evidence of nothing.
    """
    spans = [label_of(span["version"]) for span in record.get("weight_versions") or ()]
    group, version = spans[0] if spans else label_of(record["weight_version"])
    is_mixed = len({v for _, v in spans}) > 1
    is_stale = has_switched and record.get("cached_tokens", 0) > max_stale_tokens
    if is_mixed or is_stale or not group or record.get("num_retractions", 0):
        return ASKED_GROUP, spans[-1][1] if spans else version
    return group, version


def rounds_of(
    record: dict[str, Any],
    *,
    bucket: str,
    label: tuple[str, str],
    loads: Loads,
    is_training: bool,
    ahead_s: float = 0.0,
) -> RoundStats | None:
    """The rounds of a request; None of one without any, or whose times are unknown.

    ahead_s: what the engine's clock is ahead of the one that rounds are told by.
    Raises: KeyError, TypeError, ValueError where the record is none of SGLang's.
    """
    num_rounds = int(record.get("spec_verify_ct", 0))
    # of an abort there are neither; SGLang tells times only with --enable-metrics
    if not num_rounds or "first_token_latency" not in record or "request_finished_ts" not in record:
        return None
    decode_s = float(record["e2e_latency"]) - float(record["first_token_latency"])
    if decode_s <= 0:
        return None
    end = float(record["request_finished_ts"])
    accepted = [n for n, count in enumerate(record["spec_correct_drafts_histogram"]) for _ in range(count)]
    if len(accepted) != num_rounds:
        raise ValueError(f"spec_correct_drafts_histogram must have {num_rounds} rounds, got {len(accepted)}")
    emitted = [n + 1 for n in accepted]
    too_many = sum(emitted) - (int(record["completion_tokens"]) - 1)  # prefill made the first one
    for i in reversed(range(num_rounds)):  # cut by a stop or the length: which round that was is not told
        cut = min(max(too_many, 0), emitted[i] - 1)
        emitted[i], too_many = emitted[i] - cut, too_many - cut
    sampling = _asked(record).get("sampling_params") or {}
    step_s, batch = decode_s / num_rounds, loads.mean(end - decode_s, end)
    share_ms = 1e3 * step_s / batch
    group, version = label
    n = num_rounds
    return RoundStats(
        request_id=[str(record["id"])] * n, bucket=[bucket] * n, group=[group] * n, drafter_version=[version] * n,
        is_greedy=[sampling.get("temperature") == 0] * n, round_index=list(range(n)),
        num_draft_tokens=[int(record["spec_num_proposed_drafts"]) // n] * n, num_accepted_tokens=accepted,
        num_emitted_tokens=emitted, batch_size=[max(1, round(batch))] * n, draft_ms=[0.0] * n, verify_ms=[share_ms] * n,
        share_ms=[share_ms] * n, is_training=[is_training] * n,
        ts=[end - ahead_s - decode_s + (i + 1) * step_s for i in range(n)],
    )  # fmt: skip
