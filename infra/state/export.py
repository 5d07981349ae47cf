"""Export: decisions, ledger, traces and feedback of a data directory as files for analysis elsewhere.

Reads what the service keeps and changes nothing. The folder appears complete or not at all; docs/api/exports.md has every
field with its unit. Requests that opted out have no trace, so none is exported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated as A
from typing import Any, TypeVar

import msgspec
from redis.exceptions import RedisError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.adapt.data.blob_io import check_store
from paceline.bandit.ledger.totals import fold_entries
from paceline.contracts import Decision, FeedbackBatch, LedgerEntry, RoundStats, decode, rows_of
from paceline.errors import PacelineError
from paceline.infra.state.log import parsed_line
from paceline.infra.state.redis_clients import Keys, patient_client, redact
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import Clock, SystemClock
from paceline.paths import DECISIONS, TRACES, keep_private, open_folder, service_home
from paceline.records import Setting, record, require

T = TypeVar("T")
WHAT = ("decisions", "ledger", "traces", "feedback")
FORMAT = 1
"""Version of the layout; readers refuse what they do not know."""
MANIFEST = "export.json"
_PAGE = 500
Report = Callable[[int, int], None]
"""(done, total) of the part that is being exported."""


@record()
class ExportOptions:
    """JSON lines and safetensors in a folder (docs/api/exports.md). Nothing is changed; requests that opted out were never
    stored."""

    data_dir: A[Path, Setting("Data folder of the service (paceline serve --data-dir).", is_folder=True)]
    out: A[Path, Setting("New or empty folder.")]
    what: A[
        tuple[str, ...], Setting(f"Comma list of {', '.join(WHAT)}.", choices=WHAT, non_empty=True)
    ] = WHAT  # fmt: skip
    redis_url: A[
        str | None,
        Setting(
            "Redis of the service, for feedback; default: the embedded one, once the service has stopped.",
            env="PACELINE_REDIS_URL",
        ),
    ] = field(default=None, repr=False)  # fmt: skip
    store_url: A[
        str | None, Setting("Object store of the service, where it has one, as s3://BUCKET/PREFIX: its traces are there.")
    ] = None  # fmt: skip
    model_name: A[str, Setting("Name of the service in /v1/models.")] = "paceline"

    def __post_init__(self) -> None:
        is_new = not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir()))
        require(is_new, "out must be a new or empty folder", str(self.out))
        check_store(self.store_url)

    @property
    def home(self) -> Path:
        """The service's folder; the data folder itself, which older releases used, where there is none."""
        home = service_home(self.data_dir, self.model_name)
        return home if home.is_dir() else self.data_dir

    @property
    def traces(self) -> Path | str:
        """Where the service's traces are."""
        if self.store_url is None:
            return self.home / TRACES
        return f"{self.store_url.rstrip('/')}/services/{service_home(self.data_dir, self.model_name).name}/{TRACES}"


def run_export(options: ExportOptions, console: Console, *, clock: Clock | None = None) -> dict[str, Any]:
    """Write the export and return its manifest; says on the console what was written and what there was not.

    Raises: PacelineError, with one sentence a part, when there is nothing to export.
    """
    keep_private()
    with open_folder(options.out) as part:
        manifest: dict[str, Any] = {
            "format": FORMAT, "paceline": importlib.metadata.version("paceline"),
            "created": (clock or SystemClock()).now(), "files": {}, "missing": [],
        }  # fmt: skip
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            for what in dict.fromkeys(options.what):
                task = bar.add_task(f"exporting {what}", total=None)
                report = lambda done, total, task=task: bar.update(task, completed=done, total=total)  # noqa: E731
                _PARTS[what](options, part, manifest, report)
        if not manifest["files"]:
            raise PacelineError("there is nothing to export: " + "; ".join(manifest["missing"]))
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for name, facts in manifest["files"].items():
        rows = "tensors" if facts["rows"] is None else f"{facts['rows']} rows"
        console.print(f"{name}: {rows}, {facts['bytes']} bytes", highlight=False)
    for sentence in manifest["missing"]:
        console.print(f"not exported: {sentence}", highlight=False)
    console.print(f"written to {options.out}", highlight=False, soft_wrap=True)
    return manifest


