"""Policies that are not of the package."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.replay import Choice, View, hold, not_now, train


class Cheapest:
    """Trains the cheapest job as soon as it costs less than a tenth of the bank."""

    is_self_funded = True

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        held = not_now(view)
        if held is not None:
            return held
        cheap = sorted((j for j in view.jobs if j.cost.total_s < 0.1 * view.balance_s), key=lambda j: j.cost.total_s)
        if not cheap:
            return hold(view, "dear", "{num} jobs cost less than a tenth of the bank.", num=0)
        return train(cheap[0], "It costs {cost:.1f} s.", cost=cheap[0].cost.total_s)


class Always:
    """Trains the first job whenever one may begin."""

    is_self_funded = True

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        held = not_now(view)
        if held is not None or not view.jobs:
            return held or hold(view, "none", "There is no job.")
        return train(view.jobs[0], "It is the first.")


class NeedsMore:
    """Cannot be made without an argument."""

    def __init__(self, size: int) -> None:
        self.size = size

    def choose(self, view: View, rng: np.random.Generator) -> Any:
        return None


class ReturnsNothing:
    """Forgot its return."""

    def choose(self, view: View, rng: np.random.Generator) -> Any:
        hold(view, "n", "{num} is nothing.", num=0)


class Careless:
    """Trains while a job runs."""

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        return train(view.jobs[-1], "There is one.") if view.jobs else hold(view, "none", "There is no job.")


class ReadsAFile:
    """Reads a file that is not there."""

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        open("/absent/table.npz").close()
        return hold(view, "read", "The file was read.")


class NoPolicy:
    """Chooses nothing."""
