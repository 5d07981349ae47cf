"""Redis clock: one time for all processes of a service, however the clocks of their computers are set."""

from __future__ import annotations

import logging

import redis
from redis.exceptions import RedisError

from paceline.infra.state.redis_clients import patient_client
from paceline.machine import SystemClock, steady

logger = logging.getLogger(__name__)

_MAX_SKEW_S = 60.0
"""A computer whose clock is further off is worth a warning."""


class RedisClock:
    """Seconds since the epoch by the clock of Redis' host, read once and carried on by this computer's steady one.

    What is compared between nodes goes by it: ages of traces, spans of traffic, times in the controller's state. Until it
    is read it shows the system's time.
    """

    def __init__(self) -> None:
        self._offset_s: float | None = None

    @property
    def is_set(self) -> bool:
        return self._offset_s is not None

    def now(self) -> float:
        return SystemClock().now() if self._offset_s is None else self._offset_s + steady()

    def look(self, client: redis.Redis) -> None:
        """Read Redis' time, unless that was done. Raises redis errors."""
        if self._offset_s is not None:
            return
        began = steady()
        seconds, micros = client.time()  # type: ignore[misc]
        ended = steady()
        self._offset_s = seconds + micros / 1e6 - (began + ended) / 2
        skew_s = SystemClock().now() - self.now()
        if abs(skew_s) > _MAX_SKEW_S:
            logger.warning("this computer's clock is %.0f s off Redis'; the service goes by Redis'", skew_s)

    def try_to_look(self, client: redis.Redis) -> None:
        """The same where Redis may be away: then it is left to a later call."""
        try:
            self.look(client)
        except (RedisError, OSError) as e:
            logger.warning("Redis' time cannot be read yet, the system's is used: %s", e)


def deployment_time(redis_url: str | None) -> float:
    """Now, for what is deployed from any computer and must come after what was before; this one's time without Redis."""
    clock = RedisClock()
    if redis_url is not None:
        with patient_client(redis_url, retries=2) as client:
            clock.try_to_look(client)
    return clock.now()
