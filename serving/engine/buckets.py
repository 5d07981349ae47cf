"""Bucket names: the traffic classes that a replica tells apart, when clients may name them as they like.

A bucket is the unit of statistics, calibration, traces and decisions, so every new name costs memory for good. The first
names to come are kept; from the limit on every new one is served alike and counted under `other`. A name belongs to the
tenant that brought it first. No tenant has more than a share of the places, and where they are all taken, a tenant gets
one from whoever has at least two more: its newest, so that names in use for long stay. Junk names of one tenant so take
no place from others, and places change hands at most `max_buckets` squared, halved, times (each time the sum of squares falls).
"""

from __future__ import annotations

DEFAULT_BUCKET = "default"
"""Requests without a name, as long as nothing is known of their class (classes.py); always known."""
OTHER_BUCKET = "other"
"""Requests whose name came too late."""
TENANT_SHARE = 0.25
"""Part of the places that one tenant may fill: four that name as many as they can leave each other alone."""


class BucketNames:
    """A bounded set of names; one thread."""

    def __init__(self, max_buckets: int) -> None:
        """max_buckets: names told apart, DEFAULT_BUCKET included, OTHER_BUCKET not."""
        self._max_buckets = max_buckets
        self._max_own = max(1, int(max_buckets * TENANT_SHARE))
        self._owners: dict[str, str] = {DEFAULT_BUCKET: ""}  # in the order in which they came
        self._counts: dict[str, int] = {}  # names of each owner
        self.num_capped = 0
        """Requests that were counted under OTHER_BUCKET because a limit was reached."""

    def __len__(self) -> int:
        return len(self._owners)

    def resolve(self, name: str | None, tenant: str = "") -> str:
        """The bucket that a tenant's request with this name belongs to; None: it has none.

        tenant: '' = nobody; what comes from nobody may fill every place, and gives way to tenants.
        """
        if name is None:
            return DEFAULT_BUCKET
        if name in self._owners or name == OTHER_BUCKET:
            return name
        num_own = self._counts.get(tenant, 0)
        is_within = not tenant or num_own < self._max_own
        if is_within and (len(self._owners) < self._max_buckets or self._take_from_richest(num_own)):
            self._owners[name] = tenant
            self._counts[tenant] = num_own + 1
            return name
        self.num_capped += 1
        return OTHER_BUCKET

    def _take_from_richest(self, num_own: int) -> bool:
        """Make a place for a tenant with so many names; False when nobody has two more."""
        richest = max(self._counts, key=self._counts.__getitem__, default="")
        if self._counts.get(richest, 0) < num_own + 2:
            return False
        newest = next(n for n in reversed(self._owners) if self._owners[n] == richest and n != DEFAULT_BUCKET)
        del self._owners[newest]
        self._counts[richest] -= 1
        return True
