"""Bank: the device-seconds that the controller may still spend."""

from __future__ import annotations

import msgspec


class Bank(msgspec.Struct, frozen=True, kw_only=True):
    """Balance = starting balance + measured savings less one standard error - spent - reserved; all device-seconds.

    Spending only out of the balance bounds the loss by `start_s` (bandits with knapsacks, Badanidiyuru et al. 2013,
    arXiv 1305.2545): whatever was saved was measured, so the worst case is the starting balance.
    """

    start_s: float
    saved_s: float
    saved_error_s: float
    spent_s: float
    reserved_s: float = 0.0
    """Held for the job in flight."""

    @property
    def balance_s(self) -> float:
        credit = self.saved_s - self.saved_error_s if self.saved_s > 0 else self.saved_s
        return self.start_s + max(credit, min(self.saved_s, 0.0)) - self.spent_s - self.reserved_s

    def covers(self, cost_s: float) -> bool:
        return cost_s <= self.balance_s

    def time_limit_s(self, job_time_limit_s: float, slowdown_s: float, after_s: float) -> float:
        """Longest run of a job that the balance covers.

        `slowdown_s` device-seconds of interference accrue per second of the job; `after_s` is kept for shadow scoring
        and staging, which follow it.
        """
        return max(min(job_time_limit_s, (self.balance_s - after_s) / (1.0 + max(slowdown_s, 0.0))), 0.0)
