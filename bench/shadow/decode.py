"""Decoding for the shadow check: what the engine did round by round, and the traces it left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.bench.common.engine_run import run_group
from paceline.bench.common.recorders import Round, RoundRecorder
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.serving.drafters.interface import Drafter
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import RequestTrace, SamplingParams
from paceline.serving.target_model.model import TargetModel


class RealRounds(NamedTuple):
    """Round statistics of one request."""

    num_rounds: int
    num_drafted_rounds: int
    """Rounds with at least one draft token; the others emit one token each."""
    num_draft_tokens: int
    num_accepted_tokens: int
    """Before truncation at the end of the request."""
    num_emitted_tokens: int
    """After truncation, bonus tokens included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests of one bucket that are decoded in several ways."""

    name: str
    bucket: str
    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]

    def request_id(self, index: int) -> str:
        """Id of the request with this index; equal however it is decoded."""
        return f"{self.name}-{index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """One decoding of a workload; both lists are in the order of its prompts."""

    traces: list[RequestTrace]
    rounds: list[RealRounds]


class _Traces:
    """Keeps every trace."""

    def __init__(self, on_trace: Callable[[], None]) -> None:
        self.kept: dict[str, RequestTrace] = {}
        self._on_trace = on_trace

    def wants(self, request_id: str, bucket: str) -> bool:
        return True

    def record_trace(self, trace: RequestTrace) -> None:
        self.kept[trace.request_id] = trace
        self._on_trace()


def _summarise(rounds: Sequence[Round]) -> RealRounds:
    return RealRounds(
        num_rounds=len(rounds),
        num_drafted_rounds=sum(r.num_draft_tokens > 0 for r in rounds),
        num_draft_tokens=sum(r.num_draft_tokens for r in rounds),
        num_accepted_tokens=sum(r.num_accepted_tokens for r in rounds),
        num_emitted_tokens=sum(r.num_emitted_tokens for r in rounds),
    )


def decode(
    target: TargetModel,
    drafter: Drafter | None,
    work: Workload,
    *,
    version: str = "",
    tree: TreeConfig | None = None,
    batch: int = 8,
    on_request: Callable[[], None] = lambda: None,
) -> Decoded:
    """Decode a workload with a fresh engine and keep everything that it reports.

    Args:
        drafter: None decodes plainly; the engine allocates its KV anew.
        version: name of the drafter's weights in the engine's statistics.
        batch: requests that run together.
        on_request: called when a request has finished.
    Raises: PacelineError when a request ends in an error.
    """
    recorder, traces = RoundRecorder(), _Traces(on_request)
    slots = DrafterSlots() if drafter is None else DrafterSlots(drafter, version)
    config = EngineConfig(
        max_running=batch, max_waiting=max(256, len(work.prompts)), tree=tree or TreeConfig(), prefix_caching=False
    )
    engine = Engine(target, slots, config, feedback=recorder, traces=traces)
    if config.tree.policy in ("adaptive", "bastion") and drafter is not None:
        engine.warm_up()
    group = Group.PLAIN if drafter is None else Group.ADAPTIVE
    run_group(engine, work.prompts, work.params, group=group, bucket=work.bucket, tag=work.name)
    ids = [work.request_id(i) for i in range(len(work.prompts))]
    rounds = recorder.take(ids, [p.max_tokens for p in work.params])
    return Decoded(traces=[traces.kept[i] for i in ids], rounds=list(map(_summarise, rounds)))
