"""Foresight: what the pay-off rule nets in the table worlds when it is told what nobody can know, one thing after the other.

`python tests/helpers/foresight.py --seeds 2` prints a line a family and, in the last one, means over all of them. What is told:

- `curves`: by how much a burst lifts the acceptance length, instead of the gain model's word
- `future`: for how many seconds a class will be served, instead of a horizon by evidence
- `evidence`: a learner's true gain at its burst's end, which makes it a version or not without a request that is scored for it
- `bank`: a million device-seconds

The difference to the oracle says what a rule could still win, the differences between columns by which knowledge.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from contextlib import ExitStack
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from paceline.bandit.beliefs.evidence import EvidenceModel
from paceline.bandit.beliefs.gain_model import POWER, TAU_ROWS, GainModel
from paceline.bandit.controller import policy_inputs
from paceline.bandit.policies.pricing import price_jobs
from paceline.bandit.replay import outcomes as outcomes_module
from paceline.bandit.replay.families import FAMILIES, family_worlds
from paceline.bandit.replay.outcomes import SimulatedOutcomes, TrainOrder, TrainTruth
from paceline.bandit.replay.simulate import ORACLE, draw_world, policy_config, simulate
from paceline.bandit.replay.world import START, World

COLUMNS = (
    "", "bank", "evidence", "future", "curves", "curves+future", "curves+future+evidence",
    "curves+future+evidence+bank", ORACLE,
)  # fmt: skip
LEAST_GAIN = 0.005
"""Tokens a round above which a burst whose gain is known makes a version."""


class Told:
    """Replacements of what the controller of one world believes by what is true."""

    def __init__(self, world: World) -> None:
        self.world, self.traffic, self.outcomes = world, world.traffic, world.outcomes
        assert isinstance(self.outcomes, SimulatedOutcomes)

    def _step(self) -> int:
        return min(round((self.world.clock.now() - START) / self.traffic.step_s), self.traffic.num_steps - 1)

    def _domains(self, bucket: str) -> list[int]:
        return [d for d, label in enumerate(self.traffic.labels) if label == bucket]

    def curves(self, patches: ExitStack) -> None:
        """Gains are those of the domain that the bucket served most within the last minute."""

        def predict(model: Any, bucket: str, arm: Any, headroom: float, share: float, new: float = 1.0) -> Any:
            rows = TAU_ROWS * (-math.log(max(1.0 - share, 1e-12))) ** (1.0 / POWER)  # of which this is learned_share
            mine, k = self._domains(bucket), self._step()
            d = mine[int(np.argmax(self.traffic.tokens[max(k - 5, 0) : k + 1, mine].sum(0)))]
            return self._gain(d, self.world.version_of(bucket), arm, rows), 1e-3

        patches.enter_context(mock.patch.object(GainModel, "predict", predict))

    def _gain(self, domain: int, base: str, arm: Any, rows: float) -> float:
        lengths = self.outcomes.lengths(base)
        share = self.outcomes.share(domain, lengths[domain : domain + 1])
        closed = float(self.outcomes.closed(domain, arm, np.array([rows]), share)[0, 0])
        return self.outcomes.gain(domain, lengths, closed)

    def future(self, patches: ExitStack) -> None:
        """A bucket's remaining life is the device time of all that is still to come of it, over what it takes a second now."""

        def price(beliefs: Any, arms: Any, **known: Any) -> list[Any]:
            del known["left_s"], known["returning_s"]
            return [
                job
                for name, belief in beliefs.items()
                for job in price_jobs({name: belief}, arms, left_s=lambda w, b=belief: self._left_s(b, w), **known)
            ]

        patches.enter_context(mock.patch.object(policy_inputs, "price_jobs", price))

    def _left_s(self, belief: Any, wait_s: float) -> float:
        first = min(self._step() + math.ceil(wait_s / self.traffic.step_s), self.traffic.num_steps)
        token_s = self.traffic.token_s(self.outcomes.lengths(self.world.version_of(belief.bucket)))
        mine = self._domains(belief.bucket)
        seconds = float((self.traffic.tokens[first:, mine] @ token_s[mine]).sum())
        return (1.0 - self.world.config.holdback_percent / 100.0) * seconds / max(belief.busy, 1e-6)

    def evidence(self, patches: ExitStack) -> None:
        """Bursts end when their rows do, and make a version if they gained."""
        train = SimulatedOutcomes.train

        def told(outcomes: SimulatedOutcomes, order: TrainOrder) -> TrainTruth:
            found = train(outcomes, order)
            if found.status != "learning" or not found.num_rows:
                return found
            gain = self._gain(order.domain, order.base, order.arm, outcomes._learners[order.bucket].rows)
            if gain <= LEAST_GAIN:
                return found
            del outcomes._learners[order.bucket]
            base, version = outcomes.lengths(order.base), f"v{len(outcomes._lengths)}-{order.decision_id}"
            closed = gain / max(float(outcomes.ceiling[order.domain] - base[order.domain]), 1e-9)
            outcomes._lengths[version] = outcomes.trained(order.domain, base, closed)
            return msgspec.structs.replace(
                found, status="accepted", version=version, seen_gain=gain, seen_lower=gain,
                num_scored=max(found.num_scored, 8),
            )  # fmt: skip

        for owner, name, value in (
            (SimulatedOutcomes, "train", told),
            (SimulatedOutcomes, "_finding", lambda *_: "learning"),
            (outcomes_module, "will_pay", lambda *_, **__: True),
            (EvidenceModel, "sure_rise", lambda *_, **__: 0.0),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))


def net_percent(job: tuple[str, str, int]) -> tuple[str, str, float]:
    """(family, column, net in percent of the serving cost) of one seed."""
    family, column, seed = job
    (cell,) = family_worlds([family])
    if column == ORACLE:
        return family, column, 100.0 * simulate(cell, ORACLE, {}, seed).net_share
    told = [name for name in column.split("+") if name]
    traffic, outcomes = draw_world(cell, seed)
    config = policy_config("payoff", {"bank_s": 1e6} if "bank" in told else {}, seed)
    world = World(traffic, outcomes, config, seed=seed, slowdown=outcomes.slowdown)
    with ExitStack() as patches:
        for name in set(told) - {"bank"}:
            getattr(Told(world), name)(patches)
        return family, column, 100.0 * world.run().net_share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="worlds of each family")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    options = parser.parse_args()
    jobs = [(f, c, s) for c in reversed(COLUMNS) for f in FAMILIES for s in range(options.seeds)]  # the long ones first
    nets: dict[tuple[str, str], list[float]] = {}
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for family, column, net in pool.imap_unordered(net_percent, jobs):
            nets.setdefault((family, column), []).append(net)
            print(f"\r{sum(map(len, nets.values()))} of {len(jobs)} runs", end="", flush=True)
    print("\r" + " ".join(["family".ljust(16), *((c or "payoff").rjust(max(len(c), 7)) for c in COLUMNS)]))
    rows = {family: [float(np.mean(nets[family, c])) for c in COLUMNS] for family in FAMILIES}
    for family, values in {**rows, "mean": np.mean(list(rows.values()), axis=0)}.items():
        print(
            " ".join(
                [family.ljust(16), *(f"{v:+.2f}".rjust(max(len(c), 7)) for c, v in zip(COLUMNS, values, strict=True))]
            )
        )


if __name__ == "__main__":
    main()
