"""Training arms: the ways to train, and how many rows each may use."""

from __future__ import annotations

import msgspec

from paceline.contracts import ArmSpec

ROW_STEPS = (0.25, 0.5, 1.0)
"""Shares of the usable rows at which a job is priced: a smaller job may fit the bank where the largest does not."""


def default_arms(delta_rank: int = 0) -> tuple[ArmSpec, ...]:
    """Three arms of rising cost; num_rows is the most rows the arm may use.

    delta_rank: of deltas, which are then all that is learned; 0 = whole weights.
    """
    if delta_rank:
        return (ArmSpec(name="lora", parameters="lora", num_rows=16384, learning_rate=5e-3, rank=delta_rank),)
    return (
        ArmSpec(name="calibration", parameters="calibration", num_rows=2048, rehearsal_share=0.0, learning_rate=5e-4),
        ArmSpec(name="head", parameters="head", num_rows=8192, learning_rate=2e-3),
        ArmSpec(name="full", parameters="full", num_rows=16384, learning_rate=1e-3),
    )


def sized(arm: ArmSpec, num_rows: int) -> ArmSpec:
    """The arm with the rows it will really use."""
    return msgspec.structs.replace(arm, num_rows=min(num_rows, arm.num_rows))


def row_counts(arm: ArmSpec, usable: int, min_rows: int) -> list[int]:
    """Row counts to price for `usable` rows, rising; empty below min_rows."""
    most = min(usable, arm.num_rows)
    if usable < min_rows:
        return []
    return sorted({max(min(min_rows, most), int(most * share)) for share in ROW_STEPS})