# ---- decisions and ledger: from the JSON-lines log, which keeps everything -----------------------------------------
def log_records(path: Path, kind: str, report: Report = lambda done, total: None) -> list[dict[str, Any]]:
    """Records of a kind ('decision' | 'ledger') in the order of first appearance, each with its `run`.

    A decision is logged again whenever its realised values change: its newest form counts. A ledger entry is logged once,
    with its number; when the service went back to an older state, its numbers are given again, and the entries that had
    them count for nothing. Ids begin anew when the service lost its state, which starts another run. Runs are counted by
    decisions and ledger entries together, so that the two files agree. A torn last line is left out.
    """
    decisions: dict[tuple[int, int], dict[str, Any]] = {}
    entries: list[dict[str, Any]] = []
    run, has_records = 1, False  # of the run so far: a start after which nothing was logged is none

    def go_back(num_booked: int) -> None:
        while entries and entries[-1]["run"] == run and entries[-1]["number"] > num_booked:
            entries.pop()

    for row in _log_lines(path, report):
        if "entry_id" in row:  # its own `kind` (training, ...) replaces the log's
            has_records = True
            go_back(row["number"] - 1)
            entries.append({**row, "run": run})
        elif row.get("kind") == "decision":
            has_records = True
            decisions[run, row["decision_id"]] = {**row, "run": run}
        elif row.get("kind") == "note" and "commit" in row:  # the controller started
            if row["commit"] > 0:
                go_back(row["num_booked"])
            elif has_records:
                run, has_records = run + 1, False
    found = list(decisions.values()) if kind == "decision" else entries
    dropped = ("log_id", "number", "kind") if kind == "decision" else ("log_id", "number")
    return [{name: value for name, value in row.items() if name not in dropped} for row in found]


def _export_decisions(options: ExportOptions, out: Path, manifest: dict, report: Report) -> None:
    rows = log_records(options.home / DECISIONS, "decision", report)
    _write_rows(out, "decisions.jsonl", rows, manifest, "no decision has been logged yet")
    if rows:  # with what every epoch measured, for `paceline replay`
        _write_rows(out, "replay.jsonl", _log_lines(options.home / DECISIONS), manifest, "the log is empty")


def _log_lines(path: Path, report: Report = lambda done, total: None) -> Iterator[dict[str, Any]]:
    """The log as it is, without lines that are torn; nothing when there is no file."""
    if not path.is_file():
        return
    done, total = 0, path.stat().st_size
    with path.open("rb") as lines:
        for index, line in enumerate(lines):
            done += len(line)
            if index % 256 == 0:
                report(done, total)
            if (row := parsed_line(line)) is not None:  # else it is being written, or was cut by a crash
                yield row


def _export_ledger(options: ExportOptions, out: Path, manifest: dict, report: Report) -> None:
    rows = log_records(options.home / DECISIONS, "ledger", report)
    _write_rows(out, "ledger.jsonl", rows, manifest, "nothing has been booked in the ledger yet")
    if rows:
        totals = fold_entries(msgspec.convert(row, LedgerEntry) for row in rows)
        spent, saved = totals.spent_s(), totals.saved_s()
        manifest["ledger"] = {
            "spent_s": spent, "saved_s": saved, "net_s": saved - spent, "saved_interval_s": list(totals.saved_interval_s()),
            "cells": msgspec.to_builtins(totals.rows()),
        }  # fmt: skip


# ---- traces --------------------------------------------------------------------------------------------------------
def _export_traces(options: ExportOptions, out: Path, manifest: dict, report: Report) -> None:
    from paceline.adapt.data.trace_export import INDEX, export_traces
    from paceline.adapt.data.trace_store import TraceStore

    done = export_traces(TraceStore(options.traces), out, progress=report)
    if done.num_shards:
        for name, digest in done.sha256.items():
            manifest["files"][name] = {"rows": None, "bytes": (out / name).stat().st_size, "sha256": digest}
        _note_file(out, INDEX, done.num_requests, manifest)
    else:
        manifest["missing"].append(f"traces: the trace store {options.traces} is empty")
    if done.num_gone or done.num_damaged:
        manifest["missing"].append(
            f"traces: {done.num_gone} shards were deleted by the service's limits meanwhile, {done.num_damaged} are damaged"
        )


