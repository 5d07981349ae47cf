"""Parallel-head graphs: JetSpec's and DFlash's one block a round as captured work.

Shape legend: B requests, S draft slots, K candidates per slot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.serving.drafters.graph_inputs import MAX_GATHERED_BYTES, GraphInputs
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.target_model.graph_capture import CaptureJob, GraphBackend, GraphTable


class StaticHead:
    """The block as captured work. The drafter's weights may change in place; its pool must not move."""

    def __init__(
        self,
        caps: DrafterCaps,
        draft: Callable[[DraftInputs], Proposal],
        padding_slots: torch.Tensor,
        *,
        context_row_bytes: int,
    ) -> None:
        """As GraphedHead."""
        self.caps, self.padding_slots = caps, padding_slots
        self._draft, self._context_row_bytes = draft, context_row_bytes

    def takes(self, num_requests: int, width: int) -> bool:
        """Whether the contexts that it gathers are small enough."""
        return 2 * num_requests * width * self._context_row_bytes <= MAX_GATHERED_BYTES

    def propose(self, inputs: DraftInputs) -> Proposal:
        """The block."""
        return self._draft(inputs)

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Never called."""
        raise NotImplementedError("one block a round is drafted")


class GraphedHead:
    """The graphs of one drafter. Its weights may change in place; its pool must not move."""

    def __init__(
        self,
        inputs: GraphInputs,
        draft: Callable[[DraftInputs], Proposal],
        outputs: Proposal,
        *,
        context_row_bytes: int,
    ) -> None:
        """context_row_bytes: of a row of the drafter's K/V, all layers. draft: ingests and proposes without a host read. outputs: static, of as many requests as there are at most."""
        self._inputs, self._draft, self._outputs = inputs, draft, outputs
        self._graphs = GraphTable(inputs.ladders)
        self._context_row_bytes = context_row_bytes

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def jobs(self, name: str, rank: int = 0) -> list[CaptureJob]:
        """Every graph worth having; those with most rows, which hold all others, come first. rank: added to all ranks."""
        _, requests, widths = self._inputs.ladders
        return [
            CaptureJob(
                name=f"{name} rows={n} requests={b} context={width}", family=name,
                rank=self._inputs.rank(rank + i + k, n, b), run=self._job(n, b, width),
            )
            for i, b in enumerate(requests)
            for k, width in enumerate(widths)
            if 2 * b * width * self._context_row_bytes <= MAX_GATHERED_BYTES
            for n in self._inputs.steps(b)
        ]  # fmt: skip

    def propose(self, inputs: DraftInputs) -> Proposal | None:
        """The block, valid until the next call; None when no graph holds the round.  Syncs: none."""
        num_requests = inputs.context_lens.numel()
        sizes = self._graphs.fit(inputs.new_token_ids.numel(), num_requests, inputs.slot_table.shape[1])
        if sizes is None:
            return None
        self._inputs.load(inputs, sizes)
        self._graphs.replay(sizes)
        out = self._outputs
        edges = None if out.edge_logprobs is None else out.edge_logprobs[:num_requests]
        return Proposal(
            token_ids=out.token_ids[:num_requests], logprobs=out.logprobs[:num_requests], widths=None,
            edge_logprobs=edges,
        )  # fmt: skip

    def _job(self, rows: int, requests: int, width: int) -> Callable[[GraphBackend], None]:
        def capture(backend: GraphBackend) -> None:
            inputs, out = self._inputs.view(rows, requests, width), self._outputs

            def run() -> None:
                found = self._draft(inputs)
                out.token_ids[:requests].copy_(found.token_ids)
                out.logprobs[:requests].copy_(found.logprobs)
                if out.edge_logprobs is not None and found.edge_logprobs is not None:
                    out.edge_logprobs[:requests].copy_(found.edge_logprobs)

            self._graphs.add((rows, requests, width), backend.capture(run))

        return capture


def static_outputs(num_requests: int, num_slots: int, count: int, *, has_edges: bool, device: torch.device) -> Proposal:
    """Tensors for the proposals of so many requests."""
    zeros = torch.zeros(num_requests, num_slots, count, device=device)
    return Proposal(
        token_ids=zeros.long(),
        logprobs=zeros,
        widths=None,
        edge_logprobs=zeros.new_zeros(num_requests, num_slots - 1, count, count) if has_edges else None,
    )
