"""What may an operator order whatever the policy thinks of it: a training job now, another balance of the bank?"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.bandit.controller_state import ControllerState
from paceline.bandit.observation import HostContext
from paceline.bandit.policies import Choice, View
from paceline.bandit.pricing import price_jobs, recall_rate
from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec, Decision

MAX_BANK_S = 1e9


class OperatorOrders:
    """The part of the Controller that carries them out."""

    _state: ControllerState
    _config: PolicyConfig
    _arms: tuple[ArmSpec, ...]

    def _view(self, now: float, context: HostContext) -> View:
        raise NotImplementedError

    def _emit(self, choice: Choice, view: View, now: float, context: HostContext) -> list[Decision]:
        raise NotImplementedError

    def set_bank(self, start_s: float) -> None:
        """Set the starting balance, device-seconds; what was saved and spent stays. Raises ValueError out of range."""
        if not 0.0 <= start_s <= MAX_BANK_S:  # False for NaN too
            raise ValueError(f"bank_s must be in [0, {MAX_BANK_S:g}] device-seconds, got {start_s!r}")
        self._state.bank_start_s, self._state.last_hold = float(start_s), ""

    def train_now(self, bucket: str, arm: str, now: float, context: HostContext | None = None) -> Decision:
        """Order the named arm on a bucket; its honest price is on the decision, and the bank does not bound it.

        Args:
            context: what the host knows now; None = at the last tick.
        Raises: ValueError for an unknown arm or bucket, without rows, or while a job is in flight.
        """
        context = context or self._state.context
        if context is None:
            raise ValueError("the controller has seen no replica yet; try again in a few seconds")
        template = next((a for a in self._arms if a.name == arm), None)
        if template is None:
            raise ValueError(f"arm must be one of {', '.join(a.name for a in self._arms)}, got {arm!r}")
        view = self._view(now, context)
        (decision,) = self._emit(price_order(view, bucket, template, self._state, context), view, now, context)
        facts: dict[str, Any] = {**decision.context, "time_limit_s": self._config.job_time_limit_s}
        decision = msgspec.structs.replace(decision, policy="operator", context=facts)
        self._state.remember(decision)
        return decision


def price_order(view: View, bucket: str, arm: ArmSpec, state: ControllerState, context: HostContext) -> Choice:
    """The choice 'train arm on bucket' with all usable rows; raises ValueError with what to do where that cannot be."""
    if view.is_job_running:
        raise ValueError("a training job is in flight; wait until it has ended")
    belief = view.beliefs.get(bucket)
    if belief is None:
        known = ", ".join(sorted(view.beliefs)) or "none yet"
        raise ValueError(f"bucket must be one with measured traffic ({known}), got {bucket!r}")
    if belief.fresh_rows < 1 or not belief.is_active:
        raise ValueError(f"bucket {bucket!r} has no fresh rows or no traffic to learn from; send it requests first")
    jobs = price_jobs(
        view.beliefs,
        (arm,),
        gains=state.gains,
        costs=state.costs,
        best_length=state.table.best_length(),
        horizon_s=view.horizon_s,
        min_rows=1,
        num_replicas=context.num_replicas,
        forgotten=state.forgotten,
        recall_rate=recall_rate(view.beliefs, view.recalls),
    )
    job = max((j for j in jobs if j.bucket == bucket), key=lambda j: j.arm.num_rows)
    reason = (
        f"Ordered by the operator: {arm.name} on {job.arm.num_rows} rows of {bucket}; "
        f"expected to save {max(job.saving_s, 0.0):.1f} s for {job.cost.total_s:.1f} s."
    )
    return Choice(action="train", bucket=bucket, code="operator", reason=reason, job=job)
