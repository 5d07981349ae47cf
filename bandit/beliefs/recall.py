"""Recall table: how well every existing version serves every bucket."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from paceline.bandit.beliefs.observation import BucketObservation
from paceline.bandit.beliefs.ratio import RatioSums, combined
from paceline.contracts import TrainResult

HALF_LIFE_S = 300.0
"""Of realised acceptance while a version serves; what is not served is not forgotten."""
MIN_ROUNDS = 12
SCORE_SD = 0.3
"""Relative spread of a request's replay score."""
MANIFEST_REQUESTS = 8
"""Weight, in requests, of a replay score of text that may have changed since: one that a manifest tells, or that others have
outdated."""


class Score(msgspec.Struct):
    """What is known of one version in one bucket, acceptance length in tokens a round."""

    realised: RatioSums = msgspec.field(default_factory=RatioSums)
    shadow: float | None = None
    shadow_requests: int = 0


class ScoreTable(msgspec.Struct):
    """bucket -> version -> Score: full information on existing versions, no exploration needed.

    Sources, best first: rounds really served, and replay on rows that were not learned (calibrated by versions that have
    both), which a job gives for its own bucket and for those that it rehearses. The first version is served to the
    hold-back group all the time, so that the floor is always measured.
    """

    scores: dict[str, dict[str, Score]] = {}

    def _score(self, bucket: str, version: str) -> Score:
        return self.scores.setdefault(bucket, {}).setdefault(version, Score())

    def observe(self, observation: BucketObservation) -> None:
        """Fold one epoch's realised acceptance, hold-back group included."""
        keep = 0.5 ** ((observation.end - observation.start) / HALF_LIFE_S)
        for version, pool in observation.lengths().items():
            realised = self._score(observation.bucket, version).realised
            realised.discount(keep)
            realised.merge(pool)

    def set_shadow(self, bucket: str, version: str, length: float, num_requests: int) -> None:
        """Store a replay score."""
        score = self._score(bucket, version)
        score.shadow, score.shadow_requests = length, num_requests

    def fill_shadow(self, bucket: str, version: str, length: float, num_requests: int = MANIFEST_REQUESTS) -> None:
        """Store a replay score unless the version already has one."""
        if self._score(bucket, version).shadow is None:
            self.set_shadow(bucket, version, length, num_requests)

    def add_job(self, bucket: str, result: TrainResult) -> None:
        """Store a job's replay scores, on its own bucket and on others; those of a snapshot that is no version are left out."""
        own = [s for s in (result.incumbent, result.first, result.candidate) if s is not None]
        refused = result.candidate.version if result.candidate is not None and result.status != "accepted" else None
        for where, shadows in [(bucket, own), *result.elsewhere.items()]:
            known = {s.version: s for s in shadows if s.acceptance_length > 0 and s.version != refused}
            self._carry_over(where, {v: s.acceptance_length for v, s in known.items()})
            for version, shadow in known.items():
                self.set_shadow(where, version, shadow.acceptance_length, shadow.num_requests)

    def _carry_over(self, bucket: str, replayed: dict[str, float]) -> None:
        """Put the replays of versions that are not replayed on a bucket's newest text on its scale, by those that are on both:
        8.5 of one version on text that was says nothing against 1.0 of another on the text that came."""
        scores = self.scores.get(bucket, {})
        known = {v: s.shadow for v, s in scores.items() if s.shadow}
        changes = [math.log(length / known[v]) for v, length in replayed.items() if v in known]
        if not changes:
            return
        change = math.exp(sum(changes) / len(changes))
        for version in known.keys() - replayed.keys():
            weight = min(scores[version].shadow_requests, MANIFEST_REQUESTS)
            self.set_shadow(bucket, version, max(known[version] * change, 1.0), weight)

    def _calibration(self, bucket: str) -> float | None:
        """Realised over replayed acceptance length in a bucket, pooled over the versions that have both.

        None where versions were served of which none was replayed: the rows may be of other text than what is served.
        """
        realised = replayed = 0.0
        is_served = False
        for score in self.scores.get(bucket, {}).values():
            length = score.realised.ratio()
            if length and score.realised.x >= MIN_ROUNDS:
                is_served = True
                if score.shadow:
                    realised += length * score.realised.x
                    replayed += score.shadow * score.realised.x
        if replayed > 0:
            return min(max(realised / replayed, 0.5), 2.0)
        return None if is_served else 1.0

    def estimate(self, bucket: str, version: str) -> tuple[float, float] | None:
        """(acceptance length, standard error), None when nothing is known."""
        score = self.scores.get(bucket, {}).get(version)
        if score is None:
            return None
        found: list[tuple[float, float]] = []
        length = score.realised.ratio()
        if length and score.realised.n >= 2 and score.realised.x >= MIN_ROUNDS:
            found.append((length, max(score.realised.standard_error(), 0.01 * length)))
        if score.shadow is not None and (calibration := self._calibration(bucket)) is not None:
            value = score.shadow * calibration
            found.append((value, value * max(SCORE_SD / math.sqrt(max(score.shadow_requests, 1)), 0.03)))
        return combined(found) if found else None

    def best_of(self, bucket: str, versions: Iterable[str]) -> float:
        """Highest acceptance length believed of any of `versions` on a bucket, 0 when none is known."""
        found = [known[0] for v in versions if (known := self.estimate(bucket, v)) is not None]
        return max(found, default=0.0)

    def best_length(self, first_version: str) -> float:
        """Highest acceptance length known of any trained version on any bucket, 0 without data.

        What the first drafter reaches on text that it was made for says nothing of what training reaches on other text.
        """
        best = 0.0
        for bucket, versions in self.scores.items():
            for version, score in versions.items():
                if score.realised.x >= MIN_ROUNDS and version != first_version:
                    found = self.estimate(bucket, version)
                    best = max(best, found[0] - found[1] if found else 0.0)
        return best

    def reset_bucket(self, bucket: str) -> None:
        """The bucket's text changed: what every version did on the old one says nothing of it."""
        self.scores.pop(bucket, None)
