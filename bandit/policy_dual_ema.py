"""Has acceptance dropped, and are enough rows of the new traffic collected? (TIDE's rule)"""

from __future__ import annotations

import numpy as np

from paceline.bandit.policy_view import Choice, View, hold, largest_job, not_now, too_few_rows, train


class DualEmaPolicy:
    """Trains the largest arm after a drop of acceptance, on rows collected since; knows neither cost nor horizon.

    Source: TIDE, arXiv 2602.05145, Alg. 1; its gate (deploy only what scored better) is that of every job. The memory
    is policy_memory.DualEma; the weights and the margin are ours (PolicyConfig), the paper does not give them.
    """

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        held = not_now(view)
        if held is not None:
            return held
        ema, config = view.memory.ema, view.config
        level = (1.0 - config.ema_margin) * ema.slow
        if not ema.is_collecting:
            template = "The fast mean of acceptance length {fast:.2f} did not fall below {level:.2f}, which is the slow mean {slow:.2f} less {margin:.0%}."  # fmt: skip
            return hold(view, "ema", template, fast=ema.fast, level=level, slow=ema.slow, margin=config.ema_margin)
        active = [b for b in view.beliefs.values() if b.is_active]
        belief = max(active, key=lambda b: (ema.collected.get(b.bucket, 0), b.bucket))
        collected = ema.collected.get(belief.bucket, 0)
        if collected < config.min_rows:
            template = "{bucket} collected {collected} rows since acceptance dropped, of the {needed} that a job needs."
            bucket, needed = belief.bucket, config.min_rows
            return hold(view, "rows", template, at=bucket, bucket=bucket, collected=collected, needed=needed)
        job = largest_job(view, belief.bucket)
        if job is None:
            return too_few_rows(view, belief, config.min_rows)
        return train(
            job,
            "Acceptance length dropped (fast mean {fast:.2f}, slow mean {slow:.2f}) and {bucket} collected {collected} "
            "rows, at least {needed}.",
            fast=ema.fast,
            slow=ema.slow,
            bucket=job.bucket,
            collected=collected,
            needed=config.min_rows,
        )
