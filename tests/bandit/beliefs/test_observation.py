import numpy as np
import pytest

from paceline.bandit.beliefs.observation import Window, close, fold
from tests.helpers.feedback import sums_of


def _rows(n: int, seed: int) -> list[dict]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        accepted = int(rng.integers(0, 4))
        rows.append(
            {
                "request_id": f"q{rng.integers(7)}",
                "bucket": str(rng.choice(["a", "b"])),
                "group": str(rng.choice(["adaptive", "static", "plain"])),
                "drafter_version": str(rng.choice(["v0", "v1"])),
                "num_draft_tokens": int(rng.choice([0, 8])),
                "num_accepted_tokens": accepted,
                "num_emitted_tokens": accepted + 1,
                "share_ms": float(rng.uniform(1, 20)),
                "batch_size": int(rng.integers(1, 5)),
            }
        )
    return rows


def test_every_row_is_counted_once_in_its_bucket_group_and_version():
    rows = _rows(300, 0)
    windows: dict[str, Window] = {}
    fold(windows, sums_of(rows))
    for name, window in windows.items():
        for stats in close(name, window, 0.0, 10.0).stats:
            own = [
                r for r in rows if (r["bucket"], r["group"], r["drafter_version"]) == (name, stats.group, stats.version)
            ]
            drafted = [r for r in own if r["num_draft_tokens"] > 0]
            assert stats.num_rounds == len(own) and stats.drafted_rounds == len(drafted)
            assert stats.num_tokens == sum(r["num_emitted_tokens"] for r in own)
            assert stats.device_s == pytest.approx(sum(r["share_ms"] for r in own) / 1000)
            assert stats.acceptance_length.y == sum(r["num_accepted_tokens"] + 1 for r in drafted)
            assert stats.acceptance_length.x == len(drafted)
            assert stats.time_per_token.n == len({r["request_id"] for r in own})


def test_rounds_of_a_text_drafter_count_for_the_time_and_say_nothing_of_the_version():
    rows = _rows(300, 2)
    rng = np.random.default_rng(3)
    texts = [r | {"is_from_text": True, "num_accepted_tokens": 7, "num_emitted_tokens": 8} for r in _rows(200, 4)]
    mixed: dict[str, Window] = {}
    alone: dict[str, Window] = {}
    fold(mixed, sums_of([both[i] for both in [rows + texts] for i in rng.permutation(len(both))]))
    fold(alone, sums_of(rows))
    for name, window in alone.items():
        found = {(s.group, s.version): s for s in close(name, mixed[name], 0.0, 10.0).stats}
        for own in close(name, window, 0.0, 10.0).stats:
            stats = found[own.group, own.version]
            text = [
                t for t in texts if (t["bucket"], t["group"], t["drafter_version"]) == (name, own.group, own.version)
            ]
            assert (stats.text_rounds, stats.text_tokens) == (len(text), 8 * len(text))
            assert stats.text_s == pytest.approx(sum(t["share_ms"] for t in text) / 1000)
            for part in ("drafted_rounds", "drafted_s", "plain_s", "plain_tokens"):
                assert getattr(stats, part) == pytest.approx(getattr(own, part))
            assert stats.acceptance_length.ratio() == pytest.approx(own.acceptance_length.ratio())
            assert stats.num_rounds == own.num_rounds
            assert stats.num_tokens == own.num_tokens + 8 * len(text)
            assert stats.device_s == pytest.approx(own.device_s + stats.text_s)


def test_splitting_a_batch_changes_nothing():
    rows = _rows(200, 1)
    whole: dict[str, Window] = {}
    parts: dict[str, Window] = {}
    fold(whole, sums_of(rows))
    for i in range(0, 200, 17):
        fold(parts, sums_of(rows[i : i + 17]))
    for name in whole:
        a, b = close(name, whole[name], 0, 5), close(name, parts[name], 0, 5)
        assert a.batch_size == pytest.approx(b.batch_size)
        for x, y in zip(a.stats, b.stats, strict=True):
            assert (x.group, x.version, x.num_tokens) == (y.group, y.version, y.num_tokens)
            assert x.time_per_token.yy == pytest.approx(y.time_per_token.yy)


def test_load_is_tokens_per_second_of_a_group():
    windows: dict[str, Window] = {}
    fold(windows, sums_of([{"num_emitted_tokens": 30}, {"num_emitted_tokens": 10, "group": "static"}]))
    seen = close("a", windows["a"], 5.0, 15.0)
    assert seen.load("adaptive") == pytest.approx(3.0) and seen.load() == pytest.approx(4.0)


def test_an_empty_batch_opens_no_window():
    windows: dict[str, Window] = {}
    fold(windows, sums_of([]))
    assert windows == {}
