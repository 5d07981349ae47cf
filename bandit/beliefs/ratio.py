"""Ratios of sums over requests, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


def combined(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(mean, standard error) of independent estimates, one or more, each with its standard error: by their precisions."""
    precision = sum(1.0 / se**2 for _, se in found)
    return sum(v / se**2 for v, se in found) / precision, math.sqrt(1.0 / precision)


class RatioSums(msgspec.Struct):
    """Sums over independent units (requests) of y and x; the estimate is sum(y) / sum(x).

    Used for device seconds per token (y seconds, x tokens) and acceptance length (y tokens, x rounds). The unit is the
    request, since rounds of one request resemble each other. Mutable; sums add over epochs and can be discounted.
    """

    n: float = 0.0
    y: float = 0.0
    x: float = 0.0
    yy: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, y: float, x: float) -> None:
        """Add one unit."""
        self.n += 1.0
        self.y += y
        self.x += x
        self.yy += y * y
        self.xx += x * x
        self.xy += x * y

    def merge(self, other: RatioSums) -> None:
        """Add another pool's units."""
        self.n += other.n
        self.y += other.y
        self.x += other.x
        self.yy += other.yy
        self.xx += other.xx
        self.xy += other.xy

    def discount(self, factor: float) -> None:
        """Weigh everything seen so far by `factor` in [0, 1]."""
        self.n *= factor
        self.y *= factor
        self.x *= factor
        self.yy *= factor
        self.xx *= factor
        self.xy *= factor

    def scaled(self, factor: float) -> RatioSums:
        """These units, their y multiplied by `factor`."""
        return RatioSums(
            n=self.n, y=factor * self.y, x=self.x, yy=factor * factor * self.yy, xx=self.xx, xy=factor * self.xy
        )

    def ratio(self) -> float | None:
        """sum(y) / sum(x), None without data."""
        return self.y / self.x if self.x > 0 else None

    def standard_error(self) -> float:
        """Standard error of `ratio()` by linearisation (Cochran, Sampling Techniques, eq. 6.13); inf below two units."""
        if self.n < 2.0 or self.x <= 0:
            return math.inf
        r = self.y / self.x
        residual = max(self.yy - 2.0 * r * self.xy + r * r * self.xx, 0.0)
        return math.sqrt(residual * self.n / (self.n - 1.0)) / self.x
