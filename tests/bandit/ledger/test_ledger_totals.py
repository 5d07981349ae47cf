"""Claims of bandit/ledger/totals.py: one fold, right sums, and an interval that covers what it says."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bandit.ledger.ledger import Ledger
from paceline.bandit.ledger.savings import HALF_LIFE_S, Savings
from paceline.bandit.ledger.totals import (
    COSTS,
    KINDS,
    MAX_CELLS,
    MERGED_VERSION,
    ErrorSum,
    LedgerTotals,
    fold_entries,
)
from paceline.contracts import LedgerEntry
from tests.helpers.epochs import epoch, stats


def _entry(i: int, kind: str = "training", **fields) -> LedgerEntry:
    base = {"entry_id": f"d1:{kind}:{i}", "ts": float(i), "kind": kind, "bucket": "a", "version": "v1", "seconds": 1.0}
    return LedgerEntry(**{**base, **fields})


ENTRIES = st.lists(
    st.builds(
        LedgerEntry,
        entry_id=st.uuids().map(str),
        ts=st.integers(0, 500).map(float),
        kind=st.sampled_from(KINDS),
        bucket=st.sampled_from(["", "a", "b|x"]),
        version=st.sampled_from([None, "v1", "v2"]),
        arm=st.sampled_from([None, "head", "full"]),
        seconds=st.floats(-50, 50),
        standard_error_s=st.floats(0, 5),
    ),
    max_size=40,
)


@given(ENTRIES)
def test_every_view_of_the_totals_adds_up_to_the_entries(entries):
    totals = fold_entries(entries)
    rows = totals.rows()
    assert sum(r.num_entries for r in rows) == len(entries)
    for kind in KINDS:
        own = math.fsum(e.seconds for e in entries if e.kind == kind)
        assert totals.by_kind().get(kind, 0.0) == pytest.approx(own, abs=1e-6)
        assert sum(getattr(r, f"{kind}_s") for r in rows) == pytest.approx(own, abs=1e-6)
    assert totals.spent_s() == pytest.approx(sum(r.spent_s for r in rows), abs=1e-6)
    assert totals.saved_s() - totals.spent_s() == pytest.approx(sum(r.net_s for r in rows), abs=1e-6)
    for r in rows:
        of_cell = [e for e in entries if (e.bucket, e.arm, e.version) == (r.bucket, r.arm, r.version)]
        assert r.spent_s == pytest.approx(math.fsum(e.seconds for e in of_cell if e.kind in COSTS), abs=1e-6)


@given(ENTRIES)
def test_the_running_totals_and_the_fold_of_the_entries_are_the_same_also_over_the_wire(entries):
    ledger = Ledger()
    booked = [e for e in sorted(entries, key=lambda e: (e.ts, e.entry_id)) if ledger.add(e)]
    assert ledger.totals == fold_entries(booked)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ledger), type=Ledger) == ledger


@given(st.lists(st.tuples(st.floats(0, 200), st.floats(0, 5)), min_size=1, max_size=20))
def test_the_recursion_is_the_variance_of_the_correlated_sum(steps):
    times = np.cumsum([gap for gap, _ in steps])
    errors = np.array([e for _, e in steps])
    sums = ErrorSum()
    for ts, error in zip(times, errors, strict=True):
        sums.add(float(error), float(ts))
    correlation = 0.5 ** (np.abs(times[:, None] - times[None, :]) / HALF_LIFE_S)
    assert sums.variance == pytest.approx(float(errors @ correlation @ errors), rel=1e-9, abs=1e-9)


def test_bookings_far_apart_add_in_quadrature_and_neighbours_add_linearly():
    near, far = LedgerTotals(), LedgerTotals()
    for i in range(4):
        near.add(_entry(i, "saving", ts=100.0, standard_error_s=1.0))
        far.add(_entry(i, "saving", ts=1e5 * i, standard_error_s=1.0))
    assert near.saved_error_s() == pytest.approx(4.0)
    assert far.saved_error_s() == pytest.approx(2.0)
    low, high = far.saved_interval_s()
    assert (high - low) / 2 == pytest.approx(1.96 * 2.0, rel=1e-3) and (low + high) / 2 == pytest.approx(4.0)


@pytest.mark.parametrize("epochs", [4, 40])
def test_the_interval_covers_the_true_saving(epochs):
    rng, covered, runs = np.random.default_rng(5), 0, 120
    widths, off = [], []
    for _ in range(runs):
        savings, totals, true = Savings(), LedgerTotals(), 0.0
        for i in range(epochs):
            adaptive = stats("adaptive", "v1", 0.008, 12, rng)
            true += adaptive.num_tokens * 0.002
            for b in savings.close(epoch(i, adaptive, stats("static", "v0", 0.010, 5, rng)), "v0"):
                ts = 30.0 * (i + 1)
                totals.add(_entry(i, "saving", ts=ts, seconds=b.seconds, standard_error_s=b.standard_error_s))
        low, high = totals.saved_interval_s()
        covered += low <= true <= high
        widths.append((high - low) / true)
        off.append((totals.saved_s() - true) / totals.saved_error_s())
    assert abs(np.mean(off)) < 0.6
    assert covered / runs >= 0.93  # discounted samples count their noise a little too high: it covers more, not less
    if epochs == 40:
        assert np.mean(widths) < 0.5  # and still says something: within 25% of the saving


def test_cells_are_bounded_and_nothing_is_lost_when_they_merge():
    totals = LedgerTotals()
    for i in range(MAX_CELLS + 50):
        totals.add(_entry(i, "saving", version=f"v{i}", seconds=2.0, standard_error_s=0.1))
    assert len(totals.cells) <= MAX_CELLS + 1
    assert totals.saved_s() == pytest.approx(2.0 * (MAX_CELLS + 50))
    older = next(r for r in totals.rows() if r.version == MERGED_VERSION)
    assert older.saving_s == pytest.approx(2.0 * older.num_entries) and older.num_entries >= 50
    assert totals.rows()[0].bucket == "a"


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind must be one of"):
        LedgerTotals().add(_entry(1, "bribes"))
