"""Bucket names: the traffic classes that a replica or the controller tells apart, when clients may name them as they like.

A bucket is the unit of statistics, calibration, traces and decisions, so every new name costs memory. A name belongs to the
tenant that brought it first. Places that are free are anybody's; where all are taken, a tenant gets one from whoever has at
least two more (paceline/names.py): the name that was used least recently. What finds no place is served alike and counted
under `other`. Junk names of one tenant so take no place from others, and places change hands at most `max_buckets` squared,
halved, times (each time the sum of squares falls).

A tenant whose training is not shared has buckets of its own: `code@acme` for its `code`, `default@acme` for what it does
not name (its prompts are sorted into no class, which others' prompts could be in).
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from paceline.names import donors, own_bucket

DEFAULT_BUCKET = "default"
"""Requests without a name, as long as nothing is known of their class (classes.py); always known."""
OTHER_BUCKET = "other"
"""Requests whose name came too late."""


class BucketNames(msgspec.Struct):
    """A bounded set of names; one thread. Encodable, so that the controller's survive its restart."""

    max_buckets: int
    """Names told apart, DEFAULT_BUCKET included, OTHER_BUCKET and those with a version of their own not."""
    owners: dict[str, str] = {}
    """Name -> tenant that brought it, used least recently first; '' = nobody."""
    counts: dict[str, int] = {}
    """Tenant -> its names."""
    num_capped: int = 0
    """Requests that were counted under OTHER_BUCKET because no place was left for their name."""

    def __len__(self) -> int:
        return len(self.owners) + 1

    def resolve(self, name: str | None, tenant: str = "", kept: Collection[str] = (), *, is_own: bool = False) -> str:
        """The bucket that a tenant's request with this name belongs to; None: it has none.

        Args:
            tenant: '' = nobody, who counts as one tenant.
            kept: names with a drafter version of their own: they are always told apart, and give way to nobody.
            is_own: the bucket is the tenant's own; OTHER_BUCKET is everybody's all the same.
        """
        if is_own and name != OTHER_BUCKET:
            name = own_bucket(name or DEFAULT_BUCKET, tenant)
        if name is None or name == DEFAULT_BUCKET:
            return DEFAULT_BUCKET
        if (owner := self.owners.get(name)) is not None:
            if next(reversed(self.owners)) != name:  # used last; in one step, since other threads read
                self.owners = {**{k: v for k, v in self.owners.items() if k != name}, name: owner}
            return name
        if name == OTHER_BUCKET or name in kept:
            return name
        if len(self) < self.max_buckets or self._take_from_others(tenant, kept):
            self.owners[name] = tenant
            self.counts[tenant] = self.counts.get(tenant, 0) + 1
            return name
        self.num_capped += 1
        return OTHER_BUCKET

    def owner(self, name: str) -> str:
        """The tenant that a name counts for; '' = nobody. Any thread."""
        return self.owners.get(name, "")

    def _take_from_others(self, tenant: str, kept: Collection[str]) -> bool:
        """Make a place for a tenant; False when nobody has one to give."""
        for donor in donors(self.counts, tenant):
            oldest = next((n for n, owner in self.owners.items() if owner == donor and n not in kept), None)
            if oldest is not None:
                del self.owners[oldest]
                self.counts[donor] -= 1
                return True
        return False
