"""Classes: what kinds of traffic there are among requests that name no bucket, told from vectors of their prompts.

The vectors are kept as clumps: sums of like ones, at most MAX_CLUMPS of them, so what is stored does not grow and holds no
prompt. A new vector joins the clump that it is nearest to in Ward's sense, or those two clumps join whose union loses least.
Now and then the clumps are sorted into classes, which have numbers that stay: a class whose clumps fall into two groups is
split, two that lie in one another are joined, and the bounds of both differ, so that classes do not come and go.
A class counts for the tenants whose prompts it holds, by their shares. Free places are anybody's; where all are taken, a tenant
gets one from whoever has at least two more: the class that was seen least recently. A class that is kept (it has a drafter
version of its own, or a job or a trial) gives way to no other tenant.
Nothing but order and values of the vectors counts: no randomness, and time only for what is idle.

Shape legend: M clumps, K classes, d numbers of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from paceline.contracts import TrafficClasses, class_name
from paceline.names import donors

MAX_CLUMPS = 96
"""Six a class at the default limit: enough to see that a class has two parts."""
CLUMP_WEIGHT = 64.0
"""Vectors that a clump remembers: beyond it the old ones fade, so classes follow their text."""
MIN_WEIGHT = 8.0
"""Vectors behind a class, at least: a few odd prompts make none."""
SPLIT = 0.24
"""Share of the variance of two groups, counted as equally large, that lies between them, from which on they may be two classes.
Halves of a round cloud of vectors in the 5 to 8 directions that prompts of one kind vary in have about 0.2."""
GAIN = 0.12
"""What a split takes off the variance of all traffic, in variances of a usual class, that makes it worth a class: what is
rare or differs little stays together."""
SURE = 2.0
"""A split that takes as much off the variance of its two groups, in their own variances and times their part of the traffic, is worth
one, too, if they lie apart by SURE / n more than SPLIT, with n vectors in the smaller one: so narrow kinds, and some of many, become
classes. Variances of a real model's kinds differ 16-fold."""
PLENTY = 0.5
"""That much less must be taken off while no larger part of the classes there may be is in use; beyond it the more, the scarcer they are."""
RARE = 0.06
"""Part of the traffic below which that is not enough: a kind that falls into forms keeps most of them."""
KEEP = 0.5
"""Part of what splits a class below which two are joined, so that classes do not come and go."""
REACH = 2.0
"""A vector farther from a class than this many times its root-mean-square distance belongs to none; of the prompts of one
kind 99% lie within 1.7."""
WIDE, USUAL_SPREAD = 2.0, 0.14
"""Spread of a class over that of a usual one, at most: what is wider is no kind of prompts but a cloud of odd ones. A usual one's is
at least USUAL_SPREAD here, the median of 21 kinds of two models, of which the widest has 0.22: others may be narrow."""
MIN_SPREAD = 0.05
"""Least root-mean-square distance that counts: that of prompts which differ in a name or a number only."""
IDLE_S = 3600.0
"""A class that was not seen for so long gives its number to a new one, if there is no other."""
SHARE_S = 600.0
"""Time over which shares of the traffic fade to 1/e."""
PAUSE_S = 60.0
"""What a pause of all traffic counts of it, at most: what comes first behind a night is not the whole of it."""
MOVED = 0.1
"""Distance, in spreads of the class, by which a published centre may be off."""
MAX_RATE = 100
"""Vectors that are taken in a second, at most; a fleet's others are like them, and cost the controller 0.25 ms each."""
MAX_TENANTS = 8
"""Tenants that a clump tells apart, those with most vectors; the others count as nobody."""
SPACE_IDLE_S = 60.0
"""Vectors of another target or layers replace what is known once none of the old kind came for so long."""


