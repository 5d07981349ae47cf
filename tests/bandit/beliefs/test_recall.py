import msgspec
import pytest

from paceline.bandit.beliefs.belief import BucketBelief
from paceline.bandit.beliefs.observation import BucketObservation, VersionStats
from paceline.bandit.beliefs.ratio import RatioSums
from paceline.bandit.beliefs.recall import ScoreTable
from paceline.bandit.policies.pricing import headroom, price_recalls, recall_rates
from paceline.contracts import ShadowScore, TrainResult


def _seen(bucket: str, version: str, length: float, group: str = "adaptive", start: float = 0.0) -> BucketObservation:
    pool = RatioSums()
    for i in range(10):
        rounds = 20 + i
        pool.add(rounds * (length + 0.05 * (-1) ** i), rounds)
    stats = VersionStats(
        group=group,
        version=version,
        num_tokens=round(pool.y),
        device_s=1.0,
        num_rounds=int(pool.x),
        drafted_rounds=int(pool.x),
        drafted_s=1.0,
        plain_s=0.0,
        plain_tokens=0,
        time_per_token=pool,
        acceptance_length=pool,
    )
    return BucketObservation(bucket=bucket, start=start, end=start + 10, batch_size=4.0, stats=(stats,))


def _belief(bucket: str, load: float, length: float) -> BucketBelief:
    return BucketBelief(
        bucket=bucket,
        load=load,
        time_per_token_s=0.01 / length,
        round_s=0.01,
        plain_token_s=None,
        length=length,
        length_se=0.02,
        usable_rows=0,
        fresh_rows=0,
        learned_rows=0,
        required_rows=768,
        is_active=load > 0,
    )


def _score(version: str, length: float) -> ShadowScore:
    return ShadowScore(
        version=version, acceptance_length=length, num_requests=30, num_tokens=3000, gain_mean=0.0, gain_lower=0.0
    )


def _result(status: str = "accepted") -> TrainResult:
    return TrainResult(
        job_id="j",
        status=status,
        version="v1",
        reason="",
        train_s=1.0,
        shadow_s=1.0,
        candidate=_score("v1", 1.8),
        incumbent=_score("v0", 1.5),
        first=_score("v0", 1.5),
    )


def _table() -> ScoreTable:
    table = ScoreTable()
    for bucket, version, length in (("a", "v0", 2.6), ("a", "v1", 2.1), ("c", "v0", 1.4), ("c", "v1", 2.0)):
        table.observe(_seen(bucket, version, length))
    return table


VERSIONS = {"a": "v1", "c": "v0"}.__getitem__


def test_every_bucket_is_priced_for_itself():
    beliefs = {"a": _belief("a", 100, 2.1), "c": _belief("c", 20, 1.4)}
    found = price_recalls(beliefs, ["v0", "v1"], VERSIONS, table=_table(), horizon_s=100, staging_s=0.1)
    assert [(r.bucket, r.version) for r in found] == [("a", "v0"), ("c", "v1")], "none gets what it has"
    assert found[0].gain == pytest.approx(1 - 2.1 / 2.6, abs=0.01)
    assert found[1].gain == pytest.approx(1 - 1.4 / 2.0, abs=0.01)
    quiet = {"a": _belief("a", 0, 2.1), "c": _belief("c", 20, 1.4)}
    assert [r.bucket for r in price_recalls(quiet, ["v0", "v1"], VERSIONS, table=_table(), horizon_s=100, staging_s=0.1)] == ["c"]  # fmt: skip


def test_a_version_is_not_priced_where_it_is_unknown():
    beliefs = {"new": _belief("new", 100, 1.5)}
    assert price_recalls(beliefs, ["v1"], lambda _: "v0", table=_table(), horizon_s=100, staging_s=0.1) == []


def test_the_best_recall_of_a_bucket_is_what_a_job_on_it_must_beat():
    beliefs = {"a": _belief("a", 100, 2.1), "c": _belief("c", 20, 1.4)}
    found = price_recalls(beliefs, ["v0", "v1"], VERSIONS, table=_table(), horizon_s=100, staging_s=0.1)
    rates = recall_rates(beliefs, found)
    assert rates == {r.bucket: pytest.approx(beliefs[r.bucket].busy * (r.gain - r.gain_se)) for r in found}
    assert recall_rates(beliefs, [msgspec.structs.replace(found[0], gain=-0.1)]) == {}


