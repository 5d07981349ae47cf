"""A store that hangs holds one thread and nobody else, and what hung is neither lost nor made twice."""

import os
import sys
import time

import pytest

from paceline.adapt.data.storage_calls import StorageCalls
from paceline.errors import StorageHangsError
from tests.helpers.api_server import wait_until


@pytest.fixture
def pipe(tmp_path):
    """A file that hangs: opening it waits for somebody to write."""
    path = tmp_path / "hangs"
    os.mkfifo(path)
    return path


def answer(pipe, data: bytes) -> None:
    with pipe.open("wb") as f:
        f.write(data)


def test_a_call_that_hangs_is_given_up_others_are_refused_at_once_and_it_is_not_made_again(pipe, tmp_path):
    calls = StorageCalls("the folder", 0.1)
    (tmp_path / "other").write_bytes(b"other")
    began = time.monotonic()
    with pytest.raises(StorageHangsError, match="the folder does not answer for 0 s"):
        calls.run(pipe.read_bytes)
    assert 0.1 <= time.monotonic() - began < 1.0 and calls.hung_s >= 0.1
    began = time.monotonic()
    for _ in range(50):
        with pytest.raises(StorageHangsError):
            calls.run((tmp_path / "other").read_bytes)
    assert time.monotonic() - began < 0.09 and calls.num_hangs == 1, "nobody waits again"
    answer(pipe, b"late")
    wait_until(lambda: calls.hung_s == 0)
    assert calls.error == "" and calls.run(pipe.read_bytes) == b"late", "it would hang again"
    assert calls.run((tmp_path / "other").read_bytes) == b"other"


def test_what_waits_behind_a_hung_call_is_done_when_it_is(pipe, tmp_path):
    calls, made = StorageCalls("the folder", 0.05), tmp_path / "made"
    with pytest.raises(StorageHangsError):
        calls.run(pipe.read_bytes)
    done = calls.later(made.write_text, "x")
    assert not done.done()
    answer(pipe, b"")
    assert done.result(5) == 1 and made.exists()


def test_errors_are_the_callers_also_a_timeout_of_the_store_itself(tmp_path):
    calls = StorageCalls("the folder", 5.0)

    def too_slow() -> None:
        raise TimeoutError("the object store gave up")

    with pytest.raises(TimeoutError, match="the object store gave up"):
        calls.run(too_slow)
    with pytest.raises(FileNotFoundError):
        calls.guard(tmp_path / "none").read_bytes()
    with pytest.raises(SystemExit):
        calls.run(sys.exit, 3)
    assert calls.run(len, "abc") == 3, "the thread is for all calls, whatever one of them raises"
    assert calls.num_hangs == 0 and calls.guard(tmp_path).name == tmp_path.name