class ClassBook(msgspec.Struct, kw_only=True):
    """Clumps and the classes that they are sorted into; encodable, so that they survive a restart of the controller."""

    space: str = ""
    """What the vectors are of; those of another target cannot be compared with them."""
    means: bytes = b""
    """(M, d) float32."""
    weights: list[float] = []
    spreads: list[float] = []
    """Sum of the squared distances of a clump's vectors from its mean."""
    counts: list[tuple[float, float]] = []
    """Vectors of each clump, fading over SHARE_S and over IDLE_S of traffic."""
    labels: list[int] = []
    """Class of each clump; 0 = none."""
    tenants: list[dict[str, float]] = []
    """Of each clump: tenant -> its part of the clump's weight; the rest is nobody's."""
    seen: dict[int, float] = {}
    """Class -> time of its latest vector."""
    shares: dict[int, float] = {}
    """Class -> its vectors, fading over SHARE_S; 0 counts those of none."""
    faded: float = 0.0
    """Time to which `shares` and `counts` have faded."""
    freed: list[int] = []
    """Numbers of former classes, the longest free first."""
    ended: list[int] = []
    """Numbers whose class has ended, also those that another kind has by now, until `take_ended`."""
    parted: list[tuple[int, int]] = []
    """New classes, each with the one that it was a part of, until `take_parted`."""
    pool_of: dict[int, int] = {}
    """Class -> the lowest number of those that were one class once; a class that never fell into parts is left out."""
    num_vectors: int = 0
    second: tuple[int, int] = (0, 0)
    """The latest second in which vectors came, and how many were taken in it."""
    is_untidy: bool = False
    """Vectors came since the clumps were sorted."""
    published: TrafficClasses = TrafficClasses()
    """What replicas are told."""

    def observe(self, space: str, vectors: bytes, num_dims: int, now: float, tenants: Sequence[str] = ()) -> None:
        """Take the vectors of some prompts; those of a space that replaces no old one yet, or broken ones, are left out.

        Args:
            vectors: (n, num_dims) float32, little-endian.
            tenants: who sent each of them, '' = nobody; any other number of them = nobody sent any.
        """
        if num_dims < 1 or len(vectors) % (4 * num_dims):
            return
        new = np.frombuffer(vectors, dtype="<f4").reshape(-1, num_dims).astype(np.float64)
        whose = list(tenants) if len(tenants) == len(new) else [""] * len(new)
        second, count = self.second if self.second[0] == int(now) else (int(now), 0)
        new = new[: MAX_RATE - count]
        is_whole = np.isfinite(new).all(1) & (np.abs(new).max(1, initial=0) < 1e3)
        new, whose = new[is_whole], [whose[i] for i in np.flatnonzero(is_whole)]
        if not len(new):
            return
        if space != self.space:
            latest = max(self.seen.values(), default=float("-inf"))
            if self.labels and now - latest < SPACE_IDLE_S:
                return
            self._begin(space)
        clumps = _Clumps.of(self, num_dims)
        if clumps is None:
            return
        self.second = (second, count + len(new))
        idle_s = max(now - self.faded, 0.0) if self.num_vectors else 0.0
        self.faded, fade = max(self.faded, now), math.exp(-idle_s / SHARE_S)
        self.shares = {k: v * fade for k, v in self.shares.items()}
        served_s = min(idle_s, PAUSE_S)
        faded = clumps.counts * (math.exp(-served_s / SHARE_S), math.exp(-served_s / IDLE_S))
        clumps.counts = np.maximum(faded, 1e-9)  # a share of nothing has no value
        reach = {_number(name): r for name, r in zip(self.published.names, self.published.radii, strict=True)}
        for vector, tenant in zip(new, whose, strict=True):
            label = clumps.add(vector, reach, tenant)
            self.seen[label] = now
            self.shares[label] = self.shares.get(label, 0.0) + 1.0
        self.num_vectors += len(new)
        self.is_untidy = True
        clumps.store(self)

    def tidy(self, max_classes: int, now: float, kept: Collection[str] = ()) -> bool:
        """Sort the clumps into at most so many classes; whether what replicas are told has changed.

        kept: buckets of classes that give way to no other tenant.
        """
        if not self.is_untidy and len(self.published.names) <= max_classes:
            return False
        self.is_untidy = False
        clumps = _Clumps.of(self, None)
        if clumps is None:
            return False
        labels = clumps.labels
        for label in sorted(set(labels.tolist()) - {0}, key=lambda k: -self.shares.get(k, 0.0))[max_classes:]:
            self._free(clumps, label)
        clumps.adopt()
        is_kept = {k for k in set(labels.tolist()) if k and class_name(k) in kept}
        self._join(clumps, max_classes, is_kept)
        self._split(clumps, max_classes, now, is_kept)
        clumps.store(self)
        return self._publish(clumps)

    def take_ended(self) -> list[str]:
        """Buckets whose class has ended since the last time: what was ordered for them is for no class now."""
        ended, self.ended = self.ended, []
        return [class_name(k) for k in ended]

    def take_parted(self) -> list[tuple[str, str]]:
        """Buckets of classes that were split off since the last time, each with that of the class it was a part of."""
        parted, self.parted = self.parted, []
        return [(class_name(new), class_name(whole)) for new, whole in parted]

    def pools(self) -> dict[str, str]:
        """Bucket of a class that others were one with once -> a name that they share."""
        return {class_name(k): class_name(first) for k, first in self.pool_of.items()}

    def shares_of_classes(self) -> dict[str, float]:
        """Bucket of a class -> its share of the latest vectors; '' = of no class. Empty before the first."""
        total = sum(self.shares.values())
        if total <= 0:
            return {}
        named = {class_name(k): v / total for k, v in self.shares.items() if k and k in set(self.labels)}
        return {**named, "": max(1.0 - sum(named.values()), 0.0)}

    def _begin(self, space: str) -> None:
        self.space, self.means = space, b""
        self.weights, self.spreads, self.counts, self.labels, self.tenants = [], [], [], [], []
        gone = sorted(_number(n) for n in self.published.names)
        self.freed, self.ended = [*self.freed, *gone], [*self.ended, *gone]
        self.seen, self.shares, self.pool_of = {}, {}, {}

    def _pool(self, members: Collection[int]) -> None:
        """Let these be what was one class once; one alone is no pool."""
        self.pool_of |= {k: min(members) for k in members} if len(members) > 1 else {}

    def _leave_pool(self, label: int) -> None:
        first = self.pool_of.pop(label, None)
        left = [k for k, pool in self.pool_of.items() if pool == first]
        for k in left:
            del self.pool_of[k]
        self._pool(left)

    def _end(self, label: int) -> None:
        """A class is none any more."""
        self._leave_pool(label)
        self.freed.append(label)
        self.ended.append(label)
        self.parted = [pair for pair in self.parted if pair[0] != label]

    def _free(self, clumps: _Clumps, label: int) -> None:
        clumps.labels[clumps.labels == label] = 0
        self._end(label)
        self.shares[0] = self.shares.get(0, 0.0) + self.shares.pop(label, 0.0)
        self.seen.pop(label, None)

    def _join(self, clumps: _Clumps, max_classes: int, is_kept: Collection[int]) -> None:
        """Join classes that lie in one another, the nearest first, and what is too rare with what it lies within the reach of."""
        while (pair := self._nearest(clumps, max_classes, is_kept)) is not None:
            self._merge(clumps, *pair)

    def _nearest(
        self, clumps: _Clumps, max_classes: int, is_kept: Collection[int], *, is_far: bool = False
    ) -> tuple[int, int] | None:
        """The two classes that are least worth being two, if they are not: (whose number stays, the other).

        Two kept ones of different tenants are never joined, and a kept one is too rare only beside a kept one of its pool. is_far:
        one that is too rare need not lie within the other's reach.
        """
        groups, usual, scarcity = clumps.groups(), clumps.usual(), clumps.scarcity(max_classes)
        reach = {k: clumps.reach(group) for k, group in groups.items()}
        mains = {k: clumps.main_tenant(k) for k in groups}
        traffic = {name: clumps.traffic(name) for name in set(mains.values())}
        found = []
        for a in groups:
            for b in groups:
                if a >= b or (a in is_kept and b in is_kept and mains[a] != mains[b]):
                    continue
                rarer, more = sorted((a, b), key=lambda k: groups[k].count)
                own, other = groups[rarer], groups[more]
                worth = _apart(own, other) / SPLIT
                is_pooled = a in self.pool_of and self.pool_of[a] == self.pool_of.get(b)
                may_be_rare = rarer not in is_kept or (more in is_kept and is_pooled)
                away = float(np.linalg.norm(own.mean - other.mean))
                if may_be_rare and (is_far or away <= max(reach[a], reach[b])):
                    both = np.minimum(traffic[mains[a]], traffic[mains[b]])
                    worth = min(worth, _worth(own, other, both, usual, scarcity))
                stays, gone = sorted((a, b), key=lambda k: (k not in is_kept, -groups[k].count, k))
                found.append((worth, stays, gone))
        worth, stays, gone = min(found, default=(math.inf, 0, 0))
        return (stays, gone) if worth < KEEP else None

    def _merge(self, clumps: _Clumps, stays: int, gone: int) -> None:
        clumps.labels[clumps.labels == gone] = stays
        self._end(gone)
        self.shares[stays] = self.shares.get(stays, 0.0) + self.shares.pop(gone, 0.0)
        self.seen[stays] = max(self.seen.get(stays, 0.0), self.seen.pop(gone, 0.0))

    def _split(self, clumps: _Clumps, max_classes: int, now: float, is_kept: Collection[int]) -> None:
        """Make classes of clumps without one, and of the smaller part of classes that fall into two."""
        todo = [0, *clumps.groups()]
        while todo:
            label = todo.pop(0)
            rows = np.flatnonzero(clumps.labels == label)
            if not len(rows):  # an idle class whose number went to another meanwhile
                continue
            scarcity = clumps.scarcity(max_classes)
            if label == 0:
                parts = [p for p in clumps.parts(rows, scarcity) if clumps.is_kind(p)]
            else:
                parts = clumps.halves(rows, scarcity)[1:]
            for part in sorted(parts, key=lambda p: -clumps.weights[p].sum()):
                new = self._new_number(clumps, max_classes, now, _most_of(clumps.shares(part)), is_kept, label)
                if new is None:  # those of another tenant may get one yet
                    continue
                clumps.labels[part] = new
                self.seen[new], self.shares[new] = now, float(clumps.counts[part, 0].sum())
                if label:  # both may fall into two again
                    self.parted.append((new, label))
                    whole = self.pool_of.get(label, label)
                    self._pool({new, label, *(k for k, pool in self.pool_of.items() if pool == whole)})
                    todo += [label, new]
                self.shares[label] = max(self.shares.get(label, 0.0) - self.shares[new], 0.0)

    def _new_number(
        self, clumps: _Clumps, max_classes: int, now: float, tenant: str, is_kept: Collection[int], whole: int
    ) -> int | None:
        """A number for a tenant's new class: an unused one, else that of a class that gives way or is too rare; None where none does.

        whole: the class that it is a part of, which does not give way to it; 0 = none.
        """
        used = set(clumps.labels.tolist()) - {0}
        if len(used) >= max_classes:
            old = self._giving_way(clumps, used, now, tenant, is_kept, whole)
            rare = self._nearest(clumps, max_classes, is_kept, is_far=True) if old is None and not whole else None
            if old is not None:
                clumps.forget(clumps.labels == old)
                self._free(clumps, old)
            elif rare is not None:
                self._merge(clumps, *rare)
            else:
                return None
            used = set(clumps.labels.tolist()) - {0}
        fresh = next((k for k in range(1, max_classes + 1) if k not in used and k not in self.freed), None)
        if fresh is not None:
            return fresh
        fresh = next(k for k in self.freed if k not in used and k <= max_classes)
        self.freed = [k for k in self.freed if k != fresh]
        return fresh

    def _giving_way(
        self, clumps: _Clumps, used: set[int], now: float, tenant: str, is_kept: Collection[int], whole: int
    ) -> int | None:
        """The class that was idle longest, if that is long, else the least recent one of a tenant with two more."""
        mains = {k: clumps.main_tenant(k) for k in used}
        free = sorted((self.seen.get(k, 0.0), k) for k in used - {whole} if k not in is_kept or mains[k] == tenant)
        if free and now - free[0][0] >= IDLE_S:
            return free[0][1]
        held: dict[str, float] = {}
        for k in used:
            for name, share in clumps.shares(np.flatnonzero(clumps.labels == k)).items():
                held[name] = held.get(name, 0.0) + share
        for donor in donors(held, tenant):
            own = [k for _, k in free if mains[k] == donor]
            if own:
                return own[0]
        return None

    def _publish(self, clumps: _Clumps) -> bool:
        groups = clumps.groups()
        names = [class_name(k) for k in sorted(groups)]
        radii = [clumps.reach(groups[k]) for k in sorted(groups)]
        centroids = [groups[k].mean.tolist() for k in sorted(groups)]
        old = self.published
        if (old.space, old.names) == (self.space, names) and all(
            np.linalg.norm(np.subtract(a, b)) <= MOVED * r / REACH and abs(r - q) <= MOVED * r
            for a, b, r, q in zip(centroids, old.centroids, radii, old.radii, strict=True)
        ):
            return False
        centroids = [[round(x, 5) for x in c] for c in centroids]
        self.published = TrafficClasses(
            rev=old.rev + 1, space=self.space, names=names, centroids=centroids, radii=[round(r, 5) for r in radii]
        )
        return True


