"""Drafter slots: the version that a request uses, and new weights without a pause.

Adaptive slots A, B, C, ... and the fixed slot `first` of the hold-back group. A request is pinned to one slot before its
first draft and keeps it for life, so it never reads drafter KV that another version wrote. New weights are copied into an
idle adaptive slot in place (addresses stay valid); publishing is a pointer flip that only later admissions see. A canary
has a slot of its own: promoting it is the same flip, calling it off frees its slot as soon as the requests pinned to it
have ended.

Traffic classes may have versions of their own: a request of such a class is pinned to its version where that is resident,
and to the live one where not. Which of them are resident: as many as have slots, and where there are more, those whose
classes were asked for last.

A version of a class may be a delta of the first one: it then has a place beside the first drafter's weights and drafts in one
pass with it and with its other deltas, over the same KV.

Memory: a replica holds at most 2 + num_class_slots + 1 drafters with their KV, whatever runs: the live version, one that
comes or goes (canary, staged, the one before), the classes' versions, and the first. What has no slot waits until one is
idle; a class's version never takes the slot that the live version's successor needs.

Thread rule: `pin`, `unpin`, `publish`, `route`, `set_canary` and `mark_failed` are cheap and may be called from any thread;
`stage`, `load` and `load_delta` copy weights and belong to a thread other than the engine's.
"""

from __future__ import annotations

import itertools
import logging
import string
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paceline.contracts import Group, is_canary
from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.interface import Drafter
from paceline.serving.target_model.device import side_stream

logger = logging.getLogger(__name__)

FIRST_SLOT = "first"
MAX_CLASS_SLOTS = len(string.ascii_uppercase) - 2
LOAD_SHARE = 0.05
"""Of a thread's time that loading takes at most where classes take each other's slots: more of them than there are slots, all
with traffic, would else have weights read and copied without end."""


def delta_name(at: int) -> str:
    """How reports call the place of a delta, beside the slots."""
    return f"{FIRST_SLOT}+{at}"


class Pin(NamedTuple):
    """What a request drafts with."""

    slot: str | None
    """None: plain decoding."""
    version: str = ""
    delta: int = -1
    """Number of the delta beside the slot's weights, -1 = those alone."""


@dataclass(slots=True)
class _Slot:
    drafter: Drafter | None = None
    version: str = ""
    num_pins: int = 0
    used: int = 0  # grows with time: when a request was pinned here last, or weights were loaded
    num_loads: int = 0  # grows with every change of the weights
    twin: Drafter | None = None  # made beforehand for the first version that is staged here
    failure: str = ""  # why it no longer drafts; "" = usable
    is_loading: bool = False  # its weights are being copied: neither the old version nor the new one


