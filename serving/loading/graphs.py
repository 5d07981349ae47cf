"""Engine graphs: those of the target and of every drafter that an engine can hold.

Both adaptive slots and the hold-back's have graphs. New weights are copied into a slot in place, so they outlive versions.
Drafters draft whole rounds by graph where trees are built on the device, else single proposals.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from paceline.config import EngineConfig
from paceline.serving.drafters.interface import Drafter
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.loading.target_graphs import GraphedTarget
from paceline.serving.target_model.graph_capture import (
    CaptureJob,
    CudaGraphs,
    EagerGraphs,
    GraphBackend,
    Progress,
    capture_all,
)
from paceline.serving.target_model.kv_cache import KVPool
from paceline.serving.target_model.model import TargetModel
from paceline.serving.trees.draft_graphs import DraftGraphs
from paceline.serving.trees.policy import TreePolicy

logger = logging.getLogger(__name__)

_RANK_OF_LATER_SLOTS = 6
"""Graphs of slots without traffic at the start come after the commonest ones of the target and the live drafter."""


def default_backend(target: TargetModel, config: EngineConfig) -> GraphBackend | None:
    """CUDA graphs where the target is on CUDA, its kernels can be captured and the configuration gives time for it."""
    if target.device.type != "cuda" or config.capture_s <= 0:
        return None
    if not target.kernels.is_capturable:
        logger.warning("kernel backend %s cannot be captured; rounds run without graphs", target.kernels.backend)
        return None
    return CudaGraphs(target.device)


class EngineGraphs:
    """The static tensors and graphs of one engine."""

    def __init__(
        self,
        backend: GraphBackend,
        target: TargetModel,
        kv: KVPool,
        slots: DrafterSlots,
        config: EngineConfig,
        max_context: int,
        policy: TreePolicy,
        *,
        num_traced: int = 0,
    ) -> None:
        """Allocate the static tensors. The drafters' KV is allocated anew: no request may have been served yet.

        num_traced: best tokens of a row that traces hold; 0 = there are none.
        """
        self._backend = backend if target.leader is None else target.leader.share(backend)
        self._budget_s = config.capture_s
        self.target = GraphedTarget(
            target, kv, max_requests=config.max_running, max_width=config.tree.max_draft_tokens + 1,
            max_context=max_context, num_traced=num_traced,
            max_prompt_rows=config.prefill_chunk_tokens,
        )  # fmt: skip
        self._jobs: list[CaptureJob] = self.target.jobs()
        self._drafters = []
        self._drafting: list[tuple[Drafter, DraftGraphs]] = []
        limits = {"max_requests": config.max_running, "max_context": max_context}
        for i, (name, drafter) in enumerate(slots.prepare_all().items()):
            form = "make_static" if policy.drafts_by_graph(drafter, target.device) else "make_graphs"
            make = getattr(drafter, form, None)
            if make is None:  # table lookups and scripted drafters have nothing to capture
                continue
            graphs = make(target.kernels, max_leaves=config.tree.max_frontier, **limits)
            if form == "make_static":
                graphs = DraftGraphs(
                    graphs, self.target.staging, self.target.tables, self.target.trees, kv.features, target.kernels,
                    config.tree, vocab_size=target.vocab_size, has_deltas=getattr(drafter, "num_deltas", 0) > 0, **limits,
                )  # fmt: skip
                self._drafting.append((drafter, graphs))
            self._drafters.append(graphs)
            self._jobs += graphs.jobs(f"drafter {name}", rank=_RANK_OF_LATER_SLOTS if i else 0)

    def drafting(self, drafter: Drafter) -> DraftGraphs | None:
        """The graphs by which a drafter drafts whole rounds; None when it has none."""
        return next((graphs for known, graphs in self._drafting if known is drafter), None)

    @property
    def num_graphs(self) -> int:
        return self.target.num_graphs + sum(d.num_graphs for d in self._drafters)

    def capture(
        self,
        timer: Callable[[], float] = time.perf_counter,
        progress: Progress | None = None,
        first: Sequence[CaptureJob] = (),
    ) -> int:
        """Do the jobs `first`, then make graphs, within the configured time; returns how many of both were done."""
        jobs = [*first, *self._jobs]
        self._jobs = []
        return capture_all(jobs, self._backend, budget_s=self._budget_s, timer=timer, progress=progress)


def prepare(
    graphs: EngineGraphs | None,
    first: Sequence[CaptureJob],
    timer: Callable[[], float],
    progress: Progress | None,
) -> None:
    """Do the jobs `first` and make the graphs; an engine without graphs does the jobs however long they take."""
    if graphs is not None:
        graphs.capture(timer, progress, first)
    elif first:
        capture_all(first, EagerGraphs(), budget_s=math.inf, timer=timer, progress=progress)
