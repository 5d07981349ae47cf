"""Drafter interface: every drafter is a block proposer (slots x candidates), re-entrant or not.

Shape legend: B requests, R new rows, L longest context, S draft slots per block, K candidates per slot, F frontier
leaves, m tapped layers, Dm target hidden size, Dd drafter hidden size.
Source: the block-proposer abstraction covers SpecBlock (arXiv 2605.07243), JetSpec, DFlash and EAGLE-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterCaps:
    """What a drafter can do; fixed for its life."""

    name: str
    num_slots: int
    """S; 0 means that it never proposes (plain decoding)."""
    num_candidates: int
    """K."""
    max_depth: int
    """Deepest draft token, over all blocks."""
    is_reentrant: bool
    """Whether `expand` may be called on leaves of a proposal."""
    needs_features: bool
    """Whether the engine must hand over tapped target hidden states."""
    is_product: bool = False
    """True: slot s offers the same candidates below every parent (table drafters); False: alternatives branch off the
    slot-0 chain only (BLOCK semantics)."""
    num_blocks: int = 2
    """Blocks of a round, the first included, if it is re-entrant: each continues from leaves of the one before."""
    is_row_local: bool = False
    """True: what ingesting leaves behind is KV at the rows' own slots and follows from the text up to the token behind each
    row, so that rows ingested for one request serve every request that begins with the same text."""


@dataclass(kw_only=True, slots=True)
class DraftInputs:
    """What changed since the drafter was last called, for the B requests of one round that use it.

    Row r of a request pairs the target's feature at position r with the token at position r + 1 (aligned refresh):
    after a round with `a` accepted tokens there are exactly a + 1 new rows. Rows are packed request after request.
    """

    request_ids: list[str]
    context_lens: torch.Tensor  # (B,) int64, committed rows in the target KV; the anchor's position
    anchor_token_ids: torch.Tensor  # (B,) int64, newest committed token, not yet in the target KV
    temperatures: torch.Tensor  # (B,) float32, 0 = greedy
    slot_table: torch.Tensor  # (B, L) int64, KV pool row of each position; entries >= context_len are undefined
    cu_new: torch.Tensor  # (B + 1,) int64, offsets of each request's new rows
    new_positions: torch.Tensor  # (R,) int64
    new_token_ids: torch.Tensor  # (R,) int64, token at position + 1
    new_features: torch.Tensor | None  # (R, m * Dm), None when caps.needs_features is False
    new_slots: torch.Tensor  # (R,) int64, KV pool row of each new row
    histories: list[list[int]]
    """Committed token ids of each request including the anchor (prompt + output); owned by the engine, read only."""
    tenants: list[str] | None = None
    """Of each request, for drafters that remember texts; None = all of nobody ('')."""
    deltas: torch.Tensor | None = None
    """(B,) int64 delta that each request drafts with, -1 = the drafter's own weights; None = all with those."""

    def tenant(self, row: int) -> str:
        """The tenant of one request."""
        return "" if self.tenants is None else self.tenants[row]


@dataclass(kw_only=True, slots=True)
class Proposal:
    """Candidates for S slots below each of F nodes, calibrated, sorted by falling score within a slot."""

    token_ids: torch.Tensor  # (F, S, K) int64, target vocabulary
    logprobs: torch.Tensor  # (F, S, K) float32, <= 0, calibrated; -inf marks an absent candidate
    widths: torch.Tensor | None  # (F, S) int64, candidates to keep per slot (rank head); None = K
    hidden: torch.Tensor | None = None  # (F, S, Dd), for re-entry only
    edge_logprobs: torch.Tensor | None = None
    """(F, S - 1, K, K) float32, product tables only: [f, s, i, j] replaces logprobs[f, s + 1, j] below candidate i of
    slot s, in any order of j. Ranks (calibration, widths) are then those among the candidates of one parent."""

    def check_form(self) -> None:
        """Raise ValueError when the tensors do not fit each other; reads no values, so it waits for no device."""
        ids, logprobs = self.token_ids, self.logprobs
        if ids.dtype not in (torch.int64, torch.int32) or not logprobs.dtype.is_floating_point:
            raise ValueError(
                f"token ids must be integers and log-probabilities floats, got {ids.dtype}, {logprobs.dtype}"
            )
        if ids.dim() != 3 or ids.shape != logprobs.shape:
            raise ValueError(f"token ids and log-probabilities must both be (F, S, K), got {tuple(ids.shape)}, {tuple(logprobs.shape)}")  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Frontier:
    """Leaves of the latest block at which a re-entrant drafter continues."""

    request: torch.Tensor  # (F,) int64, index into the B requests of the inputs
    slot: torch.Tensor
    """(F,) int64, slot of the proposal that the leaf sits in"""
    token_ids: torch.Tensor  # (F,) int64, the leaf's token
    node: torch.Tensor | None = None  # (F,) int64, row of the proposal; None = `request`, as in the first block


class StaticDrafter(Protocol):
    """A drafter's passes as captured work: no host read, no shape that depends on data.

    Padding rows come behind those of the round, hold zeros and go to `padding_slots`; padding requests have no context.
    """

    caps: DrafterCaps
    padding_slots: torch.Tensor
    """(rows of the largest pass,) int64, where each padding row is written; negative = nowhere."""

    def takes(self, num_requests: int, width: int) -> bool:
        """Whether a pass over so many requests and columns of the slot table may be captured."""

    def ingest(self, inputs: DraftInputs) -> None:
        """As `Drafter.ingest`."""

    def propose(self, inputs: DraftInputs) -> Proposal:
        """As `Drafter.propose`."""

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """As `Drafter.expand`, below as many leaves of every request, in the order of requests."""


class Drafter(Protocol):
    """Proposes draft tokens; never sees the randomness with which the target draws.

    Drafter KV lives at the same pool rows as the target's (same page table), so the engine's page allocator owns it.
    """

    caps: DrafterCaps

    def alloc(self, num_pool_rows: int) -> None:
        """Allocate drafter KV for pool rows 0..num_pool_rows-1. Called once before the first use."""

    def ingest(self, inputs: DraftInputs) -> None:
        """Write drafter KV for the new rows without proposing (prefill chunks). Anchor fields are not read."""

    def propose(self, inputs: DraftInputs) -> Proposal:
        """Ingest the new rows and propose the first block at each anchor; F = B."""

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Propose the next block at F leaves of `proposal`; only if caps.is_reentrant. Writes no KV."""

    def release(self, request_id: str) -> None:
        """Forget per-request state."""
