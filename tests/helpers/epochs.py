"""Epochs of one bucket, as savings are measured from."""

from paceline.bandit.beliefs.observation import BucketObservation, VersionStats
from paceline.bandit.beliefs.ratio import RatioSums


def stats(group: str, version: str, seconds_per_token: float, requests: int, rng) -> VersionStats:
    """About 100 tokens a request, its speed spread by 15%."""
    pool = RatioSums()
    for _ in range(requests):
        tokens = float(rng.integers(60, 140))
        pool.add(tokens * seconds_per_token * (1 + 0.15 * rng.standard_normal()), tokens)
    return VersionStats(
        group=group,
        version=version,
        num_tokens=round(pool.x),
        device_s=pool.y,
        num_rounds=round(pool.x),
        drafted_rounds=0,
        drafted_s=0.0,
        plain_s=0.0,
        plain_tokens=0,
        time_per_token=pool,
        acceptance_length=RatioSums(),
    )


def epoch(i: int, *found: VersionStats) -> BucketObservation:
    """Epoch number i of bucket "a", 30 s long."""
    return BucketObservation(bucket="a", start=30.0 * i, end=30.0 * (i + 1), batch_size=4.0, stats=found)
