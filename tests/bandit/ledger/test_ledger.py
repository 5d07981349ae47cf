import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bandit.ledger.ledger import MAX_IDS, Bank, Ledger, contradictions, entry_id
from paceline.contracts import LedgerEntry


def _entry(name: str, kind: str = "training", seconds: float = 1.0, ts: float = 1.0) -> LedgerEntry:
    return LedgerEntry(entry_id=name, ts=ts, kind=kind, bucket="a", version=None, seconds=seconds)


@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.sampled_from(("training", "shadow", "staging")), st.floats(0, 100)), max_size=40
    )
)
def test_folding_the_same_costs_of_jobs_and_swaps_twice_changes_nothing(rows):
    entries = [_entry(f"d{i}:{kind}", kind, seconds) for i, kind, seconds in rows]
    once, twice = Ledger(), Ledger()
    for e in entries:
        once.add(e)
    for e in entries + entries[::-1]:
        twice.add(e)
    assert once == twice


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind must be one of"):
        Ledger().add(_entry("x", "bribes"))


def test_what_a_ledger_remembers_is_bounded_and_its_totals_are_not():
    ledger = Ledger()
    for i in range(10 * MAX_IDS):
        assert ledger.add(_entry(f"d{i}:training"))
        assert ledger.add(_entry(f"d{i}:saving:e{i}", "saving"))
    assert len(ledger.cost_ids) == MAX_IDS
    assert ledger.totals.by_kind() == {"training": 10 * MAX_IDS, "saving": 10 * MAX_IDS}
    assert not ledger.add(_entry(f"d{10 * MAX_IDS - 1}:training"))


def test_a_doubled_a_lost_and_an_orphaned_entry_are_contradictions():
    ledger, entries = Ledger(), [_entry("d0:saving:e1", "saving"), _entry("d0:saving:e2", "saving")]
    for e in entries:
        ledger.add(e)
    assert contradictions(ledger.totals, entries, []) == []
    assert any("booked twice" in c for c in contradictions(ledger.totals, [*entries, entries[0]], []))
    assert any("its entries sum to 1.0" in c for c in contradictions(ledger.totals, entries[:1], []))
    ledger.add(orphan := _entry("d7:training:j"))
    assert contradictions(ledger.totals, [*entries, orphan], []) == ["entry d7:training:j names an unknown decision"]


def test_entry_ids_name_their_decision():
    assert entry_id(7, "training", "job") == "d7:training:job"
    assert entry_id(None, "saving") == "d0:saving"


def test_the_bank_counts_only_savings_beyond_their_error():
    bank = Bank(start_s=20.0, saved_s=5.0, saved_error_s=8.0, spent_s=4.0)
    assert bank.balance_s == 16.0
    assert Bank(start_s=20.0, saved_s=30.0, saved_error_s=8.0, spent_s=4.0).balance_s == 38.0
    assert Bank(start_s=20.0, saved_s=-5.0, saved_error_s=8.0, spent_s=4.0).balance_s == 11.0


def test_the_time_limit_leaves_money_for_what_follows_the_training():
    bank = Bank(start_s=20.0, saved_s=0.0, saved_error_s=0.0, spent_s=4.0)
    limit = bank.time_limit_s(120.0, 1.1, 2.0)
    assert limit * 1.1 + 2.0 == pytest.approx(16.0)
    assert bank.time_limit_s(5.0, 1.1, 2.0) == 5.0
    assert bank.time_limit_s(120.0, 0.0, 2.0) == bank.time_limit_s(120.0, 0.0, 20.0) == 120.0, (
        "a trainer that costs nothing"
    )
    assert bank.time_limit_s(120.0, 1.1, 20.0) == 0.0


@given(start=st.floats(0, 100), income=st.floats(0, 100), spent=st.floats(0, 300))
def test_the_credit_is_the_starting_balance_until_the_income_is_more(start, income, spent):
    bank = Bank(start_s=start, income_s=income, saved_s=0.0, saved_error_s=0.0, spent_s=spent)
    assert bank.balance_s == pytest.approx(max(start, income) - spent)


@given(
    start=st.floats(0, 100),
    income=st.floats(0, 100),
    saved=st.floats(-50, 100),
    spent=st.floats(0, 300),
    ahead=st.floats(0, 50),
)
def test_hopes_have_what_was_earned_or_will_be_soon_whatever_the_starting_balance(start, income, saved, spent, ahead):
    def hopes(start_s: float) -> float:
        return Bank(start_s=start_s, income_s=income, saved_s=saved, saved_error_s=1.0, spent_s=spent).hope_s(ahead)

    assert hopes(start) == pytest.approx(hopes(0.0), abs=1e-9)
    assert hopes(start) <= max(income, ahead) + max(saved, 0.0) - spent + 1e-9
