"""Which existing version has served traffic like this best, by the weights of Fixed-Share?"""

from __future__ import annotations

import numpy as np

from paceline.bandit.policy_view import Choice, View, hold, not_now, say

ODDS = 2.0
"""The heaviest version takes over when it weighs this much more than the live one."""


class HedgePolicy:
    """Never trains; makes the heaviest version live, lazily.

    Every epoch each version's loss is its believed device time per token on the present mix over that of a drafter that
    accepts nothing; shadow scores and served rounds give it without exploring. The bound of policy_memory.HedgeWeights is
    on the weighted mean of losses; serving the leader instead avoids swaps, which cost.
    """

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        weights, live = view.memory.hedge.weights, view.live_version
        priced = {r.version: r for r in view.recalls}
        own = weights.get(live, 0.0)
        rivals = [v for v in sorted(weights) if v in priced]
        if not rivals:
            template = "{num} other versions have a known score on the present mix."
            return hold(view, "no_version", template, num=0)
        best = max(rivals, key=lambda v: (weights[v], v))
        if weights[best] < ODDS * own:
            template = (
                "Version {best} has weight {weight:.3f}, less than {odds:.1f} times the {own:.3f} of the live one."
            )
            return hold(view, "weights", template, best=best, weight=weights[best], odds=ODDS, own=own)
        held = not_now(view)
        if held is not None:
            return held
        if view.since_swap_s < view.config.min_dwell_s:
            template = "The live version is {since:.0f} s old, and it stays for {dwell:.0f} s."
            return hold(view, "dwell", template, since=view.since_swap_s, dwell=view.config.min_dwell_s)
        reason, numbers = say(
            "Version {best} has weight {weight:.3f}, at least {odds:.1f} times the {own:.3f} of the live one.",
            best=best,
            weight=weights[best],
            odds=ODDS,
            own=own,
        )
        recall = priced[best]
        return Choice(
            action="recall", bucket=recall.bucket, code="recall", reason=reason, numbers=numbers, recall=recall
        )