def test_replay_scores_are_put_on_the_scale_of_serving():
    table = ScoreTable()
    table.observe(_seen("c", "v0", 1.2))
    table.add_job("c", _result())
    assert table.estimate("c", "v1")[0] == pytest.approx(1.8 * 1.2 / 1.5, rel=0.02)


def test_a_new_version_is_known_where_its_job_rehearsed_and_nowhere_else():
    table = ScoreTable()
    for bucket, length in (("a", 2.6), ("b", 2.0), ("c", 1.5)):
        table.observe(_seen(bucket, "v0", length))
    result = msgspec.structs.replace(_result(), elsewhere={"a": [_score("v1", 2.7), _score("v0", 3.0)]})
    table.add_job("c", result)
    assert table.estimate("a", "v1")[0] == pytest.approx(2.7 * 2.6 / 3.0, rel=0.01), "on the scale of serving"
    assert table.estimate("b", "v1") is None
    refused = ScoreTable()
    refused.add_job("c", msgspec.structs.replace(result, status="rejected", version=None))
    assert refused.estimate("a", "v1") is None and refused.estimate("a", "v0") is not None


def test_replays_of_the_text_that_was_are_compared_with_newer_ones_by_the_versions_that_have_both():
    """A class of 8 tokens a round gets other text, of 1: a version that a job scores there no more is no better for its old score."""
    table = ScoreTable()
    table.add_job("b", msgspec.structs.replace(_result(), elsewhere={"c": [_score("v2", 8.4), _score("v0", 8.0)]}))
    assert table.estimate("c", "v2")[0] == pytest.approx(8.4)
    before = table.estimate("c", "v2")[1] / 8.4
    scores = [_score("v1", 1.2), _score("v0", 1.0)]
    table.add_job("b", msgspec.structs.replace(_result(), elsewhere={"c": scores}))
    assert table.estimate("c", "v2")[0] == pytest.approx(1.05) and table.estimate("c", "v1")[0] == pytest.approx(1.2)
    assert table.estimate("c", "v2")[1] / 1.05 > before, "a score of other text is less sure"
    table.add_job("b", msgspec.structs.replace(_result(), elsewhere={"c": [_score("v3", 1.5)]}))
    assert table.estimate("c", "v2")[0] == pytest.approx(1.05), "nothing ties the new score to the others"


def test_a_refused_candidate_never_enters_the_table():
    table = ScoreTable()
    table.observe(_seen("c", "v0", 1.5))
    table.add_job("c", _result("rejected"))
    assert table.estimate("c", "v1") is None


def test_scores_of_versions_that_do_not_serve_are_kept():
    table = _table()
    for i in range(50):
        table.observe(_seen("a", "v0", 2.6, start=10.0 * i))
    assert table.estimate("c", "v1")[0] == pytest.approx(2.0, rel=0.01)
    table.reset_bucket("c")
    assert table.estimate("c", "v1") is None


def test_a_replay_counts_where_a_served_version_ties_it_to_what_is_served_now():
    """Rows of the text that was are replayed while other text is served: 5.3 of one version says nothing against 2.8 of another."""
    table = ScoreTable()
    table.set_shadow("a", "v1", 5.3, 30)
    assert table.estimate("a", "v1")[0] == pytest.approx(5.3), "nothing is served yet"
    table.observe(_seen("a", "v0", 2.8))
    assert table.estimate("a", "v1") is None
    table.set_shadow("a", "v0", 5.0, 30)
    assert table.estimate("a", "v1")[0] == pytest.approx(5.3 * 2.8 / 5.0, rel=0.02)


def test_a_length_of_zero_is_not_known():
    pool = RatioSums()
    for _ in range(10):
        pool.add(0.0, 20.0)
    seen = _seen("a", "v1", 2.0)
    table = ScoreTable()
    stats = msgspec.structs.replace(seen.stats[0], acceptance_length=pool)
    table.observe(msgspec.structs.replace(seen, stats=(stats,)))
    assert table.estimate("a", "v1") is None


def test_of_buckets_that_learn_together_one_that_the_first_drafter_knows_is_no_try_and_one_that_was_trained_is():
    new = _belief("a", 1.0, 2.5)
    known = msgspec.structs.replace(new, bucket="b", learned_rows=200_000, first_rows=200_000)
    trained = msgspec.structs.replace(new, learned_rows=3000)
    assert headroom(BucketBelief.pooled(new, [new, known]), 0.0) == headroom(new, 0.0)
    assert headroom(BucketBelief.pooled(known, [trained, known]), 0.0) == headroom(trained, 0.0) < headroom(new, 0.0)