# ---- feedback: what the stream in Redis still holds ----------------------------------------------------------------
def _export_feedback(options: ExportOptions, out: Path, manifest: dict, report: Report) -> None:
    server = None
    try:
        if options.redis_url:
            url = options.redis_url
        elif (options.data_dir / "redis").is_dir():
            server = EmbeddedRedis(options.data_dir).start()
            url = server.url
        else:
            manifest["missing"].append(
                "feedback: the data directory has no embedded Redis; name the service's --redis-url"
            )
            return
        rows = feedback_rows(url, Keys(options.model_name), report)
        if_empty = (
            f"the stream of service {options.model_name!r} holds no rows; set feedback.keep_rows to keep them there"
        )
        _write_rows(out, "feedback.jsonl", rows, manifest, if_empty)
    except PacelineError as e:
        hint = "" if options.redis_url else "; the embedded Redis of a running service cannot be read"
        manifest["missing"].append(f"feedback: {e}{hint}")
    except RedisError as e:
        (out / "feedback.jsonl").unlink(missing_ok=True)
        manifest["missing"].append(f"feedback: Redis at {redact(url)} cannot be read ({type(e).__name__}: {e})")
    finally:
        if server is not None:
            server.stop()


def feedback_rows(url: str, keys: Keys, report: Report = lambda done, total: None) -> Iterator[dict[str, Any]]:
    """Rows that travel with batches in the stream, once each; request ids become pseudonyms of this export. Raises redis errors."""
    client, salt = patient_client(url), secrets.token_bytes(16)
    total, done, start = int(client.xlen(keys.feedback)), 0, "-"  # type: ignore[arg-type]
    seen: set[tuple[str, int, int]] = set()
    try:
        while True:
            page: list[Any] = client.xrange(keys.feedback, min=start, count=_PAGE)  # type: ignore[assignment]
            for _, fields in page:
                try:
                    batch = decode(fields[b"v"], FeedbackBatch)
                    rows = rows_of(batch)
                except (KeyError, msgspec.DecodeError):
                    continue  # the controller counts unreadable entries (lost_entries)
                key = (batch.replica_id, batch.boot_epoch, batch.seq)
                if rows is not None and key not in seen:
                    seen.add(key)
                    yield from _lines_of(batch, rows, salt)
            done += len(page)
            report(done, max(total, done))
            if len(page) < _PAGE:
                return
            start = f"({page[-1][0].decode()}"
    finally:
        client.close()


def _lines_of(batch: FeedbackBatch, rows: RoundStats, salt: bytes) -> Iterator[dict[str, Any]]:
    shared = {name: getattr(batch, name) for name in ("replica_id", "boot_epoch", "seq", "target_version")}
    columns = {name: column for name, column in msgspec.structs.asdict(rows).items() if column}
    for i, request_id in enumerate(rows.request_id):
        row = {name: values[i] for name, values in columns.items()}
        row["request_id"] = hashlib.blake2b(request_id.encode(), key=salt, digest_size=8).hexdigest()
        yield {**row, **shared}


# ---- files ---------------------------------------------------------------------------------------------------------
_PARTS: dict[str, Callable[[ExportOptions, Path, dict, Report], None]] = {
    "decisions": _export_decisions, "ledger": _export_ledger, "traces": _export_traces, "feedback": _export_feedback,
}  # fmt: skip


def _write_rows(out: Path, name: str, rows: Iterable[dict], manifest: dict, if_empty: str) -> None:
    num_rows = 0
    with (out / name).open("wb") as f:
        for row in rows:
            f.write(msgspec.json.encode(row) + b"\n")  # a number that is not finite becomes null
            num_rows += 1
    if num_rows:
        _note_file(out, name, num_rows, manifest)
    else:
        (out / name).unlink()
        manifest["missing"].append(f"{name.split('.')[0]}: {if_empty}")


def _note_file(out: Path, name: str, num_rows: int, manifest: dict) -> None:
    with (out / name).open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    manifest["files"][name] = {"rows": num_rows, "bytes": (out / name).stat().st_size, "sha256": digest}


def load_decisions(out: Path) -> list[Decision]:
    """Exported decisions, none where the service had none. Raises PacelineError when they were not exported."""
    return _load(out, "decisions.jsonl", Decision)


def load_ledger(out: Path) -> list[LedgerEntry]:
    """Exported ledger entries, none where the service had none. Raises PacelineError when they were not exported."""
    return _load(out, "ledger.jsonl", LedgerEntry)


def _load(out: Path, name: str, kind: type[T]) -> list[T]:
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise PacelineError(f"{out} has export format {manifest['format']}, this version reads {FORMAT}")
        if any(sentence.startswith(f"{name.partition('.')[0]}: ") for sentence in manifest["missing"]):
            return []
        with (out / name).open("rb") as lines:
            return [msgspec.json.decode(line, type=kind) for line in lines]
    except FileNotFoundError as e:
        raise PacelineError(f"{out} holds no exported {name}; run `paceline export --data-dir DIR --out DIR`") from e
