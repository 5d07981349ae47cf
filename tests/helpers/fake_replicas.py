"""Replicas without an engine: they follow the desired record, report, and serve requests at a scripted speed a version."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable

from paceline.contracts import ReplicaReport, encode, is_canary
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.desired import read_desired, write_report
from paceline.infra.state.redis_clients import OUTAGE_ERRORS, Keys, patient_client
from tests.helpers.feedback import round_rows

ROUNDS = 3


def loading(replica: str, gen: int, version: str, canary: str = "", **fields) -> ReplicaReport:
    """Report of a replica that runs a generation."""
    values = {"failed_gen": None, "failed_reason": "", "swap_pause_ms": [0.1], **fields}
    return ReplicaReport(
        replica_id=replica, gen=gen, version=version, canary_version=canary, slots={"A": version}, ts=time.time(), **values
    )  # fmt: skip


class FakeReplicas:
    """Serve `batch` finished requests a call of `serve`; each has ROUNDS rounds of 3 tokens.

    Args:
        speed: version -> tokens per second.
        refuses: versions that cannot be loaded.
        spread: standard deviation of a request's log speed.
        holdback: share of the requests that the first version serves as the hold-back.
    """

    def __init__(
        self, url: str, keys: Keys, *, names: tuple[str, ...] = ("a", "b"), speed: Callable[[str], float],
        refuses: Callable[[str], bool] = lambda version: False, spread: float = 0.05, holdback: float = 0.0,
    ) -> None:  # fmt: skip
        self._client, self._keys, self._names = patient_client(url), keys, names
        self._speed, self._refuses = speed, refuses
        self._seq = dict.fromkeys(names, 0)
        self._next = 0
        self._rng, self._spread, self._holdback = random.Random(0), spread, holdback
        self.num_rows = 0
        self.num_rounds: dict[str, int] = {}
        """Rounds by the version that served them."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def report(self) -> None:
        desired = read_desired(self._client, self._keys)
        assert desired is not None
        for name in self._names:
            if desired.canary_version and self._refuses(desired.canary_version):
                reason = f"drafter {desired.canary_version} weights must be finite"
                made = loading(
                    name, desired.gen - 1, desired.version, failed_gen=desired.gen, failed_reason=reason, swap_gen=0
                )
            else:
                refused = {v: "weights must be finite" for v in desired.class_versions.values() if self._refuses(v)}
                made = loading(
                    name, desired.gen, desired.version, desired.canary_version, swap_gen=0, refused=refused,
                    class_versions={b: v for b, v in desired.class_versions.items() if v not in refused},
                )  # fmt: skip
            write_report(self._client, self._keys, made)

    def serve(self, batch: int = 4) -> None:
        desired = read_desired(self._client, self._keys)
        assert desired is not None
        for name in self._names:
            rows = []
            for _ in range(batch):
                self._next += 1
                request, now = f"{name}-{self._next}", time.time()
                version, canary = desired.version_of("math"), desired.canary_version
                version = desired.version if self._refuses(version) else version
                scopes = ("math",) if "math" in desired.class_versions else ("", "math")
                if canary and desired.canary_bucket in scopes and not self._refuses(canary):
                    version = canary if is_canary(request, canary, desired.canary_percent) else version
                group = "adaptive"
                if self._holdback and self._rng.random() < self._holdback:
                    version, group = desired.first_version, "static"
                ms = 3e3 / self._speed(version) * math.exp(self._rng.gauss(0.0, self._spread))
                self.num_rounds[version] = self.num_rounds.get(version, 0) + ROUNDS
                rows += [
                    (request, "math", group, version, True, i, 4, 2, 3, 1, 1.0, 6.0, ms, False, now)
                    for i in range(1, ROUNDS + 1)
                ]
            self._seq[name] += 1
            made = make_batch(
                [round_rows(rows)],
                replica_id=name,
                boot_epoch=1,
                seq=self._seq[name],
                target_version="t",
                num_dropped=0,
            )
            self._client.xadd(self._keys.feedback, {"v": encode(made)})
            self.num_rows += len(rows)

    def start(self, every_s: float, batch: int) -> FakeReplicas:
        self._stop.clear()

        def run() -> None:
            while not self._stop.wait(every_s):
                try:
                    self.report()
                    self.serve(batch)
                except OUTAGE_ERRORS:
                    continue

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
