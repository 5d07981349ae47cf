"""Decoding for the shadow check: what the engine did round by round, and the traces it left."""

from __future__ import annotations

from typing import NamedTuple

from paceline.bench.common.recorders import Round, RoundRecorder
from paceline.bench.engine.arms import BenchGroup, EngineArm
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.serving.drafters.interface import Drafter
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import RequestTrace
from paceline.serving.target_model.model import TargetModel


class Decoded(NamedTuple):
    """One decoding of a group; both are in the order of its prompts."""

    traces: list[RequestTrace]
    rounds: tuple[tuple[Round, ...], ...]


class _Traces:
    """Keeps every trace."""

    def __init__(self) -> None:
        self.kept: dict[str, RequestTrace] = {}

    def wants(self, request_id: str, bucket: str) -> bool:
        return True

    def record_trace(self, trace: RequestTrace) -> None:
        self.kept[trace.request_id] = trace


def decode(
    target: TargetModel,
    drafter: Drafter | None,
    work: BenchGroup,
    *,
    version: str = "",
    tree: TreeConfig | None = None,
) -> Decoded:
    """Decode a group with a fresh engine and keep everything that it reports; a request's id is its tag and number.

    Args:
        drafter: None decodes plainly; the engine allocates its KV anew.
        version: name of the drafter's weights in the engine's statistics.
    Raises: PacelineError when a request ends in an error.
    """
    recorder, traces = RoundRecorder(), _Traces()
    slots = DrafterSlots() if drafter is None else DrafterSlots(drafter, version)
    config = EngineConfig(max_running=work.batch, tree=tree or TreeConfig(), prefix_caching=False)
    engine = Engine(target, slots, config, feedback=recorder, traces=traces)
    if config.tree.policy in ("adaptive", "bastion") and drafter is not None:
        engine.warm_up()
    arm = EngineArm("", engine, Group.PLAIN if drafter is None else Group.ADAPTIVE, recorder=recorder)
    rounds = arm.run(work).rounds
    return Decoded([traces.kept[f"{work.tag}-{i}"] for i in range(len(work.prompts))], rounds)
