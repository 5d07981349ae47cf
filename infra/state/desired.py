"""Desired state: the record of what every replica should run, and the reports of what each of them runs.

The record is level-triggered: a replica that was away reads it and acts; pub/sub is only a hint. Generations only grow;
a rollback is a new generation with an older version.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import redis
from redis.exceptions import WatchError

from paceline.contracts import DesiredState, ReplicaReport, TrafficClasses, decode, encode
from paceline.errors import PacelineError
from paceline.infra.state.redis_clients import Keys

T = TypeVar("T")
logger = logging.getLogger(__name__)

REPORT_TTL_S = 15
"""A replica whose latest report is older counts as gone."""
_PATIENCE_S = 10.0


def read_desired(client: redis.Redis, keys: Keys) -> DesiredState | None:
    """The current record, None when there is none yet; raises redis errors and PacelineError on a damaged record."""
    return decode_desired(client.get(keys.desired))


def decode_desired(data: object) -> DesiredState | None:
    return _decoded(data, DesiredState, "desired state", "pin a version to write a new one")


def _decoded(data: object, kind: type[T], name: str, remedy: str) -> T | None:
    if data is None:
        return None
    assert isinstance(data, bytes)
    try:
        return decode(data, kind)
    except msgspec.DecodeError as e:
        raise PacelineError(f"the {name} in Redis is damaged ({e}); {remedy}") from e


def known_desired(data: object) -> DesiredState | None:
    """The record for whoever writes one: None where it is missing or damaged, since another takes its place."""
    try:
        return decode_desired(data)
    except PacelineError as e:
        logger.error("%s; it is written anew", e)
        return None


def read_classes(client: redis.Redis, keys: Keys) -> TrafficClasses | None:
    """The classes of unnamed traffic, None when none were told yet; raises redis errors, PacelineError on a damaged record."""
    return _decoded(client.get(keys.classes), TrafficClasses, "traffic classes", "the controller writes them anew")


def queue_desired(pipe: redis.client.Pipeline, keys: Keys, desired: DesiredState) -> None:
    """Add the commands that publish a record to a transaction that WATCHes `keys.desired`."""
    pipe.set(keys.desired, encode(desired))
    queue_log(pipe, keys, "desired", msgspec.to_builtins(desired))
    pipe.publish(keys.poke, b"desired")


def queue_log(pipe: redis.client.Pipeline, keys: Keys, kind: str, values: dict, entry_id: str = "*") -> None:
    """Add one entry of the log stream, which room.py bounds, to a transaction; entry_id: '*' = by the server's clock."""
    fields = {"kind": kind, "v": json.dumps(values, default=str)}
    pipe.xadd(keys.log, fields, id=entry_id)  # type: ignore[arg-type]


def commit_desired(
    client: redis.Redis, keys: Keys, make: Callable[[DesiredState | None], DesiredState | None]
) -> DesiredState:
    """Read, change and write the record atomically; returns it.

    `make` gets the current record and must raise its generation; it may return None to leave a record as it is.

    For set-up and command-line use while no controller runs; the controller commits inside its own fenced
    transaction. Raises PacelineError when others keep changing the record.
    """
    with client.pipeline(transaction=True) as pipe:
        give_up = time.monotonic() + _PATIENCE_S
        while time.monotonic() < give_up:
            try:
                pipe.watch(keys.desired)
                current = known_desired(pipe.get(keys.desired))
                desired = make(current)
                if desired is None:
                    assert current is not None, "there is no record to leave as it is"
                    return current
                if current is not None and desired.gen <= current.gen:
                    raise PacelineError(f"desired.gen must be above {current.gen}, got {desired.gen}")
                pipe.multi()
                queue_desired(pipe, keys, desired)
                pipe.execute()
            except WatchError:
                time.sleep(random.uniform(0.0, 0.01))  # writers that wait for different times do not meet again
                continue
            logger.info("desired state gen=%d version=%s reason=%s", desired.gen, desired.version, desired.reason)
            return desired
    raise PacelineError(f"the desired state kept changing for {_PATIENCE_S:g} s while it was being written; try again")


def configured_desired(
    stored: DesiredState | None, first_version: str, holdback_percent: int, now: float
) -> DesiredState | None:
    """The next generation that the configuration asks for; None when the stored record agrees with it."""
    if stored is None or stored.first_version != first_version:
        return DesiredState(
            gen=stored.gen + 1 if stored is not None else 1, version=first_version, first_version=first_version,
            holdback_percent=holdback_percent, reason="first drafter", ts=now,
        )  # fmt: skip
    if stored.holdback_percent == holdback_percent:
        return None
    reason = f"hold-back set from {stored.holdback_percent} to {holdback_percent} percent by the configuration"
    return msgspec.structs.replace(stored, gen=stored.gen + 1, holdback_percent=holdback_percent, reason=reason, ts=now)


def ensure_first_version(
    client: redis.Redis, keys: Keys, version: str, holdback_percent: int, now: float
) -> DesiredState:
    """Write the first record, or a new generation when the service was given another drafter or hold-back; returns it."""
    return commit_desired(client, keys, lambda stored: configured_desired(stored, version, holdback_percent, now))


def write_report(client: redis.Redis, keys: Keys, report: ReplicaReport, ttl_s: int = REPORT_TTL_S) -> None:
    """Write a replica's report with a time to live."""
    pipe = client.pipeline(transaction=False)
    pipe.set(keys.replica(report.replica_id), encode(report), ex=ttl_s)
    pipe.zadd(keys.replicas, {report.replica_id: report.ts})
    pipe.execute()


def read_reports(client: redis.Redis, keys: Keys) -> list[ReplicaReport]:
    """Reports of the replicas that are alive, but for damaged ones; forgets the ids of those that are gone."""
    ids = [i.decode() for i in client.zrange(keys.replicas, 0, -1)]  # type: ignore[union-attr,arg-type]
    if not ids:
        return []
    values = client.mget([keys.replica(i) for i in ids])
    gone = [i for i, v in zip(ids, values, strict=True) if v is None]  # type: ignore[arg-type]
    if gone:
        client.zrem(keys.replicas, *gone)
    found = []
    for name, value in zip(ids, values, strict=True):  # type: ignore[arg-type]
        try:
            found += [] if value is None else [decode(value, ReplicaReport)]  # type: ignore[arg-type]
        except msgspec.DecodeError as e:  # the replica writes another within seconds
            logger.error("the report of replica %s in Redis is damaged and counts for nothing: %s", name, e)
    return found
