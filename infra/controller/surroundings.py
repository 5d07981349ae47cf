"""Surroundings: what trace store, drafter registry and replicas say, looked at every few seconds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from paceline.contracts import CLASS_PREFIX, DrafterManifest, ReplicaReport
from paceline.errors import DrafterMismatchError, ManifestError, PacelineError, StorageHangsError
from paceline.infra.controller.store import Books
from paceline.infra.state.desired import read_reports
from paceline.infra.state.manifest_facts import learned_rows, shadow_lengths

if TYPE_CHECKING:  # both load torch
    from paceline.adapt.data.trace_store import ShardInfo, TraceStore
    from paceline.adapt.versions.registry import DrafterRegistry

logger = logging.getLogger(__name__)

_MAX_SWAPS = 500
_SWEEP_S = 30.0


class Surroundings:
    """The latest look at them; only shards and versions of this target count."""

    def __init__(self, books: Books, shards: TraceStore, registry: DrafterRegistry) -> None:
        self._books, self._state, self._shards, self.registry = books, books.state, shards, registry
        self._target, self._trace = books.config.target_version, books.config.trace
        self._sweep_due = 0.0
        self.reports: list[ReplicaReport] = []
        self.own: list[ReplicaReport] = []
        """Those of this target. Replicas of the target before it follow the same record while they drain: that they refuse a
        version says nothing of it."""
        self.latest: dict[str, ReplicaReport] = {}
        """Replica -> its report."""
        self.num_looks = 0
        self.versions: list[DrafterManifest] = []
        self.learned_rows: dict[str, dict[str, int]] = {}
        """Version -> bucket -> rows, by their manifests."""
        self.shadow: dict[str, dict[str, float]] = {}
        """Bucket -> version -> acceptance length by replay, by their manifests."""
        self.foreign: dict[str, DrafterManifest] = {}
        """Versions in the registry that were trained for another target, with their manifests."""
        self.rows: dict[str, int] = {}
        """Bucket -> rows in the trace store."""
        self.counters: dict[str, dict[str, int]] = {}
        """Replica -> feedback counters that it reported last, also of those gone since."""

    def refresh(self) -> None:
        """Look at everything again. Raises redis errors; what stores cannot tell is noted and stays as it was."""
        try:
            self._look_at_stores()
        except (OSError, PacelineError) as e:
            self._books.note_storage("trace store or registry cannot be read", e)
        self.reports = read_reports(self._books.store.client, self._books.store.keys)
        self.own = [report for report in self.reports if self.is_own(report.target_version)]
        self.latest = {report.replica_id: report for report in self.reports}
        self.num_looks += 1
        for report in self.reports:
            self._note_swap(report)
        if len(self._state.seen_swaps) > 2 * len(self.reports) + _MAX_SWAPS:  # replicas that are gone for good
            seen = self._state.seen_swaps
            self._state.seen_swaps = {i: seen[i] for i in self.latest if i in seen}
        now = self._books.clock.now()
        if self._trace is not None and now >= self._sweep_due:
            self._sweep_due = now + _SWEEP_S
            try:
                self._shards.enforce_limits(self._trace.max_bytes, self._trace.max_age_s, now)
            except (OSError, PacelineError) as e:
                self._books.note_storage("limits of the trace store could not be enforced", e)

    def own_shards(self) -> list[ShardInfo]:
        """Shards of this target, oldest first, as they are now. Raises OSError, PacelineError."""
        return [s for s in self._shards.list_shards() if self._target in ("", s.target_version)]

    def _look_at_stores(self) -> None:
        state, shards = self._state, self.own_shards()
        seen = set(state.seen_shards)
        rows: dict[str, int] = {}
        for s in shards:
            rows[s.bucket] = rows.get(s.bucket, 0) + s.num_rows
            if s.shard_id not in seen:
                state.rows_written[s.bucket] = state.rows_written.get(s.bucket, 0) + s.num_rows
        self.rows = rows
        if shards or not seen:  # a folder that is away for a moment lists nothing, too: what is in it then is not new
            state.seen_shards = [s.shard_id for s in shards]
            self._forget_names(rows)
        every = self.registry.list()
        self.versions = [m for m in every if self._target in ("", m.target_version)]
        self.learned_rows, self.shadow = learned_rows(self.versions), shadow_lengths(self.versions)
        self.foreign = {m.version: m for m in every if self._target not in ("", m.target_version)}
        state.history = [v for v in state.history if v not in self.foreign]

    def _forget_names(self, rows: dict[str, int]) -> None:
        """Replicas name buckets that have no place here; without a row there is nothing left to learn of them."""
        state = self._state
        for name in state.rows_written.keys() - rows.keys() - state.traffic.totals.keys() - self._books.kept_classes():
            if not name.startswith(CLASS_PREFIX):
                del state.rows_written[name]
                self._books.policy.forget_bucket(name)

    def _note_swap(self, report: ReplicaReport) -> None:
        state = self._state
        if report.counters:
            self.counters[report.replica_id] = dict(report.counters)
        swapped = report.gen if report.swap_gen is None else report.swap_gen
        if swapped > 1 and report.swap_pause_ms and state.seen_swaps.get(report.replica_id) != swapped:
            state.seen_swaps[report.replica_id] = swapped
            state.swap_times = [*state.swap_times, report.ts][-_MAX_SWAPS:]
            state.swap_pauses_ms = [*state.swap_pauses_ms, report.swap_pause_ms[-1]][-_MAX_SWAPS:]

    def is_own(self, target_version: str) -> bool:
        """Whether what a replica tells is of this target; "" = not told."""
        return "" in (self._target, target_version) or target_version == self._target

    def is_foreign(self, version: str) -> bool:
        """Whether a version is known to be for another target; what cannot be read is left to the replicas to refuse."""
        try:
            self.registry.get_manifest(version, target_version=self._target or None)
        except DrafterMismatchError as e:
            logger.warning("not used: %s", e)
            return True
        except (PacelineError, OSError) as e:
            logger.debug("manifest of %s cannot be read: %s", version, e)
        return False

    def servable_manifest(self, version: str) -> DrafterManifest:
        """The manifest of a version that may be served.

        Raises: ManifestError when it is not in the registry or its weights are gone, DrafterMismatchError when it is for
        another target.
        """
        try:
            manifest = self.registry.get_manifest(version, target_version=self._target or None)
            has_weights = self.registry.has_weights(version)
        except (StorageHangsError, OSError):  # replicas may have it loaded: a roll-back must not wait for the store
            known = next((m for m in self.versions if m.version == version), None)
            if known is None:
                raise
            manifest, has_weights = known, True
        if version in self._state.evicted or not has_weights:
            raise ManifestError(f"the weights of drafter {version} were deleted from the pool; publish it again")
        return manifest