class DrafterSlots:
    """The drafters of one engine, pinned per request."""

    def __init__(
        self,
        drafter: Drafter | None = None,
        version: str = "",
        *,
        first: Drafter | None = None,
        first_version: str | None = None,
        spawn: Callable[[], Drafter] | None = None,
        num_class_slots: int = 0,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start with `drafter` live in slot A; None is plain decoding.

        Args:
            version: id of the live drafter's weights; its capability name when empty.
            first: the hold-back group's own drafter. None: the group uses whichever adaptive slot still holds
                `first_version`, and decodes plainly when none does.
            first_version: version of the hold-back group; `version` when None.
            spawn: makes an empty twin of the live drafter for the other adaptive slots (staging a state dict needs it
                the first time). Drafter objects can be staged without it.
            num_class_slots: versions of traffic classes that may be resident, 0 to MAX_CLASS_SLOTS. Deltas do not count: there
                may be as many of them as `first` has room for.
        """
        assert 0 <= num_class_slots <= MAX_CLASS_SLOTS, f"slots have letters, got num_class_slots={num_class_slots}"
        if drafter is not None and not version:
            version = drafter.caps.name
        self._adaptive, self._num_class_slots = string.ascii_uppercase[: 2 + num_class_slots], num_class_slots
        self._slots = {name: _Slot() for name in (*self._adaptive, FIRST_SLOT)}
        self._slots["A"] = _Slot(drafter, version)
        self.first_version = first_version if first_version is not None else version
        if first is not None:
            self._slots[FIRST_SLOT] = _Slot(first, self.first_version)
        self._deltas = [_Slot() for _ in range(getattr(first, "num_deltas", 0))]
        self._spawn = spawn
        self._timer = timer
        self._live = "A"
        self._staged: str | None = None
        self._canary: str | None = None
        self._canary_percent, self._canary_bucket = 0, ""
        self._routes: dict[str, str] = {}  # class -> version that its requests are to have
        self._served: dict[str, tuple[str, int]] = {}  # class -> slot and delta of that version, where it is resident
        self._asked: dict[str, int] = {}  # version of a class -> when a request of the class came last
        self._unmet: Counter[str] = Counter()  # version of a class -> requests that had to take the live one since
        self._ticks = itertools.count(1)
        self._next_eviction_s = float("-inf")  # when a class may take the slot of another again, by the timer
        self._waiting: tuple[str, Any] | None = None
        self._num_pool_rows: int | None = None
        self._lock = threading.Lock()  # pins, versions, pointers
        self._stage_lock = threading.Lock()  # one copy at a time
        self.num_failures = 0
        self.num_swaps = 0
        self.swap_pause_ms: list[float] = []

    # ---- memory -------------------------------------------------------------------------------------------------
    @property
    def kv_row_bytes(self) -> int:
        """Bytes of drafter KV per pool row over all slots that can exist (drafters without KV count 0)."""
        live = getattr(self._slots["A"].drafter, "kv_row_bytes", 0)
        others = (len(self._adaptive) - 1) * live if self._spawn is not None else 0
        return live + others + getattr(self._slots[FIRST_SLOT].drafter, "kv_row_bytes", 0)

    def alloc(self, num_pool_rows: int) -> None:
        """Give every drafter its KV; called once by the engine, later drafters are allocated when staged."""
        self._num_pool_rows = num_pool_rows
        for slot in self._slots.values():
            for drafter in (slot.drafter, slot.twin):
                if drafter is not None:
                    drafter.alloc(num_pool_rows)

    def prepare_all(self) -> dict[str, Drafter]:
        """Every drafter that a slot can hold, that of `live_slot` first; empty adaptive slots get their twins now.

        For what must be made before the first request and not while a version is staged, such as graphs.
        """
        for name in self._adaptive:
            slot = self._slots[name]
            if slot.drafter is None and slot.twin is None and self._spawn is not None:
                slot.twin = self._spawn()
                if self._num_pool_rows is not None:
                    slot.twin.alloc(self._num_pool_rows)
        held = {name: slot.drafter or slot.twin for name, slot in self._slots.items()}
        found = {name: drafter for name, drafter in held.items() if drafter is not None}
        return {name: found[name] for name in sorted(found, key=lambda n: n != self.live_slot)}

    # ---- staging and publication --------------------------------------------------------------------------------
    def stage(self, version: str, source: Drafter | Mapping[str, torch.Tensor]) -> bool:
        """Bring a version into an idle adaptive slot; True when it is resident and can be published.

        A version that is still resident needs no copy (rollback). When no slot is idle the order waits, replacing an
        older waiting one; call `stage_waiting` (or `stage` again) later.
        Raises: DrafterMismatchError when the weights do not fit; nothing was copied then.
        """
        with self._stage_lock:
            with self._lock:
                name = self._resident(version)
                if name is not None:
                    self._staged, self._waiting = name, None
                    self._reroute()
                    return True
                name = self._idle()
                if name is None:
                    self._waiting = (version, source)
                    return False
                self._claim(name)
            self._fill(name, version, source)
            with self._lock:
                self._staged, self._waiting = name, None
                self._reroute()
        return True

    def load(self, version: str, source: Callable[[], Mapping[str, torch.Tensor] | Drafter]) -> bool:
        """Bring the version of a class into a slot; False when none may be taken for it now.

        source: reads the weights; called where there is a slot.
        Raises: DrafterMismatchError when the weights do not fit (nothing was copied then), and what `source` raises.
        """
        return self._load_class(version, source, self._class_slot, self._claim, self._fill)

    def _load_class(
        self,
        version: str,
        source: Callable[[], Any],
        find: Callable[[str], Any],
        claim: Callable[[Any], None],
        fill: Callable[[Any, str, Any], None],
    ) -> bool:
        """Bring the version of a class to the place that `find` says (None = none may be taken now), as `load` does.

        claim: takes the place, under the lock. fill: copies what `source` gave to it.
        """
        with self._stage_lock:
            with self._lock:
                if find(version) is None:
                    return False
            started = self._timer()
            weights = source()
            with self._lock:
                place = find(version)
                if place is None:  # requests of the classes that it serves came meanwhile
                    return False
                claim(place)
            fill(place, version, weights)
            with self._lock:
                self._unmet.pop(version, None)
                self._reroute()
                now = self._timer()
                self._next_eviction_s = now + (now - started) / LOAD_SHARE
        return True

    def takes_delta(self, base_version: str) -> bool:
        """Whether deltas of this version have places here."""
        return bool(self._deltas) and self._is_first(base_version)

    def load_delta(self, version: str, source: Callable[[], Mapping[str, torch.Tensor]]) -> bool:
        """Bring the version of a class, a delta of the first one, to a place beside it; False when none may be taken for it now.

        source: reads its factors; called where there is a place.
        Raises: DrafterMismatchError when the factors do not fit (nothing was copied then), and what `source` raises.
        """
        first = self._slots[FIRST_SLOT].drafter

        def checked() -> Mapping[str, torch.Tensor]:
            factors = source()
            first.check_delta(factors)  # type: ignore[union-attr] # before a place is taken from another
            return factors

        return self._load_class(version, checked, self._delta_place, self._claim_delta, self._fill_delta)

    def _claim_delta(self, at: int) -> None:
        """Take an idle place for another delta; under the lock."""
        place = self._deltas[at]
        assert place.num_pins == 0, f"delta {at} is overwritten while {place.num_pins} requests draft with it"
        place.is_loading = True
        self._reroute()

    def _fill_delta(self, at: int, version: str, factors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite a claimed place, which is empty when that fails."""
        first, loaded = self._slots[FIRST_SLOT].drafter, _Slot()
        try:
            with side_stream(getattr(first, "device", None)):
                first.load_delta(at, factors)  # type: ignore[union-attr]
            loaded = _Slot(version=version, used=next(self._ticks))
        finally:
            with self._lock:
                self._deltas[at] = loaded
        logger.info("drafter delta loaded version=%s place=%d", version, at)

    def _claim(self, name: str) -> None:
        """Take an idle slot for new weights; under the lock, so that nothing is pinned to it from here on."""
        slot = self._slots[name]
        assert slot.num_pins == 0, f"slot {name} is overwritten while {slot.num_pins} requests draft with it"
        slot.num_loads += 1  # from here on drafter KV that the old weights wrote is worth nothing
        slot.is_loading = True  # the hold-back group may ask for the version that the copy overwrites
        if self._staged == name:
            self._staged = None
        if self._canary == name:  # it failed; its share was meant for its own version, not for the slot
            self._canary, self._canary_percent = None, 0
        self._reroute()

    def _fill(self, name: str, version: str, source: Drafter | Mapping[str, torch.Tensor]) -> None:
        """Overwrite the weights of a claimed slot."""
        slot = self._slots[name]
        try:
            drafter = self._bring(slot, version, source)
        except BaseException as e:
            with self._lock:
                slot.is_loading = False
                if slot.drafter is not None and not isinstance(e, DrafterMismatchError):  # a copy that broke off
                    slot.failure = f"staging {version} raised {type(e).__name__}: {e}"
                self._reroute()
            raise
        with self._lock:
            slot.drafter, slot.version, slot.failure, slot.twin = drafter, version, "", None
            slot.is_loading, slot.used = False, next(self._ticks)
            slot.num_loads += 1
        logger.info("drafter staged version=%s slot=%s", version, name)

    def stage_waiting(self) -> bool:
        """Try the waiting order again; True when nothing is waiting any more."""
        with self._lock:
            waiting = self._waiting
        return True if waiting is None else self.stage(*waiting)

    def publish(self, version: str | None = None) -> float:
        """Make the staged version the live one for later admissions; returns the pause in ms.

        Raises: DrafterMismatchError when `version` (or anything, if None) is not staged.
        """
        start = self._timer()
        with self._lock:
            staged = self._staged
            if staged is None or (version is not None and self._slots[staged].version != version):
                raise DrafterMismatchError(f"drafter version must be staged before it is published, got {version!r}")
            self._live, self._staged = staged, None
            if self._canary == staged:  # promoted: it has no trial share any more
                self._canary = None
            live = self._slots[staged].version
            self._reroute()
            self.num_swaps += 1
        pause_ms = (self._timer() - start) * 1e3
        self.swap_pause_ms = [*self.swap_pause_ms[-99:], pause_ms]
        logger.info("drafter published version=%s slot=%s pause_ms=%.3f", live, staged, pause_ms)
        return pause_ms

    def set_canary(self, version: str, percent: int, bucket: str = "") -> None:
        """Let a resident version serve `percent` of later adaptive requests, by `is_canary`; '' calls the canary off.

        bucket: the class whose requests it is tried on; '': those of all classes that have no version of their own.
        Raises: DrafterMismatchError when the version is neither staged nor resident, or is the one that it is tried
        against.
        """
        with self._lock:
            name = self._resident(version) if version else None
            if version and (name is None or name == self._served.get(bucket, (self._live, -1))[0]):
                raise DrafterMismatchError(f"a canary must be staged and not live, got drafter version {version!r}")
            if name is not None and self._staged == name:
                self._staged = None
            self._canary, self._canary_percent = name, percent if name is not None else 0
            self._canary_bucket = bucket
            self._reroute()
        logger.info("drafter canary version=%s percent=%d", version or "none", percent if version else 0)

    # ---- classes ------------------------------------------------------------------------------------------------
    def route(self, routes: Mapping[str, str]) -> None:
        """Pin later requests of each class to its version, as soon as that is resident; others to the live one."""
        with self._lock:
            self._routes = dict(routes)
            wanted = set(routes.values())
            self._asked = {v: tick for v, tick in self._asked.items() if v in wanted}
            self._unmet = Counter({v: n for v, n in self._unmet.items() if v in wanted})
            self._reroute()

    def routed(self) -> Collection[str]:
        """Classes that are to have a version of their own, resident or not."""
        return self._routes.keys()

    def missing(self) -> list[str]:
        """Versions of classes that are not resident, those first that most requests have asked for in vain."""
        with self._lock:
            # where there are deltas, a version whose slot was given up may be served as one
            unserved = {v for bucket, v in self._routes.items() if bucket not in self._served}
            gone = {v for v in unserved if self._deltas or self._place_of(v) is None}
            return sorted(gone, key=lambda v: (-self._unmet[v], v))

    def served(self) -> dict[str, str]:
        """Class -> version that its new requests are pinned to, for the classes whose own version is resident."""
        with self._lock:
            return {bucket: self._routes[bucket] for bucket in self._served}

    # ---- pins ---------------------------------------------------------------------------------------------------
    def pin(self, group: Group, request_id: str = "", bucket: str = "") -> Pin:
        """Pin a new request.

        An adaptive request goes to the canary or to the version of its class, else the live one, by its id; one without
        an id is no canary's.
        """
        with self._lock:
            name, delta = self._choose(group, request_id, bucket)
            if name is None:
                return Pin(None)
            for slot in self._pinned(name, delta):
                slot.num_pins += 1
                slot.used = next(self._ticks)
            return Pin(name, slot.version, delta)

    def unpin(self, name: str | None, delta: int = -1) -> None:
        """Give a pin back; None (plain decoding) is allowed."""
        if name is None:
            return
        with self._lock:
            for slot in self._pinned(name, delta):
                assert slot.num_pins > 0, f"slot {name} unpinned more often than pinned"
                slot.num_pins -= 1

    def _pinned(self, name: str, delta: int) -> tuple[_Slot, ...]:
        """What a request of this slot and delta keeps from being overwritten; the last one says its version."""
        slot = self._slots[name]
        return (slot,) if delta < 0 else (slot, self._deltas[delta])

    def drafter(self, name: str | None, delta: int = -1) -> Drafter | None:
        """The drafter of a slot, None when the slot has none or it, or the delta, failed."""
        if name is None:
            return None
        slot = self._slots[name]
        return None if slot.failure or (delta >= 0 and self._deltas[delta].failure) else slot.drafter

    def mark_failed(self, name: str, reason: str, delta: int = -1) -> None:
        """Stop drafting with a slot, or with one delta beside it; requests of it finish as plain decoding and new ones are not
        pinned to it."""
        with self._lock:
            slot = self._slots[name] if delta < 0 else self._deltas[delta]
            if slot.failure:
                return
            slot.failure = reason
            self._reroute()
            self.num_failures += 1
        logger.error("drafter failed slot=%s version=%s reason=%s", name, slot.version, reason)

    # ---- views --------------------------------------------------------------------------------------------------
    @property
    def live_slot(self) -> str:
        """Slot that new adaptive requests without a version of their own are pinned to: that of the live version, which is the
        first drafter's where it has deltas, so that they draft in one pass, or where the other one failed."""
        live = self._slots[self._live]
        return FIRST_SLOT if (self._deltas or live.failure) and self._is_first(live.version) else self._live

    @property
    def needs_features(self) -> bool:
        """Whether a drafter wants tapped hidden states, or one that is spawned later may."""
        return self._spawn is not None or any(
            s.drafter is not None and s.drafter.caps.needs_features for s in self._slots.values()
        )

    def num_loads(self, name: str) -> int:
        """How often the weights of a slot have changed; the same number means the same weights."""
        return self._slots[name].num_loads

    @property
    def live_version(self) -> str:
        return self._slots[self._live].version

    @property
    def canary_version(self) -> str:
        """The version on trial, '' when there is none."""
        with self._lock:
            return "" if self._canary is None else self._slots[self._canary].version

    @property
    def waiting_version(self) -> str | None:
        waiting = self._waiting
        return None if waiting is None else waiting[0]

    def is_resident(self, version: str) -> bool:
        """Whether an adaptive slot holds usable weights of the version, so that `stage` needs no state."""
        with self._lock:
            return self._resident(version) is not None

    def versions(self) -> dict[str, str]:
        """Slot name -> version of every slot that holds a drafter."""
        with self._lock:
            found = {n: s.version for n, s in self._slots.items() if s.drafter is not None}
            return found | {
                delta_name(i): s.version for i, s in enumerate(self._deltas) if s.version and not s.is_loading
            }

    def failures(self) -> dict[str, str]:
        """Version -> reason of every failed slot and delta, but for versions that another slot can draft with."""
        with self._lock:
            failed = {s.version: s.failure for s in (*self._slots.values(), *self._deltas) if s.failure}
            return {version: reason for version, reason in failed.items() if self._place_of(version) is None}

    def num_pins(self) -> dict[str, int]:
        with self._lock:
            found = {n: s.num_pins for n, s in self._slots.items()}
            return found | {delta_name(i): s.num_pins for i, s in enumerate(self._deltas)}

    # ---- private, under the lock --------------------------------------------------------------------------------
    def _choose(self, group: Group, request_id: str, bucket: str) -> tuple[str | None, int]:
        if group == Group.PLAIN:
            return None, -1
        name, delta = self.live_slot, -1
        if group == Group.ADAPTIVE:
            own = self._routes.get(bucket)
            if own is not None:
                self._asked[own] = next(self._ticks)
                if bucket in self._served:
                    name, delta = self._served[bucket]
                else:
                    self._unmet[own] += 1
            is_tried = bucket == self._canary_bucket if self._canary_bucket else own is None
            if self._canary is not None and is_tried and request_id:
                canary = self._slots[self._canary]
                if not canary.failure and is_canary(request_id, canary.version, self._canary_percent):
                    return self._canary, -1
        static: str | None = name
        if group == Group.STATIC and self._slots[self._live].version != self.first_version:
            static = FIRST_SLOT if self._slots[FIRST_SLOT].drafter is not None else self._resident(self.first_version)
        if static is None or self._slots[static].drafter is None or self._slots[static].failure:
            return None, -1
        return static, delta

    def _resident(self, version: str) -> str | None:
        for name in self._adaptive:
            slot = self._slots[name]
            if slot.drafter is not None and slot.version == version and not slot.failure and not slot.is_loading:
                return name
        return None

    def _is_first(self, version: str) -> bool:
        """Whether the slot of the hold-back group can serve a class with this version."""
        slot = self._slots[FIRST_SLOT]
        return slot.drafter is not None and slot.version == version and not slot.failure

    def _place_of(self, version: str, given_up: Collection[str] = ()) -> tuple[str, int] | None:
        """Slot and delta where a class is served with this version; None = it is not resident. given_up: slots not to be used."""
        name = self._resident(version)
        if name is not None and name not in given_up:
            return name, -1
        if self._is_first(version):
            return FIRST_SLOT, -1
        usable = enumerate(self._deltas) if self._is_first(self.first_version) else ()
        found = (i for i, s in usable if s.version == version and not (s.is_loading or s.failure))
        return next(((FIRST_SLOT, i) for i in found), None)

    def _of_classes(self) -> list[str]:
        """Slots that nothing but classes want, the one whose classes were asked for last first."""
        wanted = set(self._routes.values())
        own = [n for n in self._adaptive if n not in (self._live, self._staged, self._canary)]
        own = [n for n in own if self._slots[n].version in wanted and self._resident(self._slots[n].version) == n]
        return sorted(own, key=lambda n: -self._asked.get(self._slots[n].version, 0))

    def _reroute(self) -> None:
        """Find the classes' slots anew. Classes beyond `num_class_slots` give theirs up, for the next live version."""
        given_up = set(self._of_classes()[self._num_class_slots :])
        self._served = {}
        for bucket, version in self._routes.items():
            place = self._place_of(version, given_up)
            if place is not None:
                self._served[bucket] = place

    def _free(self) -> list[str]:
        """Adaptive slots that may be overwritten: empty and failed ones first, then by their latest use."""
        names = []
        for name in self._adaptive:
            is_on_trial = name == self._canary and not self._slots[name].failure  # one that failed may be loaded again
            if name != self._live and not is_on_trial and self._slots[name].num_pins == 0:
                names.append(name)
        is_usable = {n: self._slots[n].drafter is not None and not self._slots[n].failure for n in names}
        return sorted(names, key=lambda n: self._slots[n].used if is_usable[n] else -1)

    def _idle(self) -> str | None:
        """The slot for the next live version or canary: of classes only where there is no other."""
        free, of_classes = self._free(), self._of_classes()
        return next((n for n in free if n not in of_classes), free[0] if free else None)

    def _class_slot(self, version: str) -> str | None:
        """The slot for the version of a class: a free one within their number, else that of the classes that were asked for
        the longest ago, if this one was asked for since and the latest load is long past (LOAD_SHARE)."""
        if not self._num_class_slots or version not in self._routes.values():
            return None
        if self._place_of(version) is not None:
            return None
        free, of_classes = [n for n in self._free() if n != self._staged], self._of_classes()
        if len(of_classes) < self._num_class_slots:
            return next((n for n in free if n not in of_classes), None)
        last = of_classes[-1]
        return last if last in free and self._may_replace(self._slots[last].version, version) else None

    def _delta_place(self, version: str) -> int | None:
        """The place for the delta of a class: as `_class_slot`."""
        wanted = set(self._routes.values())
        is_served = any(self._routes[bucket] == version for bucket in self._served)
        if version not in wanted or is_served or not self._is_first(self.first_version):
            return None
        free = [i for i, s in enumerate(self._deltas) if s.num_pins == 0 and not s.is_loading]
        unused = [i for i in free if self._deltas[i].version not in wanted or self._deltas[i].failure]
        if unused:
            return min(unused, key=lambda i: self._deltas[i].used)
        last = min(range(len(self._deltas)), key=lambda i: self._asked.get(self._deltas[i].version, 0), default=None)
        return last if last in free and self._may_replace(self._deltas[last].version, version) else None

    def _may_replace(self, old: str, new: str) -> bool:
        """Whether a class's version may take the place of another's: asked for since, and the latest load is long past."""
        is_newer = self._asked.get(old, 0) < self._asked.get(new, 0)
        return is_newer and self._timer() >= self._next_eviction_s

    def _bring(self, slot: _Slot, version: str, source: Drafter | Mapping[str, torch.Tensor]) -> Drafter:
        if isinstance(source, Mapping):
            return self._load(slot, version, source)
        if self._num_pool_rows is not None and source is not slot.drafter:
            source.alloc(self._num_pool_rows)
        return source

    def _load(self, slot: _Slot, version: str, state: Mapping[str, torch.Tensor]) -> Drafter:
        for key, tensor in state.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise DrafterMismatchError(
                    f"drafter {version} weights must be finite, {key} is not; retrain or re-fetch"
                )
        drafter = slot.drafter or slot.twin
        fresh = drafter is None
        if drafter is None:
            if self._spawn is None:
                raise DrafterMismatchError(f"drafter {version} cannot be staged: this engine's drafter has no weights")
            drafter = self._spawn()
        load = getattr(drafter, "load_state", None)
        if load is None:
            raise DrafterMismatchError(f"drafter {version} cannot be staged: {drafter.caps.name} has no weights")
        with side_stream(getattr(drafter, "device", None)):
            load(state)  # checks names and shapes before the first copy
        if fresh and self._num_pool_rows is not None:
            drafter.alloc(self._num_pool_rows)
        return drafter
