"""History: what versions that earlier services trained teach about the gain of training."""

from __future__ import annotations

import itertools
import math

from paceline.bandit.beliefs.gain_model import further_share
from paceline.bandit.beliefs.observation import HostContext
from paceline.bandit.beliefs.recall import MANIFEST_REQUESTS
from paceline.bandit.controller.epoch import drifted_buckets
from paceline.bandit.controller.state import ControllerState
from paceline.bandit.policies.pricing import MAX_HEADROOM, PRIOR_BEST_LENGTH

PAIR_ERROR = 0.3 * math.sqrt(2.0 / MANIFEST_REQUESTS)
"""Relative standard error of the difference of two replay scores that were not taken on the same rows."""


def learn_history(state: ControllerState, context: HostContext) -> int:
    """Teach the gain model every pair (version, the version with next fewer rows of the bucket) once; how many were new.

    The manifests tell rows learned and replayed acceptance length, not the arm. Versions of this controller's own jobs
    are left out (they taught directly), and so are buckets whose text changed since.
    """
    drifted, taught = drifted_buckets(state), set(state.history)
    best = max([PRIOR_BEST_LENGTH, *(x for scores in context.shadow.values() for x in scores.values())])
    added = 0
    for bucket in sorted(context.shadow):
        if bucket in drifted:
            continue
        scores = context.shadow[bucket]
        rows = {v: context.learned_rows[v].get(bucket, 0) for v in scores if v in context.learned_rows}
        ordered = sorted(rows, key=lambda v: (rows[v], v))
        for before, after in itertools.pairwise(ordered):
            key = f"{bucket}|{after}"
            if key in taught or after in state.learned or rows[after] <= rows[before]:
                continue
            low, gain = scores[before], scores[after] - scores[before]
            room = min(max(best - low, 0.1 * low), MAX_HEADROOM * low)
            share = further_share(rows[before], rows[after])
            state.gains.update_from_history(bucket, room, share, gain, PAIR_ERROR * low)
            state.history.append(key)
            added += 1
    return added
