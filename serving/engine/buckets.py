"""Bucket names: the traffic classes that a replica tells apart, when clients may name them as they like.

A bucket is the unit of statistics, calibration, traces and decisions, so every new name costs memory for good. The first
names to come are kept; from the limit on every new one is served alike and counted under `other`.
"""

from __future__ import annotations

DEFAULT_BUCKET = "default"
"""Requests without a name; always known."""
OTHER_BUCKET = "other"
"""Requests whose name came too late."""


class BucketNames:
    """A bounded set of names; one thread."""

    def __init__(self, max_buckets: int) -> None:
        """max_buckets: names told apart, DEFAULT_BUCKET included, OTHER_BUCKET not."""
        self._max_buckets = max_buckets
        self._known = {DEFAULT_BUCKET}
        self.num_capped = 0
        """Requests that were counted under OTHER_BUCKET because the limit was reached."""

    def __len__(self) -> int:
        return len(self._known)

    def resolve(self, name: str) -> str:
        """The bucket that a request with this name belongs to."""
        if name in self._known or name == OTHER_BUCKET:
            return name
        if len(self._known) < self._max_buckets:
            self._known.add(name)
            return name
        self.num_capped += 1
        return OTHER_BUCKET