class _Group(msgspec.Struct, frozen=True):
    """Clumps taken together."""

    weight: float
    mean: np.ndarray  # (d,) float64
    spread: float
    """Root-mean-square distance of the vectors from the mean, at least MIN_SPREAD."""
    counts: np.ndarray
    """(2,) vectors, fading over SHARE_S and over IDLE_S."""

    @property
    def count(self) -> float:
        return float(self.counts[1])


class _Clumps:
    """The clumps of a book as arrays, for a while."""

    def __init__(
        self, means: np.ndarray, weights: np.ndarray, spreads: np.ndarray, counts: np.ndarray, labels: np.ndarray,
        tenants: list[dict[str, float]],
    ) -> None:  # fmt: skip
        """means (M, d), weights, spreads (M,), counts (M, 2) float64; labels (M,) int64; tenants: M of tenant -> its weight."""
        self.means, self.weights, self.spreads, self.labels = means, weights, spreads, labels
        self.counts, self.tenants = counts, tenants
        self._bound: float | None = None  # least cost of joining two clumps, while the clumps are the same
        self._variances: dict[int, float] | None = None

    @staticmethod
    def of(book: ClassBook, num_dims: int | None) -> _Clumps | None:
        """num_dims: of the vectors to come; None: as stored. None where that does not fit, or nothing is there."""
        count = len(book.labels)
        if num_dims is None:
            num_dims = len(book.means) // (4 * count) if count else 0
        if not num_dims or len(book.means) != 4 * count * num_dims:
            return None
        means = np.frombuffer(book.means, dtype="<f4").reshape(count, num_dims).astype(np.float64)
        tenants = [dict(t) for t in book.tenants] if len(book.tenants) == count else [{} for _ in range(count)]
        weights = np.array(book.weights, float)
        counts = np.array(book.counts, float) if len(book.counts) == count else np.repeat(weights[:, None], 2, 1)
        return _Clumps(
            means, weights, np.array(book.spreads, float), counts.reshape(-1, 2), np.array(book.labels, int), tenants
        )

    def store(self, book: ClassBook) -> None:
        book.means = self.means.astype("<f4").tobytes()
        book.weights, book.spreads = self.weights.tolist(), self.spreads.tolist()
        book.counts = [(a, b) for a, b in self.counts.tolist()]
        book.labels = self.labels.tolist()
        book.tenants = [{name: round(float(w), 3) for name, w in t.items()} for t in self.tenants]

    def add(self, vector: np.ndarray, reach: dict[int, float], tenant: str) -> int:
        """Take one vector; returns the class of the clump that it joined.

        reach: class -> how far from a clump of it a vector may lie that joins it.
        """
        own = {tenant: 1.0} if tenant else {}
        if len(self.labels):
            squares = ((self.means - vector) ** 2).sum(1)
            limits = np.array([reach.get(k, np.inf) ** 2 for k in self.labels.tolist()])
            costs = np.where(squares <= limits, squares * self.weights / (self.weights + 1), np.inf)
            best = int(costs.argmin())
            if costs[best] < np.inf and (
                costs[best] <= 1e-12 or (self.is_full and costs[best] <= self._least() * self._units()[best])
            ):
                self._merge_into(best, vector, 1.0, 0.0, np.ones(2), own)
                return int(self.labels[best])
        if self.is_full and not self._make_room():
            return 0
        label = self._label_near(vector, reach)
        self.means = np.concatenate([self.means, vector[None]])
        self.weights, self.spreads = np.append(self.weights, 1.0), np.append(self.spreads, 0.0)
        self.counts, self.tenants = np.concatenate([self.counts, np.ones((1, 2))]), [*self.tenants, own]
        self.labels, self._bound = np.append(self.labels, label), None
        return label

    @property
    def is_full(self) -> bool:
        return len(self.labels) >= MAX_CLUMPS

    def _label_near(self, vector: np.ndarray, reach: dict[int, float]) -> int:
        """The class whose middle is nearest, if the vector is within its reach; 0 = none."""
        groups = self.groups()
        best = min(groups, key=lambda k: float(((groups[k].mean - vector) ** 2).sum()), default=0)
        if not best or np.linalg.norm(groups[best].mean - vector) > reach.get(best, 0.0):
            return 0
        return best

    def _pair_costs(self) -> np.ndarray:
        """(M, M) what joining two clumps loses, in variances of their class, so that a narrow one has as many as a wide one; inf
        for those of two classes and for a clump with itself."""
        costs = np.where(self.labels[:, None] != self.labels, np.inf, _ward(self.means, self.weights))
        return costs / self._units()[:, None]

    def _units(self) -> np.ndarray:
        """(M,) variance of each clump's class, of a usual one for those without; of the time when it was asked for first."""
        if self._variances is None:
            self._variances = {k: group.spread**2 for k, group in self.groups().items()} | {0: self.usual() ** 2}
        return np.array([self._variances.get(k, self._variances[0]) for k in self.labels.tolist()])

    def _least(self) -> float:
        if self._bound is None:
            self._bound = float(self._pair_costs().min(initial=np.inf))
        return self._bound

    def _make_room(self) -> bool:
        """Join the two clumps that lose least by it; where all are classes by themselves, there is no room."""
        costs = self._pair_costs()
        at = int(costs.argmin())
        a, b = divmod(at, len(self.labels))
        if not np.isfinite(costs[a, b]):
            lone = np.flatnonzero(self.labels == 0)
            if not len(lone):
                return False
            self.drop(np.arange(len(self.labels)) == lone[self.weights[lone].argmin()])
            return True
        self._merge_into(a, self.means[b], self.weights[b], self.spreads[b], self.counts[b], self.tenants[b])
        self.drop(np.arange(len(self.labels)) == b)
        return True

    def _merge_into(
        self, at: int, mean: np.ndarray, weight: float, spread: float, counts: np.ndarray, tenants: dict[str, float]
    ) -> None:
        total = self.weights[at] + weight
        apart = float(((self.means[at] - mean) ** 2).sum())
        self.spreads[at] += spread + self.weights[at] * weight / total * apart
        self.means[at] += (mean - self.means[at]) * (weight / total)
        kept = min(total, CLUMP_WEIGHT)
        self.spreads[at] *= kept / total
        self.weights[at] = kept
        self.counts[at] += counts
        mine = self.tenants[at]
        sums = {name: (mine.get(name, 0.0) + tenants.get(name, 0.0)) * kept / total for name in {**mine, **tenants}}
        self.tenants[at] = {name: sums[name] for name in sorted(sums, key=lambda n: -sums[n])[:MAX_TENANTS]}

    def shares(self, rows: np.ndarray) -> dict[str, float]:
        """Tenant -> its share of some clumps' weight; '' = nobody. rows: (n,) of their places."""
        total = float(self.weights[rows].sum())
        found: dict[str, float] = {}
        for row in rows:
            for name, weight in self.tenants[row].items():
                found[name] = found.get(name, 0.0) + weight / total
        return {**found, "": max(1.0 - sum(found.values()), 0.0)}

    def main_tenant(self, label: int) -> str:
        """Who has most of a class."""
        return _most_of(self.shares(np.flatnonzero(self.labels == label)))

    def forget(self, is_old: np.ndarray) -> None:
        """Let clumps weigh as much as one vector together; is_old: (M,) bool."""
        share = 1.0 / max(float(self.weights[is_old].sum()), 1.0)
        self.weights[is_old] *= share
        self.spreads[is_old] *= share
        self.counts[is_old] /= np.maximum(self.counts[is_old].sum(0), 1.0)
        for row in np.flatnonzero(is_old):
            self.tenants[row] = {name: weight * share for name, weight in self.tenants[row].items()}
        self._bound = None

    def drop(self, is_gone: np.ndarray) -> None:
        """is_gone: (M,) bool."""
        kept = ~is_gone
        self.means, self.weights = self.means[kept], self.weights[kept]
        self.spreads, self.counts = self.spreads[kept], self.counts[kept]
        self.labels, self._bound = self.labels[kept], None
        self.tenants = [self.tenants[row] for row in np.flatnonzero(kept)]

    def group(self, rows: np.ndarray) -> _Group:
        """Clumps taken together; rows: (n,) of their places."""
        weights = self.weights[rows]
        total = float(weights.sum())
        mean = weights @ self.means[rows] / total
        apart = ((self.means[rows] - mean) ** 2).sum(1)
        variance = float(self.spreads[rows].sum() + weights @ apart) / total
        return _Group(total, mean, max(variance**0.5, MIN_SPREAD), self.counts[rows].sum(0))

    def is_kind(self, rows: np.ndarray) -> bool:
        """Whether some clumps may be a class."""
        group = self.group(rows)
        return group.weight >= MIN_WEIGHT and group.spread <= self.widest()

    def groups(self) -> dict[int, _Group]:
        """Class -> its clumps taken together."""
        names, own = np.unique(self.labels, return_inverse=True)
        member = own == np.arange(len(names))[:, None]  # (K, M)
        weights = member @ self.weights
        means = (member * self.weights) @ self.means / weights[:, None]
        apart = self.weights * ((self.means - means[own]) ** 2).sum(1)
        spreads = np.maximum(np.sqrt(member @ (self.spreads + apart) / weights), MIN_SPREAD)
        counts = member @ self.counts
        return {
            k: _Group(float(weights[i]), means[i], float(spreads[i]), counts[i])
            for i, k in enumerate(names.tolist())
            if k
        }

    def usual(self) -> float:
        """Spread of a usual class: the median one, so that odd vectors do not count; without classes that of everything."""
        groups = list(self.groups().values()) or [self.group(np.arange(len(self.labels)))]
        groups.sort(key=lambda g: g.spread)
        weights = np.cumsum([g.weight for g in groups])
        return groups[int(np.searchsorted(weights, weights[-1] / 2))].spread

    def scarcity(self, max_classes: int) -> float:
        """What a class must be worth beside one where hardly a number is free."""
        return max(PLENTY, len(set(self.labels.tolist()) - {0}) / max(max_classes, 1))

    def widest(self) -> float:
        """Spread that a class may have."""
        return WIDE * max(self.usual(), USUAL_SPREAD)

    def traffic(self, tenant: str) -> np.ndarray:
        """(2,) vectors of a tenant, fading over SHARE_S and over IDLE_S: what others send makes its kinds no rarer."""
        parts = np.array([t.get(tenant, 0.0) if tenant else 0.0 for t in self.tenants])
        if not tenant:
            parts = self.weights - np.array([sum(t.values()) for t in self.tenants])
        return np.maximum((parts / self.weights) @ self.counts, 1e-9)

    def reach(self, group: _Group) -> float:
        """How far from the middle of a class a vector of it may lie."""
        return REACH * min(group.spread, self.widest())

    def adopt(self) -> None:
        """Give the clumps without a class to the nearest class within whose reach they lie."""
        groups = self.groups()
        if not groups:
            return
        keys = sorted(groups)
        centres = np.array([groups[k].mean for k in keys])
        reach = np.array([self.reach(groups[k]) for k in keys])
        lone = np.flatnonzero(self.labels == 0)
        away = np.sqrt(((self.means[lone, None] - centres) ** 2).sum(-1))
        best = away.argmin(1) if len(lone) else np.zeros(0, int)
        for row, i, distance in zip(lone, best, away[np.arange(len(lone)), best], strict=True):
            if distance <= reach[i]:
                self.labels[row] = keys[i]
        self._bound = None

    def halves(self, rows: np.ndarray, scarcity: float) -> list[np.ndarray]:
        """The parts that some clumps fall into, that of more vectors first: two, or one where they belong together.

        Of the groups that Ward's method joins on its way from the clumps to the whole, the last one that is a class of its
        own beside the rest.
        """
        weight, usual = float(self.weights[rows].sum()), self.usual()
        traffic = self.traffic(_most_of(self.shares(rows)))
        for part in reversed(self._joined(rows)):
            if not MIN_WEIGHT <= self.weights[part].sum() <= weight - MIN_WEIGHT:
                continue
            is_own = np.zeros(len(self.labels), dtype=bool)
            is_own[part] = True
            own, other = self.group(part), self.group(rest := rows[~is_own[rows]])
            if _between(own, other) < SPLIT or _worth(own, other, traffic, usual, scarcity) < 1:
                continue
            return [part, rest] if own.count > other.count else [rest, part]
        return [rows]

    def _joined(self, rows: np.ndarray) -> list[np.ndarray]:
        """The pairs of groups that Ward's method joins, one group after the other, in the order of the joins."""
        found: list[np.ndarray] = []
        parts = [np.array([r]) for r in rows]
        means, weights = self.means[rows].copy(), self.weights[rows].copy()
        costs = _ward(means, weights)
        for _ in range(len(rows) - 1):
            a, b = sorted(divmod(int(costs.argmin()), len(rows)))
            found += [parts[a], parts[b]]
            parts[a] = np.concatenate([parts[a], parts[b]])
            total = weights[a] + weights[b]
            means[a] += (means[b] - means[a]) * (weights[b] / total)
            weights[a], weights[b] = total, 0.0
            row = ((means - means[a]) ** 2).sum(1) * (weights * total / (weights + total))
            row[(weights == 0) | (np.arange(len(rows)) == a)] = np.inf
            costs[a] = costs[:, a] = row
            costs[b] = costs[:, b] = np.inf
        return found

    def parts(self, rows: np.ndarray, scarcity: float) -> list[np.ndarray]:
        """Some clumps in parts that fall into no more."""
        if not len(rows):
            return []
        halves = self.halves(rows, scarcity)
        return halves if len(halves) == 1 else [part for half in halves for part in self.parts(half, scarcity)]


