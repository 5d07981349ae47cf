"""Manifest facts: what manifests say about versions: rows learned of every bucket, scores by replay."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.contracts import DrafterManifest


def learned_rows(manifests: Sequence[DrafterManifest]) -> dict[str, dict[str, int]]:
    """Version -> bucket -> distinct rows it has learned: the first drafter's own record, then one job after another.

    A version without any record is left out, so that nothing is believed about it.
    """
    by_version = {m.version: m for m in manifests}
    out: dict[str, dict[str, int]] = {}

    def of(version: str | None, depth: int = 0) -> dict[str, int]:
        manifest = by_version.get(version or "")
        if manifest is None or depth > len(by_version):
            return {}
        if manifest.version not in out:
            rows = dict(of(manifest.parent, depth + 1)) if manifest.parent else _recorded(manifest)
            if manifest.bucket is not None:
                fresh = manifest.metrics.get("num_fresh_rows", manifest.num_train_rows)
                rows[manifest.bucket] = rows.get(manifest.bucket, 0) + int(fresh)
            out[manifest.version] = rows
        return out[manifest.version]

    for manifest in manifests:
        of(manifest.version)
    return {version: rows for version, rows in out.items() if rows}


def _recorded(manifest: DrafterManifest) -> dict[str, int]:
    for source in (manifest.metrics, manifest.config):
        found = source.get("learned_rows")
        if isinstance(found, dict):
            return {str(k): int(v) for k, v in found.items() if isinstance(v, int | float)}
    return {}


def shadow_lengths(manifests: Sequence[DrafterManifest]) -> dict[str, dict[str, float]]:
    """Bucket -> version -> acceptance length by replay, as the job that made a version measured it and its parent."""
    out: dict[str, dict[str, float]] = {}
    for manifest in sorted(manifests, key=lambda m: (m.created, m.version)):
        if manifest.bucket is None:
            continue
        scores = out.setdefault(manifest.bucket, {})
        measured = (("incumbent_acceptance_length", manifest.parent), ("acceptance_length", manifest.version))
        for name, version in measured:
            length = manifest.metrics.get(name)
            if version and isinstance(length, int | float) and length > 0:
                scores[version] = float(length)
    return {bucket: scores for bucket, scores in out.items() if scores}
