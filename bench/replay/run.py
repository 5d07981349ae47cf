"""Replay runs, carried out on many cores or a Ray cluster, and taken up again after a kill."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from rich.console import Console

from paceline.bandit.replay.simulate import simulate
from paceline.bandit.replay.world import RunResult
from paceline.bench.common.terminal import progress
from paceline.bench.replay.plan import Task
from paceline.errors import ConfigError, PacelineError

RUNS_FILE = "runs.jsonl"
Row = dict[str, Any]
RunOne = Callable[[Task], Row]


class Line(RunResult, kw_only=True):
    """What a line of a --resume folder must hold."""

    key: str
    cell: str
    family: str
    policy: str
    settings: dict[str, Any]
    label: str
    seed: int


def run_simulated(task: Task) -> Row:
    """One run as plain values; pure, so that any process gives the same row."""
    result = simulate(task.scenario, task.variant.policy, dict(task.variant.settings), task.seed)
    return row_of(task, msgspec.to_builtins(result))


def row_of(task: Task, result: dict[str, Any]) -> Row:
    """A run's row: what was run and what came of it."""
    return {"key": task.key, "cell": task.scenario.name, "family": task.scenario.family, "policy": task.variant.policy,
            "settings": dict(task.variant.settings), "label": task.variant.label, "seed": task.seed, **result}  # fmt: skip


def read_finished(folder: Path) -> dict[str, Row]:
    """Rows of a --resume folder by key; a torn last line (a killed run) is cut off.

    Raises: ConfigError when another line is damaged.
    """
    path = folder / RUNS_FILE
    if not path.is_file():
        return {}
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        with path.open("r+b") as f:
            f.truncate(len(complete))
    rows: dict[str, Row] = {}
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            row = json.loads(line)
            rows[msgspec.convert(row, Line).key] = row
        except ValueError as e:  # msgspec.ValidationError is one
            raise ConfigError(f"{path} line {number} is damaged ({e}); delete the line or choose another --resume folder") from e  # fmt: skip
    return rows


def run_all(
    tasks: Sequence[Task],
    *,
    workers: int,
    resume: Path | None,
    console: Console,
    ray_address: str | None = None,
    run_one: RunOne = run_simulated,
    title: str = "replay",
) -> list[Row]:
    """Rows of all tasks, in the order of the tasks; every finished one is on disk at once when `resume` is given.

    `title` stands before the progress bar.

    Raises: ConfigError for a damaged folder; PacelineError when a worker process died.
    """
    done = read_finished(resume) if resume is not None else {}
    todo = [t for t in tasks if t.key not in done]
    rows = closing(_rows(todo, workers, ray_address, run_one))
    with _appender(resume) as append, progress(console, title, len(tasks)) as bar, rows as found:
        bar.step(len(tasks) - len(todo), "resumed")
        for row in found:
            done[row["key"]] = row
            append(row)
            bar.step(1, f"{row['cell']} {row['label']}")
    return [done[t.key] for t in tasks]


def _named(run_one: RunOne, task: Task) -> Row:
    """The row of a task; what is raised on the way gets a note that names the run."""
    try:
        return run_one(task)
    except Exception as e:
        e.add_note(f"run: policy {task.variant.label}, cell {task.scenario.name!r}, seed {task.seed}")
        raise


def _rows(todo: Sequence[Task], workers: int, ray_address: str | None, run_one: RunOne) -> Generator[Row, None, None]:
    if not todo:
        return
    if ray_address is not None:
        yield from _on_ray(todo, ray_address, run_one)
    elif workers == 1:
        yield from (_named(run_one, task) for task in todo)
    else:
        yield from _on_cores(todo, workers, run_one)


def _on_cores(todo: Sequence[Task], workers: int, run_one: RunOne) -> Iterator[Row]:
    """Rows as processes finish them; the processes end with the iterator, in the midst of a run where it is closed early."""
    context = multiprocessing.get_context("spawn")  # no half-copied threads of the parent
    others = set(multiprocessing.active_children())
    num = min(workers, len(todo))
    with _one_interrupt(), ProcessPoolExecutor(num, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # workers inherit it: they hear no Ctrl-C
            try:
                futures = [pool.submit(_named, run_one, task) for task in todo]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as e:
            raise PacelineError("a replay worker died (out of memory?); run again with --resume and fewer workers") from e  # fmt: skip
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
            raise


def _end_with_parent() -> None:
    """A worker ends when nobody waits for its rows any more: a parent that was killed could not end it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """The first Ctrl-C stops what is done in the block; those after it do not disturb how it ends."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    is_mine = threading.current_thread() is threading.main_thread()
    if not is_mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _on_ray(todo: Sequence[Task], address: str, run_one: RunOne) -> Iterator[Row]:
    """Rows as a cluster finishes them; tasks that a lost node took with it are retried by Ray."""
    import ray

    began = not ray.is_initialized()
    if began:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as e:
            raise ConfigError(f"ray must be the address of a running cluster, got {address!r} ({e})") from e
    try:
        remote = ray.remote(num_cpus=1, max_retries=3)(_named)
        waiting = [remote.remote(run_one, task) for task in todo]
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1)
            yield from ray.get(ready)
    finally:
        if began:
            ray.shutdown()


@contextmanager
def _appender(folder: Path | None) -> Iterator[Callable[[Row], None]]:
    if folder is None:
        yield lambda row: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / RUNS_FILE).open("a", encoding="utf-8") as f:

        def append(row: Row) -> None:
            f.write(json.dumps(row) + "\n")
            f.flush()
            os.fsync(f.fileno())

        yield append