def _most_of(shares: dict[str, float]) -> str:
    """The tenant with the largest share."""
    return max(sorted(shares), key=shares.__getitem__)


def _between(a: _Group, b: _Group) -> float:
    """Share of the variance of two groups that lies between them, as if both were equally large."""
    apart = float(((a.mean - b.mean) ** 2).sum()) / 4
    return apart / (apart + (a.spread**2 + b.spread**2) / 2)


def _apart(a: _Group, b: _Group) -> float:
    """The same as if both were like the narrower one: a kind within a cloud of odd prompts stays a kind."""
    apart = float(((a.mean - b.mean) ** 2).sum()) / 4
    return apart / (apart + min(a.spread, b.spread) ** 2)


def _worth(a: _Group, b: _Group, traffic: np.ndarray, usual: float, scarcity: float) -> float:
    """What two groups as two classes are worth: from 1 on a split.

    traffic: `_Clumps.traffic` of their tenant; of its two times the one counts in which a group has more, which is the short one of
    what has just begun, and the long one of what pauses. usual: spread of a usual class. scarcity: `_Clumps.scarcity`.
    """
    apart = float(((a.mean - b.mean) ** 2).sum())
    one, other = (float(np.minimum(g.counts / traffic, 1.0).max()) for g in (a, b))
    within = (one * a.spread**2 + other * b.spread**2) / (one + other)
    narrow = apart / within * one * other / (one + other) / (GAIN * scarcity)
    sure = _between(a, b) / (SPLIT + SURE / min(a.weight, b.weight))
    in_all = apart / usual**2 * a.count * b.count / (a.count + b.count) / float(traffic[1]) / GAIN
    return max(in_all, min(narrow, sure, min(one, other) / RARE))


def _ward(means: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(M, M) what joining two of M groups adds to the sum of squares; inf for a group with itself."""
    norms = (means**2).sum(1)
    squares = np.maximum(norms[:, None] + norms - 2 * means @ means.T, 0.0)
    costs = squares * (weights[:, None] * weights / (weights[:, None] + weights))
    np.fill_diagonal(costs, np.inf)
    return costs


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
