"""Version pool: old drafter versions that keep their weights for a recall, within a limit in bytes.

Versions without use go first, then the least recently used; the best version of a bucket outlives every other one, and
what somebody refers to is never given up. Manifests always stay: they are small and say what was learned from what.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from paceline.contracts import DrafterManifest


def best_versions(scores: Mapping[str, Mapping[str, float]]) -> set[str]:
    """The version with the longest acceptance length of every bucket; `scores`: bucket -> version -> length."""
    return {max(lengths, key=lambda v: (lengths[v], v)) for lengths in scores.values() if lengths}


def choose_evictions(
    manifests: Sequence[DrafterManifest],
    *,
    kept: Collection[str],
    best: Collection[str],
    worthless: Collection[str],
    last_used: Mapping[str, float],
    max_bytes: int,
) -> list[str]:
    """Versions whose weights should go so that the rest holds at most `max_bytes`, first the one to go first.

    Args:
        manifests: versions that have weights now.
        kept: live, first, canary, staged, or where a rollback leads: never given up, even beyond the limit.
        best: best of a bucket: given up only when nothing else is left.
        worthless: versions that may never be served again: given up first.
        last_used: version -> time; a version without one was last used when it was made.
    """
    total = sum(m.num_bytes for m in manifests)

    def rank(m: DrafterManifest) -> tuple[int, float, str]:
        worth = 0 if m.version in worthless else 2 if m.version in best else 1
        return worth, max(last_used.get(m.version, 0.0), m.created), m.version

    out = []
    for m in sorted((m for m in manifests if m.version not in kept), key=rank):
        if total <= max_bytes:
            break
        out.append(m.version)
        total -= m.num_bytes
    return out
