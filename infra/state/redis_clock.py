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
_LOOK_S = 60.0
_BACK_S = 0.6
"""It goes back by no more at a look: whoever waits for a time would stand still as long."""
_AGAIN_S = 5.0
_MAX_STEP_S = 120.0
"""What is followed: a virtual machine that stood still meanwhile, or clocks that go apart. A larger step is Redis' own: somebody
set its host's clock, and everybody's traces would look so much older."""


class RedisClock:
    """Seconds since the epoch by the clock of Redis' host, carried on by this computer's steady one; never goes back.

    What is compared between nodes goes by it: ages of traces, spans of traffic, times in the controller's state. Until it
    is read it shows the system's time.
    """

    def __init__(self) -> None:
        self._offset_s: float | None = None
        self._due, self._latest, self._is_told = 0.0, 0.0, False

    @property
    def is_set(self) -> bool:
        return self._offset_s is not None

    def now(self) -> float:
        if self._offset_s is None:
            return SystemClock().now()
        self._latest = max(self._latest, self._offset_s + steady())
        return self._latest

    def look(self, client: redis.Redis) -> None:
        """Read Redis' time, unless that was done a short while ago. Raises redis errors."""
        if self._offset_s is not None and steady() < self._due:
            return
        began = steady()
        seconds, micros = client.time()  # type: ignore[misc]
        ended = steady()
        self._due = ended + _LOOK_S
        offset_s = seconds + micros / 1e6 - (began + ended) / 2
        if self._offset_s is not None:
            self._follow(offset_s)
            return
        self._offset_s = offset_s
        skew_s = SystemClock().now() - self.now()
        if abs(skew_s) > _MAX_SKEW_S:
            logger.warning("this computer's clock is %.0f s off Redis'; the service goes by Redis'", skew_s)

    def _follow(self, offset_s: float) -> None:
        assert self._offset_s is not None
        step_s = offset_s - self._offset_s
        if abs(step_s) <= _MAX_STEP_S:
            self._offset_s += max(step_s, -_BACK_S)
        elif not self._is_told:
            self._is_told = True
            logger.warning(
                "Redis' clock went %.0f s apart from this process'; its times are kept as they were: restart the service's "
                "processes if Redis' are right", step_s,
            )  # fmt: skip

    def try_to_look(self, client: redis.Redis) -> None:
        """The same where Redis may be away: then it is left to a later call."""
        try:
            self.look(client)
        except (RedisError, OSError) as e:
            self._due = steady() + _AGAIN_S
            told = "the system's is used" if self._offset_s is None else "it is carried on"
            logger.warning("Redis' time cannot be read, %s: %s", told, e)


def deployment_time(redis_url: str | None) -> float:
    """Now, for what is deployed from any computer and must come after what was before; this one's time without Redis."""
    clock = RedisClock()
    if redis_url is not None:
        with patient_client(redis_url, retries=2) as client:
            clock.try_to_look(client)
    return clock.now()
