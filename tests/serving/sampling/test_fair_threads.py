"""Fair threads: a tenant with much work leaves room, and whoever has the fewest threads gets the next one."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait

import pytest

from paceline.errors import CapacityError
from paceline.serving.sampling.fair_threads import FairThreads


class Work:
    """Pieces of work that end when they are told to; `begun` has their names in order."""

    def __init__(self, num_threads: int) -> None:
        self.threads, self.begun, self.may_end = FairThreads("t", num_threads), [], {}
        self._changed = threading.Condition()

    def add(self, tenant: str, name: str) -> Future[str]:
        self.may_end[name] = threading.Event()

        def work() -> str:
            with self._changed:
                self.begun.append(name)
                self._changed.notify_all()
            assert self.may_end[name].wait(10)
            return name

        return self.threads.submit(tenant, work)

    def has_begun(self, num: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= num, 10)
            return list(self.begun)

    def end(self, *names: str) -> None:
        for name in names:
            self.may_end[name].set()


def test_one_tenant_has_at_most_half_and_work_of_nobody_all() -> None:
    work = Work(4)
    futures = [work.add("acme", f"a{i}") for i in range(6)]
    futures += [work.add("bolt", "b0")]
    assert set(work.has_begun(3)) == {"a0", "a1", "b0"}
    futures += [work.add("", "n0"), work.add("", "n1")]
    assert set(work.has_begun(4)) == {"a0", "a1", "b0", "n0"}
    work.end(*work.may_end)
    assert [f.result(10) for f in futures] == list(work.may_end)
    alone = Work(4)
    futures = [alone.add("", f"n{i}") for i in range(4)]
    assert len(alone.has_begun(4)) == 4
    alone.end(*alone.may_end)
    wait(futures, 10)


def test_the_next_thread_goes_to_whoever_has_the_fewest_in_turn() -> None:
    work = Work(1)
    first = work.add("acme", "a0")
    rest = [work.add("acme", f"a{i}") for i in (1, 2)] + [work.add("bolt", "b0"), work.add("core", "c0")]
    assert work.has_begun(1) == ["a0"]
    work.end(*work.may_end)
    wait([first, *rest], 10)
    assert sorted(work.begun[1:4]) == ["a1", "b0", "c0"] and work.begun[4] == "a2"


def test_cancelled_work_is_never_begun_and_errors_are_the_callers() -> None:
    work = Work(1)
    work.add("", "busy")
    waiting, after = work.add("", "gone"), work.add("", "after")
    assert waiting.cancel()
    work.end("busy", "after")
    assert after.result(10) == "after" and work.begun == ["busy", "after"]

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work.threads.submit("", fail).result(10)


def test_no_thread_to_work_in_is_said_and_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = FairThreads("t", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start")))
        with pytest.raises(CapacityError, match="try again"):
            threads.submit("", lambda: 1).result(10)
    assert threads.submit("", lambda: 2).result(10) == 2 and threading.stack_size() == 0
