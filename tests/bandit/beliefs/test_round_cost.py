import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bandit.beliefs.belief import BatchCost
from paceline.bandit.beliefs.round_cost import FORETOLD_ROUNDS, RoundCosts, size_class
from paceline.contracts import CellSums, FeedbackSums, RequestSums, SizeSums
from tests.helpers.feedback import sums_of
from tests.helpers.views import make_belief


def _rows(size: int, ms: float, count: int = 20, *, drafted: bool = True, emitted: int = 2, group: str = "adaptive"):
    row = {
        "batch_size": size, "share_ms": ms, "num_draft_tokens": 8 * drafted, "num_emitted_tokens": emitted, "group": group,
    }  # fmt: skip
    return [row] * count


def test_batch_sizes_beyond_four_share_a_class_with_the_next_power_of_two():
    assert [size_class(b) for b in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [1, 2, 3, 4, 8, 8, 16, 16, 32]


def test_prices_are_kept_apart_by_batch_size_and_weighted_by_tokens():
    costs = RoundCosts()
    costs.fold(sums_of(_rows(1, 20.0) + _rows(8, 6.0, emitted=6)))
    one, eight = costs.batches("a")
    assert (one.round_s, eight.round_s) == (pytest.approx(0.020), pytest.approx(0.006))
    assert (one.share, eight.share) == (pytest.approx(0.25), pytest.approx(0.75))
    assert one.plain_token_s is None and costs.batches("b") == []


def test_the_price_of_plain_decoding_is_known_where_a_good_part_of_rounds_went_without_a_draft():
    costs = RoundCosts()
    costs.fold(sums_of(_rows(8, 9.0) + _rows(8, 4.0, drafted=False, emitted=1) + _rows(1, 20.0)))
    one, eight = costs.batches("a")
    assert eight.plain_token_s == pytest.approx(0.004) and one.plain_token_s is None


def test_requests_without_a_drafter_set_no_price():
    costs = RoundCosts()
    costs.fold(sums_of(_rows(1, 20.0, group="plain")))
    assert costs.batches("a") == []


def test_shares_follow_the_load_at_once_and_prices_are_remembered():
    costs = RoundCosts()
    costs.fold(sums_of(_rows(1, 20.0, count=200)))
    for _ in range(6):
        costs.fade(30.0)
        costs.fold(sums_of(_rows(8, 6.0)))
    shares = {round(b.round_s, 3): b.share for b in costs.batches("a")}
    assert shares[0.006] > 0.95
    costs.fade(30.0)
    costs.fold(sums_of(_rows(1, 20.0, count=60)))
    again = {round(b.round_s, 3): b.share for b in costs.batches("a")}
    assert again[0.02] > 0.5


def test_the_price_of_drafting_outlasts_a_time_without_drafts_but_a_few_rounds_set_none():
    costs = RoundCosts()
    costs.fold(sums_of(_rows(1, 20.0, count=7) + _rows(2, 6.0, count=9)))
    for _ in range(40):
        costs.fade(1e5)
        costs.fold(sums_of([*_rows(1, 4.0, drafted=False, emitted=1), *_rows(2, 3.0, drafted=False, emitted=1)]))
    one, two = costs.batches("a")
    assert one.round_s is None and one.plain_token_s == pytest.approx(0.004)
    assert two.round_s == pytest.approx(0.006) and two.plain_token_s == pytest.approx(0.003)
    costs.fold(sums_of(_rows(2, 60.0, count=4)))  # a probe of few dear rounds is no price
    assert costs.batches("a")[1].round_s == pytest.approx(0.006)
    costs.fold(sums_of(_rows(2, 12.0, count=400)))
    assert costs.batches("a")[1].round_s == pytest.approx(0.012, rel=0.05)


def _plain_sums(draft_ratio: float, num_rounds: int = 40) -> FeedbackSums:
    sizes = {4: SizeSums(num_rounds=num_rounds, plain_s=0.005 * num_rounds, num_tokens=num_rounds, plain_tokens=num_rounds, draft_ratio=draft_ratio)}  # fmt: skip
    cell = CellSums(
        bucket="a", group="adaptive", version="v0", requests={"q": RequestSums(0.2, num_rounds)}, sizes=sizes
    )
    return FeedbackSums(cells=[cell])


def test_rounds_that_nobody_drafted_count_with_the_price_that_the_engines_foretell():
    costs = RoundCosts()
    costs.fold(_plain_sums(0.0))
    assert costs.round_s("a") is None and costs.batches("a")[0].round_s is None  # nobody told
    costs.fold(_plain_sums(1.5))
    assert costs.round_s("a") == pytest.approx(0.0075) and costs.batches("a")[0].plain_token_s == pytest.approx(0.005)
    costs.fold(_plain_sums(0.0))  # a replica that tells nothing takes nothing back
    assert costs.round_s("a") == pytest.approx(0.0075)
    costs.fold(_plain_sums(2.5))  # 40 rounds at 7.5 ms, 40 at 12.5
    assert costs.round_s("a") == pytest.approx(0.010)
    costs.fold(sums_of(_rows(4, 30.0)))  # the 20 of a probe weigh no more than that
    assert costs.round_s("a") == pytest.approx(0.014)
    costs.fade(1e6)
    costs.fold(_plain_sums(2.0))
    assert costs.round_s("a") == pytest.approx(0.010) and costs.round_s("b") is None


@pytest.mark.parametrize("num_drafted", [300, 3000])
def test_many_drafted_rounds_outweigh_what_is_foretold_and_few_do_not(num_drafted):
    """Seen at 10 ms, foretold at 7.5; whatever the number of plain rounds that it is foretold of."""
    costs = RoundCosts()
    costs.fold(_plain_sums(1.5, num_rounds=100_000))
    costs.fold(sums_of(_rows(4, 10.0, count=num_drafted)))
    share = num_drafted / (num_drafted + FORETOLD_ROUNDS)
    assert costs.round_s("a") == pytest.approx(0.0075 + 0.0025 * share)


def test_summed_feedback_counts_like_rows():
    rows, sums = RoundCosts(), RoundCosts()
    rows.fold(sums_of(_rows(4, 10.0) + _rows(4, 5.0, drafted=False)))
    cell = CellSums(
        bucket="a", group="adaptive", version="v0", requests={"q": RequestSums(0.3, 80.0, 20.0, 40.0)},
        sizes={4: SizeSums(num_rounds=40, drafted_rounds=20, drafted_s=0.2, plain_s=0.1, num_tokens=80, plain_tokens=20)},
    )  # fmt: skip
    sums.fold(FeedbackSums(cells=[cell]))
    (one,), (two,) = rows.batches("a"), sums.batches("a")
    assert (one.round_s, one.plain_token_s) == pytest.approx((two.round_s, two.plain_token_s)) == (0.01, 0.005)
    assert rows.sums["a"][4].tokens == sums.sums["a"][4].tokens == 80.0


@pytest.mark.parametrize("text_rounds", [0, 10, 40])
def test_a_better_drafter_gains_in_the_rounds_that_are_its_own(text_rounds):
    """The same text before and after: text turns take and bring the same, the others are half as many and twice as long."""
    text = [r | {"is_from_text": True} for r in _rows(4, 6.0, count=text_rounds, emitted=5)]
    before, after = _rows(4, 10.0, count=40) + text, _rows(4, 10.0, count=20, emitted=4) + text
    costs = RoundCosts()
    costs.fold(sums_of(before))
    belief = make_belief(length=2.0, batches=costs.batches("a"))
    took_s, takes_s = (sum(r["share_ms"] for r in rows) / 1e3 for rows in (before, after))
    assert belief.token_s(2.0) == pytest.approx(took_s / (80 + 5 * text_rounds))
    assert belief.relative_gain(2.0, 4.0) == pytest.approx(1 - takes_s / took_s)


def test_a_better_drafter_gains_nothing_where_full_batches_are_served_plain():
    single = BatchCost(share=0.5, round_s=0.010, plain_token_s=None)
    full = BatchCost(share=0.5, round_s=0.010, plain_token_s=0.004)
    alone, mixed, crowded = (
        make_belief(length=1.5, batches=b)
        for b in (
            [msgspec.structs.replace(single, share=1.0)],
            [single, full],
            [msgspec.structs.replace(full, share=1.0)],
        )
    )
    gains = [b.relative_gain(1.5, 2.2) for b in (alone, mixed, crowded)]
    assert gains[0] == pytest.approx(1 - 1.5 / 2.2)
    assert gains[0] > gains[1] > gains[2] == 0.0
    assert crowded.relative_gain(1.5, 4.0) > 0.3  # until drafting beats plain decoding there as well


@given(
    a=st.floats(1, 6),
    b=st.floats(1, 6),
    plain=st.one_of(st.none(), st.floats(0.001, 0.02)),
    share=st.floats(0.01, 0.99),
)
def test_a_longer_acceptance_never_costs_more(a, b, plain, share):
    batches = [
        BatchCost(share=share, round_s=0.01, plain_token_s=plain),
        BatchCost(share=1 - share, round_s=0.004, plain_token_s=None),
    ]
    belief = make_belief(batches=batches)
    low, high = sorted((a, b))
    assert belief.token_s(high) <= belief.token_s(low) + 1e-12
    assert 0.0 <= belief.relative_gain(low, high) < 1.0
