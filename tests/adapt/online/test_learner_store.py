"""A learner's state is whole or not there, whatever is killed or damaged when, and what is kept is bounded."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from paceline import paths
from paceline.adapt.data import blob_io
from paceline.adapt.online import learner_store
from paceline.adapt.online.learner_store import MAX_STATES, LearnerKey, LearnerStore

KEY = LearnerKey("math", "specblock", "0" * 12, "target", "full")


def tensors(value, size=64):
    return {"w": torch.full((size,), float(value)), "seen": torch.arange(int(value))}


def value_of(found):
    state, record = found
    assert bool((state["w"] == record["n"]).all()) and len(state["seen"]) == record["n"], "parts of two states"
    return record["n"]


@pytest.fixture
def store(tmp_path):
    times = itertools.count(1000.0, 0.001)
    return LearnerStore(tmp_path / "learners", now=lambda: next(times))


def files(tmp_path):
    return sorted((tmp_path / "learners").iterdir())


def test_the_newest_state_comes_back_and_the_old_one_goes(store, tmp_path):
    assert store.load(KEY) is None
    for n in (1, 2, 3):
        store.save(KEY, tensors(n), {"n": n})
    assert value_of(store.load(KEY)) == 3 and len(files(tmp_path)) == 1


@pytest.mark.parametrize("field", LearnerKey._fields)
def test_another_base_target_class_or_arm_is_another_learner(store, field):
    store.save(KEY, tensors(1), {"n": 1})
    assert store.load(KEY._replace(**{field: "other"})) is None


def test_a_clock_that_goes_back_does_not_bring_an_old_state_back(tmp_path):
    for n, now in ((1, 2000.0), (2, 1000.0)):
        LearnerStore(tmp_path / "learners", now=lambda now=now: now).save(KEY, tensors(n), {"n": n})
    assert value_of(LearnerStore(tmp_path / "learners").load(KEY)) == 2


@pytest.mark.parametrize("damage", [
    lambda data: data[: len(data) // 2],
    lambda data: b"",
    lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    lambda data: b"\xff" * len(data),
])  # fmt: skip
def test_a_damaged_state_is_left_out_and_the_one_before_counts(store, tmp_path, damage, monkeypatch):
    store.save(KEY, tensors(1), {"n": 1})
    monkeypatch.setattr(LearnerStore, "_delete", lambda self, found: None)  # killed before the old one went
    store.save(KEY, tensors(2), {"n": 2})
    newest = files(tmp_path)[-1]
    newest.write_bytes(damage(newest.read_bytes()))
    assert value_of(store.load(KEY)) == 1
    files(tmp_path)[0].write_bytes(b"x")
    assert store.load(KEY) is None


def test_a_write_that_fails_leaves_the_state_before(store, monkeypatch):
    store.save(KEY, tensors(1), {"n": 1})

    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(paths.os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        store.save(KEY, tensors(2), {"n": 2})
    assert value_of(store.load(KEY)) == 1


def test_states_are_bounded_and_the_oldest_go(store, tmp_path, monkeypatch):
    monkeypatch.setattr(learner_store, "MAX_BYTES", 1)
    for n in range(MAX_STATES + 5):
        store.save(KEY._replace(bucket=f"b{n}"), tensors(n), {"n": n})
    assert len(files(tmp_path)) == MAX_STATES
    assert store.load(KEY._replace(bucket="b4")) is None
    assert value_of(store.load(KEY._replace(bucket="b5"))) == 5


def test_small_states_of_more_classes_are_kept_as_far_as_there_is_room(store, tmp_path, monkeypatch):
    store.save(KEY, tensors(0), {"n": 0})
    size = files(tmp_path)[0].stat().st_size
    monkeypatch.setattr(learner_store, "MAX_BYTES", (MAX_STATES + 10) * size + size // 2)
    for n in range(1, MAX_STATES + 20):
        store.save(KEY._replace(bucket=f"b{n:02d}"), tensors(0), {"n": n})
    assert len(files(tmp_path)) == MAX_STATES + 10
    assert store.load(KEY._replace(bucket="b09")) is None
    assert store.load(KEY._replace(bucket="b10"))[1]["n"] == 10


def test_learners_and_records_of_versions_take_no_places_from_each_other(store, monkeypatch):
    for n in range(MAX_STATES):  # as many classes get a version each
        store.note_learned(f"v{n}", torch.tensor([n]))
        store.save(KEY._replace(bucket=f"b{n}"), tensors(n), {"n": n})
    assert [store.learned_by(f"v{n}") for n in range(MAX_STATES)] == [[n] for n in range(MAX_STATES)]
    assert all(store.load(KEY._replace(bucket=f"b{n}")) for n in range(MAX_STATES))
    store.note_learned("one-more", torch.tensor([1]))
    assert store.learned_by("v0") == [0], "a version may be learned from long behind its learner"
    monkeypatch.setattr(learner_store, "MAX_RECORDS", MAX_STATES + 1)
    store.note_learned("another", torch.tensor([1]))
    assert store.learned_by("v0") == [] and store.learned_by("v1") == [1]


def test_what_a_killed_writer_left_goes_after_a_while(store, tmp_path):
    store.save(KEY, tensors(1), {"n": 1})
    for name, age in (("old.tmp", 2 * blob_io.MAX_UNFINISHED_S), ("new.tmp", 0.0)):
        left = tmp_path / "learners" / name
        left.write_bytes(b"half")
        os.utime(left, (1000.0 - age, 1000.0 - age))
    store.save(KEY, tensors(2), {"n": 2})
    assert [f.name for f in files(tmp_path) if f.suffix == ".tmp"] == ["new.tmp"]


def test_a_version_remembers_what_its_lineage_has_read(store):
    assert store.learned_by("abc") == []
    store.note_learned("abc", torch.tensor([5, 2**62]))
    assert store.learned_by("abc") == [5, 2**62]


def test_a_dropped_learner_is_gone_and_others_stay(store):
    other = KEY._replace(bucket="code")
    for key, n in ((KEY, 1), (other, 2)):
        store.save(key, tensors(n), {"n": n})
    store.drop(KEY)
    store.drop(KEY)
    assert store.load(KEY) is None and value_of(store.load(other)) == 2


WRITER = """
import itertools
import os
import sys
import torch
from paceline.adapt.online.learner_store import LearnerKey, LearnerStore
store, key = LearnerStore(sys.argv[1]), LearnerKey(*sys.argv[2:])
for line in sys.stdin:  # one writer a line
    if writer := os.fork():
        os.waitpid(writer, 0)
        print("dead", flush=True)
        continue
    print(os.getpid(), flush=True)
    for n in itertools.count(1):
        store.save(key, {"w": torch.full((200_000,), float(n)), "seen": torch.arange(n)}, {"n": n})
        print(n, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_its_newest_whole_state(tmp_path):
    rng, command = random.Random(0), [sys.executable, "-c", WRITER, str(tmp_path / "learners"), *KEY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writers:
        for _ in range(8):
            writers.stdin.write("\n")
            writers.stdin.flush()
            writer = int(writers.stdout.readline())
            writers.stdout.readline()
            time.sleep(rng.uniform(0.0, 0.3))
            os.kill(writer, signal.SIGKILL)
            told = 1
            while (line := writers.stdout.readline()) != "dead\n":
                told = int(line)
            found = value_of(LearnerStore(tmp_path / "learners").load(KEY))
            assert told <= found <= told + 1
        writers.stdin.close()
