"""What the policy makes of a canary's end: no gain from a version that did not stay, no job on a frozen bucket."""

import msgspec
import pytest

from paceline.config import PolicyConfig
from paceline.contracts import Decision, TrainResult
from tests.helpers.world import World


class FreezingWorld(World):
    frozen: list[str] = []

    def context(self):
        return msgspec.structs.replace(super().context(), frozen=list(self.frozen))


def world(policy: str = "always", cls: type[World] = World) -> World:
    return cls(
        config=PolicyConfig(policy=policy, epoch_s=5.0),
        mix=lambda t: {"c": 1.0},
        lengths={"c": 1.4},
        ceilings={"c": 2.3},
        round_s=0.05,
        batch_size=6,
    )


def ordered(w: World) -> Decision:
    for _ in range(200):
        for d in w.step():
            if d.action == "train":
                w.job = None
                return d
    raise AssertionError("no job was ordered")


@pytest.mark.parametrize(
    ("outcome", "is_kept"), [("promoted", True), ("rolled_back", False), ("retired", False), ("refused", False)]
)
def test_only_a_promoted_version_keeps_its_gain(outcome, is_kept):
    w = world()
    d = ordered(w)
    made = w.controller.job_finished(w.train(d), decision_id=d.decision_id, now=w.clock.now())
    assert made.publish is not None and made.decision.realised_gain != 0.0
    entries = w.controller.drain()[1]
    after = w.controller.order_ended(d.decision_id, outcome)
    assert after is not None and w.controller.check(entries) == []
    if is_kept:
        assert after.outcome == "accepted" and after.realised_gain == made.decision.realised_gain
        return
    assert (after.outcome, after.realised_gain) == (outcome, 0.0)
    assert after.realised_cost_s == made.decision.realised_cost_s
    assert after in w.controller.drain()[0], "the host must hear of it"


def test_the_end_of_an_unknown_canary_changes_nothing():
    w = world()
    before = w.controller.state()
    assert w.controller.order_ended(99, "rolled_back") is None
    assert w.controller.state() == before


def test_no_job_is_ordered_on_a_frozen_bucket():
    w = world(cls=FreezingWorld)
    d = ordered(w)
    w.controller.job_finished(
        TrainResult(job_id="j", status="failed", version=None, reason="test", train_s=1.0, shadow_s=0.0),
        decision_id=d.decision_id, now=w.clock.now(),
    )  # fmt: skip
    w.frozen = ["c"]
    assert not [d for _ in range(150) for d in w.step() if d.action == "train"]
    w.frozen = []
    assert ordered(w).bucket == "c"
