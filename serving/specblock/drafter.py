"""SpecBlock drafting: one packed refresh + block-1 forward and one packed block-2 forward per round.

Shape legend: B requests, R new rows, L longest context, K draft slots, T = rows * K drafter tokens, F leaves, H drafter
hidden size, Hq/Hkv query/KV heads, G = Hq / Hkv, Dh head dim, C KV width of a slot (2 * Hkv * Dh: keys, then values).
Drafter KV of pool row r is the K slots of the row at that position; block 1 is causal over the flattened slots, so a
query (row j, slot k) sees flat keys 0 .. j * K + k, and a leaf at slot s of the anchor row j sees 0 .. j * K + s.
Source: SpecBlock (arXiv 2605.07243); aligned refresh: the a + 1 rows that a round committed, at their own positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from paceline.errors import DrafterMismatchError
from paceline.kernels.dispatch import Kernels
from paceline.serving.drafters.family import DrafterFamily, TargetHandles, check_state, serving_dtype
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.drafters.ops import ScaleCache, choose_head_dtype
from paceline.serving.specblock.attention import SlotAttention
from paceline.serving.specblock.forward import SlotForward
from paceline.serving.specblock.graphs import GraphedSpecBlock, num_spare_rows
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel


class SpecBlockDrafter:
    """A re-entrant block proposer whose KV lives at the target's pool rows. Not thread-safe; owned by the engine."""

    def __init__(
        self,
        model: SpecBlockModel,
        target_embed: torch.Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        head_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        num_candidates: int = 8,
        version: str = "",
        kernels: Kernels | None = None,
    ) -> None:
        """target_embed: (V, E), the target's token embedding. The model's weights are copied into fused tensors.

        head_dtype: of the output head; None = dtype. Everything behind its logits is float32.
        kernels: None = those of the device.
        """
        c = self.config = model.config
        self.version = version
        self.dtype, self.device = dtype, torch.device(device)
        self.head_dtype = head_dtype or dtype
        embed = target_embed.detach()
        if tuple(embed.shape) != (c.vocab_size, c.embed_size):
            raise DrafterMismatchError(
                f"target embedding must be {(c.vocab_size, c.embed_size)}, got {tuple(embed.shape)}"
            )
        count = min(num_candidates, c.rank_topk)
        self.caps = DrafterCaps(
            name=SpecBlockModel.drafter_type,
            num_slots=c.num_slots,
            num_candidates=count,
            max_depth=2 * c.num_slots,
            is_reentrant=True,
            needs_features=True,
            is_row_local=True,
        )
        self._shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        self._pool = torch.empty(c.num_layers, 0, c.num_slots, 2 * c.num_kv_heads * c.head_dim, dtype=dtype)
        self._num_rows = 0  # pool rows that requests may own
        self._angles = torch.empty(0)
        self._attention = SlotAttention(c, dtype, self.device)
        self._forward = SlotForward(
            c, embed, dtype=dtype, head_dtype=self.head_dtype, device=self.device, num_candidates=count, kernels=kernels
        )
        self._p = self._forward.weights
        self._scale_cache = ScaleCache()
        self._round: tuple[DraftInputs, list[torch.Tensor], torch.Tensor] | None = None
        self._graphs: GraphedSpecBlock | None = None
        self._is_graphed = False  # the latest `propose` was replayed
        self.load_state(model.state_dict())

    # ---- weights

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights in place (same storage, so captured graphs stay valid). Live drafter KV becomes stale.

        Raises: DrafterMismatchError on missing, surplus, misshapen or non-finite tensors; nothing is changed then.
        """
        check_state(state, self._shapes)
        self._forward.load(state)
        self._pool.zero_()  # what other weights wrote is stale, and weights that were broken may have left NaN
        self._scale_cache.clear()

    # ---- KV

    def alloc(self, num_pool_rows: int) -> None:
        """Allocate zeroed drafter KV for pool rows 0..num_pool_rows-1."""
        c = self.config
        self._num_rows = num_pool_rows
        shape = (c.num_layers, num_pool_rows, c.num_slots, 2 * c.num_kv_heads * c.head_dim)
        self._pool = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._round = self._graphs = None

    def make_graphs(
        self, kernels: Kernels, *, max_requests: int, max_leaves: int, max_context: int
    ) -> GraphedSpecBlock:
        """Static tensors for drafting by graphs, which the caller has captured; before the first request, after `alloc`.

        The pool is allocated anew, with spare rows for padding. max_leaves: of one request.
        """
        num_rows = self._num_rows
        self._pool = self._pool.new_empty(0)  # the old one goes before the new one comes
        self.alloc(num_rows + num_spare_rows(max_requests, self.caps.max_depth))
        self._num_rows = num_rows
        self._graphs = GraphedSpecBlock(
            self._forward,
            self._pool,
            kernels,
            first_spare=num_rows,
            max_requests=max_requests,
            max_leaves=max_leaves,
            max_context=max_context,
            max_depth=self.caps.max_depth,
        )
        return self._graphs

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one pool row over all layers."""
        c = self.config
        return c.num_layers * c.num_slots * 2 * c.num_kv_heads * c.head_dim * self._pool.element_size()

    def release(self, request_id: str) -> None:
        """Nothing is kept per request: the engine's page allocator owns the rows."""

    # ---- the drafter interface

    @torch.no_grad()
    def ingest(self, inputs: DraftInputs) -> None:
        """Write drafter KV for the new rows. Rows before them must have been ingested."""
        self._refresh(inputs, wants_block=False)
        self._round = None

    @torch.no_grad()
    def propose(self, inputs: DraftInputs) -> Proposal:
        """Ingest the new rows and propose block 1 at each anchor. Syncs: none by graph, else small read-backs."""
        if self._graphs is not None:
            proposal = self._graphs.propose(inputs)
            self._is_graphed, self._round = proposal is not None, None
            if proposal is not None:
                return proposal
        x, contexts, cond = self._refresh(inputs, wants_block=True)
        scale = self._scale_cache.get(inputs.temperatures, self._forward.scales)
        self._round = (inputs, contexts, scale)
        return self._forward.heads(x, scale[0], None if self.config.inherits_hidden else cond[inputs.cu_new[1:] - 1])

    @torch.no_grad()
    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Propose block 2 at the leaves; `inputs` must be those of the latest `propose`. Writes no KV."""
        if self._graphs is not None and self._is_graphed:
            return self._graphs.expand(inputs, frontier)
        assert self._round is not None and self._round[0] is inputs, "expand follows propose on the same inputs"
        assert proposal.hidden is not None
        _, contexts, scale = self._round
        c = self.config
        batch, leaves, k = len(inputs.request_ids), frontier.token_ids.numel(), c.num_slots
        # The hidden state is that of the leaf's slot; which token the leaf holds enters by its embedding.
        slots = frontier.slot if batch == 1 else torch.add(frontier.slot, frontier.request, alpha=k)
        x = self._forward.fuse(
            proposal.hidden.view(-1, self.config.hidden_size).index_select(0, slots), frontier.token_ids
        )
        lengths = inputs.context_lens if batch == 1 else inputs.context_lens.index_select(0, frontier.request)
        at = (lengths - 1).expand(leaves) if c.compat_rope else lengths + frontier.slot
        angles = self._angles_at(at, int(contexts[0].shape[1]))
        place = None
        if batch == 1:
            bias = self._attention.leaf_mask(frontier.slot, contexts[0].shape[1])
        else:
            place, bias = self._attention.leaf_layout(inputs, frontier, contexts[0].shape[1])
        for i in range(c.num_layers):
            x, qkv = self._forward.enter(i, x, angles)
            new = qkv[:, c.num_heads * c.head_dim :].view(leaves, k, -1)
            if place is None:
                kv = torch.cat((contexts[i], new[None]), dim=1)
                x = self._forward.finish(i, x, self._attention.attend_one(qkv, kv, bias))
            else:
                width = bias.shape[1] // (k * (c.num_heads // c.num_kv_heads))
                padded = new.new_zeros(batch * width, k, new.shape[-1]).index_copy_(0, place, new)
                kv = torch.cat((contexts[i], padded.view(batch, width, k, -1)), dim=1)
                q = qkv[:, : c.num_heads * c.head_dim].reshape(leaves, -1)
                q = q.new_zeros(batch * width, q.shape[-1]).index_copy_(0, place, q)
                out = self._attention.attend_many(q.view(batch, width * k, -1), kv, bias)
                x = self._forward.finish(i, x, out.view(batch * width, k, -1)[place].flatten(0, 1))
        return self._forward.heads(
            x, scale[1].expand(leaves, -1) if batch == 1 else scale[1].index_select(0, frontier.request)
        )

    # ---- forward pieces

    def _angles_at(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Rotations of the K slots of rows at these positions, (rows * K, 1, Dh / 2): complex64, or cos|sin stacked."""
        c = self.config
        if self._angles.shape[0] < length + c.num_slots + 1:
            self._angles = self._forward.angle_table(max(512, 2 * (length + c.num_slots + 1)))
        return self._angles.index_select(0, rows).flatten(0, 1)

    def _refresh(
        self, inputs: DraftInputs, *, wants_block: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Forward of the new rows; writes their KV. Returns the hidden state (B * K, H) of each request's
        newest row, every layer's context KV (B, L, K, C), and the projected features (R, H) of the new rows; the first
        two mean nothing when `wants_block` is False."""
        c, p, k = self.config, self._p, self.config.num_slots
        assert inputs.new_features is not None
        batch, rows = len(inputs.request_ids), inputs.new_positions.numel()
        ends = inputs.cu_new.tolist()
        lengths = (
            inputs.context_lens.tolist() if wants_block else [int(inputs.new_positions[e - 1]) + 1 for e in ends[1:]]
        )
        longest = max(lengths)
        cond = torch.mm(inputs.new_features.to(self.dtype), p["cond"])
        x = self._forward.fuse(cond, inputs.new_token_ids)  # (R * K, H)
        angles = self._angles_at(inputs.new_positions, longest)
        table = inputs.slot_table[:, :longest]
        first = int(table[0, 0])
        is_run = batch == 1 and torch.equal(table[0], torch.arange(first, first + longest, device=self.device))
        if batch > 1:
            keys = torch.arange(longest, device=self.device) < inputs.context_lens[:, None] if wants_block else None
            table = table if keys is None else table * keys  # entries past a context are undefined
        contexts: list[torch.Tensor] = []
        last_rows = [e - 1 for e in ends[1:]]
        for i in range(c.num_layers):
            x, qkv = self._forward.enter(i, x, angles)
            self._pool[i].index_copy_(0, inputs.new_slots, qkv[:, c.num_heads * c.head_dim :].unflatten(0, (rows, k)))
            is_last = i == c.num_layers - 1
            if is_last and not wants_block:
                return x, contexts, cond
            if is_run:
                context = self._pool[i, first : first + longest][None]
            else:
                context = self._pool[i].index_select(0, table.reshape(-1).clamp_(0, self._num_rows - 1))
                context = context.view(batch, longest, k, -1)
            contexts.append(context)
            if is_last and rows > batch:  # only the newest row of each request drafts
                if batch == 1:
                    x, qkv = x[-k:], qkv[-k:]
                else:
                    pick = torch.tensor(last_rows, device=self.device)
                    x = x.unflatten(0, (rows, k)).index_select(0, pick).flatten(0, 1)
                    qkv = qkv.unflatten(0, (rows, k)).index_select(0, pick).flatten(0, 1)
            if batch == 1:
                attended = self._attention.attend_one(
                    qkv, context, self._attention.causal_mask(qkv.shape[0], longest * k)
                )
            else:
                counts = [1] * batch if is_last else [e - s for s, e in itertools.pairwise(ends)]
                attended = self._attention.attend_ragged(qkv, context, counts, lengths)
            x = self._forward.finish(i, x, attended)
        return x, contexts, cond


def make_drafter(
    model: SpecBlockModel,
    target: TargetHandles,
    *,
    dtype: torch.dtype | None = None,
    head_dtype: torch.dtype | None = None,
    num_candidates: int = 8,
    version: str = "",
) -> SpecBlockDrafter:
    """The serving form of a model; a number type that is None is chosen for the target's device."""
    device = torch.device(target.device)
    dtype = dtype or serving_dtype(device)
    return SpecBlockDrafter(
        model,
        target.embed_weight,
        dtype=dtype,
        head_dtype=head_dtype or choose_head_dtype(dtype, device, model.lm_head.weight.numel()),
        device=device,
        num_candidates=num_candidates,
        version=version,
    )


FAMILY = DrafterFamily(
    name=SpecBlockModel.drafter_type,
    read_config=SpecBlockConfig.from_dict,
    make_model=SpecBlockModel,
    make_drafter=make_drafter,
)
