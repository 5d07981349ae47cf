"""Records of SGLang: what they become, what counts as evidence, and that none is read twice or lost."""

import json

import pytest

from paceline.contracts import ASKED_GROUP
from paceline.infra.engines.sglang_rows import (
    Loads,
    RecordTail,
    bucket_of,
    label_of,
    label_of_request,
    rounds_of,
    weight_version,
)
from tests.helpers.sglang_server import SglangDouble

OLD, NEW = weight_version("static", "aaaa"), weight_version("adaptive", "bbbb")


@pytest.fixture
def double(tmp_path, drafters):
    return SglangDouble(drafters.served, drafters.target, tmp_path / "records")


def rounds(record, loads=None, **kwargs):
    label = label_of_request(record, 64, has_switched=True)
    values = {"bucket": "b", "label": label, "loads": loads or Loads(), "is_training": False, **kwargs}
    return rounds_of(record, **values)


def test_a_weight_version_says_group_and_drafter_and_others_say_nothing():
    assert label_of(NEW) == ("adaptive", "bbbb")
    assert label_of("default") == label_of("step/7/1") == ("", "")


def test_a_request_becomes_its_rounds(double):
    record = double.finish("r", [0, 5, 2], bucket="code", versions=(NEW,), at=100.0, decode_s=6.0)
    rows = rounds(record, bucket=bucket_of(record))
    assert rows.num_rows == 3
    assert sorted(rows.num_accepted_tokens) == [0, 2, 5]
    assert rows.num_emitted_tokens == [n + 1 for n in rows.num_accepted_tokens]
    assert rows.num_draft_tokens == [5, 5, 5]
    assert (set(rows.bucket), set(rows.group), set(rows.drafter_version)) == ({"code"}, {"adaptive"}, {"bbbb"})
    assert rows.ts == [96.0, 98.0, 100.0]
    assert rows.share_ms == [2000.0] * 3
    assert rows.round_index == [0, 1, 2]
    assert all(rows.is_greedy)


def test_emitted_tokens_are_the_answers_less_the_one_of_prefill(double):
    record = double.finish(
        "r", [5, 5], versions=(NEW,), completion_tokens=9
    )  # 12 + 1 were drafted and kept, a stop cut 4
    assert sum(rounds(record).num_emitted_tokens) == 8


def test_no_temperature_is_not_greedy(double):
    assert not any(rounds(double.finish("r", [1], versions=(NEW,), temperature=None)).is_greedy)


def test_the_device_is_shared_by_those_that_ran_meanwhile(double):
    loads = Loads()
    for at, running in ((90.0, 9), (95.0, 4), (98.0, 2), (101.0, 9)):
        loads.add(at, running)
    rows = rounds(double.finish("r", [1, 1], versions=(NEW,), at=100.0, decode_s=6.0), loads)
    assert rows.batch_size == [3, 3]
    assert rows.share_ms == [1000.0, 1000.0]


def test_a_short_request_goes_by_the_nearest_looks_and_one_before_any_is_alone():
    loads = Loads()
    assert loads.mean(1.0, 2.0) == 1.0
    loads.add(10.0, 3)
    loads.add(11.0, 5)
    assert loads.mean(10.2, 10.4) == 4.0
    assert loads.mean(20.0, 21.0) == 5.0
    loads.add(12.0, 0)
    assert loads.mean(11.9, 12.5) == 1.0, "the one that asks ran"


@pytest.mark.parametrize("change", [
    {"versions": (OLD, NEW)}, {"cached_tokens": 65}, {"num_retractions": 1}, {"versions": ("default",)},
])  # fmt: skip
def test_what_is_no_evidence_is_asked(double, change):
    assert (
        label_of_request(double.finish("r", [1], **{"versions": (NEW,), **change}), 64, has_switched=True)[0]
        == ASKED_GROUP
    )


def test_one_drafter_in_two_groups_is_no_mixture(double):
    versions = (weight_version("static", "aaaa"), weight_version("adaptive", "aaaa"))
    assert label_of_request(double.finish("r", [1], versions=versions), 64, has_switched=True) == ("static", "aaaa")


def test_cached_tokens_are_no_matter_before_the_first_exchange(double):
    record = double.finish("r", [1], versions=(NEW,), cached_tokens=500)
    assert label_of_request(record, 64, has_switched=False)[0] == "adaptive"


def test_requests_without_rounds_or_times_leave_none(double):
    assert rounds(double.finish("r", [], versions=(NEW,))) is None
    untimed = double.finish("r", [1], versions=(NEW,))
    del untimed["request_finished_ts"]
    assert rounds(untimed) is None


def test_rounds_that_do_not_add_up_are_refused(double):
    record = double.finish("r", [1, 1], versions=(NEW,), spec_correct_drafts_histogram=[0, 1])
    with pytest.raises(ValueError, match="must have 2 rounds, got 1"):
        rounds(record)


def test_the_tail_reads_each_whole_line_once_and_none_from_before(double):
    double.finish("before", [1])
    tail = RecordTail(double.records)
    assert tail.read() == []
    double.finish("r1", [1])
    (file,) = double.records.iterdir()
    with file.open("a") as out:
        out.write("no JSON\n" + json.dumps({"id": "half"})[:6])
    assert [r["id"] for r in tail.read()] == ["r1"]
    with file.open("a") as out:
        out.write(json.dumps({"id": "half"})[6:] + "\n")
    (double.records / "sglang-request-metrics-20991231_23.log").write_text('{"id": "next hour"}\n')
    assert [r["id"] for r in tail.read()] == ["half", "next hour"]
    assert tail.read() == []
    assert tail.num_unreadable == 1


def test_a_file_that_was_tidied_up_takes_no_other_along(double, tmp_path, monkeypatch):
    tail = RecordTail(double.records)
    record = double.finish("r", [1], versions=(NEW,))
    gone = double.records / "sglang-request-metrics-19990101_00.log"  # found, and deleted before it is read
    monkeypatch.setattr(type(double.records), "glob", lambda self, pattern: iter([*self.iterdir(), gone]))
    assert tail.read() == [record]
    for path in double.records.iterdir():
        path.unlink()
    double.records.rmdir()
    with pytest.raises(FileNotFoundError):
        tail.read()
