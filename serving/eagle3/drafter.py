"""EAGLE-3 drafting: true-feature rows of the context, and below them a tree of rows that exist for one round.

Shape legend: B requests, R new rows, L longest context, S draft slots of a call, K candidates, F leaves, W leaves of a
request (grid width), N = B * W grid rows, D columns of tree rows so far, H drafter hidden size, Hq/Hkv query/KV heads,
Dh head dim, C KV width of a row (2 * Hkv * Dh: keys, then values), T drafter tokens, V target vocabulary,
Q = (Hq + 2 * Hkv) * Dh.
The row at position j holds the target's feature at j and the token at j + 1, and its output proposes the token at j + 2.
A drafted token's row holds the drafter's hidden state that proposed it; it sees the context and its own ancestors. Tree
rows live in a buffer of the round and never in the pool, where the accepted tokens' rows are written later with true
features. A call adds S tokens below each node greedily, one forward a token; `expand` re-enters at any candidate.
Source: EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from paceline.serving.drafters.family import DrafterFamily, TrainedDrafter
from paceline.serving.drafters.forward import DrafterForward, Own, leaf_grid
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.drafters.network import rms_norm, rotate_pairs
from paceline.serving.eagle3.model import EagleConfig, EagleModel


class EagleForward(DrafterForward):
    """The fused weights of one drafter and the operations around its attention calls."""

    float32_weights = ("beta", "log_coverage")
    config: EagleConfig

    def _fused(self, own: Own) -> Iterator[tuple[str, torch.Tensor]]:
        c, e = self.config, self.config.embed_size
        qkv = self._paired_heads(own("qkv_proj.weight"))
        embedded = rms_norm(self._embed.to(self.device, torch.float32), own("embed_norm"), c.rms_eps)
        yield "fc", own("fc.weight").T
        yield "token_table", embedded @ qkv[:, :e].T  # (V, Q)
        yield "qkv", (qkv[:, e:] * own("hidden_norm")).T
        yield from self._fused_output(own)
        yield "beta", own("log_beta").exp()
        yield from self._fused_vocab(own, c.draft_vocab_size is not None)
        if c.norm_before_residual:
            yield "hidden_norm", own("hidden_norm")

    def enter(self, hidden: torch.Tensor, token_ids: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rows of hidden states (T, H) and the tokens behind them (T,) -> rotated queries, keys and values (T, Q)."""
        c, w = self.config, self.weights
        qkv = torch.addmm(w["token_table"].index_select(0, token_ids), self.norm(hidden), w["qkv"])
        rotate_pairs(qkv, angles, c.num_heads + c.num_kv_heads, c.head_dim)
        return qkv

    def finish(self, x: torch.Tensor, attended: torch.Tensor, i: int = 0) -> torch.Tensor:
        """Output projection and MLP: x (T, H), attended (T, Hq * Dh) -> the rows' own hidden states (T, H)."""
        if self.config.norm_before_residual:
            x = self.norm(x) * self.weights["hidden_norm"]
        return super().finish(x, attended, i)

    def heads(self, hidden: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Best K target tokens (T, K) int64 and their calibrated log-probabilities, falling. factor: (T, 1)."""
        top, ids = self.in_target_vocab(*self.best(self.norm(hidden), factor, self.num_candidates))
        return ids, top


_SPARE_LEAVES = 8


@dataclass(slots=True)
class _Round:
    """What the calls of one round share."""

    inputs: DraftInputs
    kv: torch.Tensor  # (B, >= L + D, C): context, then tree rows
    length: int  # L
    context_bias: torch.Tensor  # (B, 1, L) additive: -inf beyond the context
    scales: torch.Tensor  # (steps, B)
    num_columns: int = 0  # D
    grids: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def grid(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Request and position of the newest row, (B * W,) int64 each, of every row of a grid of this width."""
        if width not in self.grids:
            newest = self.inputs.context_lens - 1
            owner = torch.arange(newest.numel(), device=newest.device).repeat_interleave(width)
            self.grids[width] = owner, newest.repeat_interleave(width)
        return self.grids[width]

    def columns(self, count: int) -> torch.Tensor:
        """Room for `count` more tree rows of each request, (B, count, C)."""
        start = self.length + self.num_columns
        if start + count > self.kv.shape[1]:
            wider = self.kv.new_empty(self.kv.shape[0], 2 * (start + count), self.kv.shape[2])
            wider[:, :start] = self.kv[:, :start]
            self.kv = wider
        self.num_columns += count
        return self.kv[:, start : start + count]


@dataclass(slots=True)
class _Block:
    """Where the candidates of a proposal can be re-entered."""

    hidden: torch.Tensor  # (F, S, H), the proposal's
    depths: torch.Tensor  # (F,) int64, depth of each node: its slot s proposes depth + s + 1
    seen: torch.Tensor  # (F, S, D) additive bias: tree rows that a child of slot s sees


class EagleDrafter(TrainedDrafter):
    """A re-entrant drafter that drafts level by level or S tokens a call."""

    forward_class = EagleForward
    config: EagleConfig
    forward: EagleForward

    def _capabilities(self, num_candidates: int) -> DrafterCaps:
        c = self.config
        return DrafterCaps(
            name=EagleModel.drafter_type,
            num_slots=c.num_slots,
            num_candidates=num_candidates,
            max_depth=c.num_slots * (c.max_depth // c.num_slots),
            num_blocks=c.max_depth // c.num_slots,
            is_reentrant=c.max_depth >= 2 * c.num_slots,
            needs_features=True,
            is_row_local=True,
        )

    def _pool_shape(self, num_rows: int) -> tuple[int, ...]:
        return num_rows, 2 * self.config.num_kv_heads * self.config.head_dim

    def _prepare(self) -> None:
        self._kv_width = self._pool_shape(0)[1]
        self._alone = torch.zeros(1, 1, dtype=self.dtype, device=self.device)  # the one row of a step sees itself

    def alloc(self, num_pool_rows: int) -> None:
        super().alloc(num_pool_rows)
        self._round: _Round | None = None
        self._blocks: list[_Block] = []  # of the round, each below the one before

    # ---- the drafter interface

    @torch.no_grad()
    def ingest(self, inputs: DraftInputs) -> None:
        """Write drafter KV for the new rows."""
        self._write_rows(inputs, int(inputs.new_positions.max()) + 1)
        self._round, self._blocks = None, []

    @torch.no_grad()
    def propose(self, inputs: DraftInputs) -> Proposal:
        """Ingest the new rows and draft S tokens at each anchor.  Syncs: one."""
        batch = len(inputs.request_ids)
        length = int(inputs.context_lens.max())
        hidden, qkv = self._write_rows(inputs, length)
        if hidden.shape[0] > batch:  # only the newest row of each request drafts
            newest = inputs.cu_new[1:] - 1
            hidden, qkv = hidden.index_select(0, newest), qkv.index_select(0, newest)
        state = self._round = self._open_round(inputs, length)
        hidden = self.forward.finish(hidden, self._attend(qkv, state, None))
        slots = self.forward.heads(hidden, state.scales[0][:, None])
        depths = torch.zeros_like(inputs.context_lens)
        proposal, block = self._unroll(state, hidden, slots, depths, None, self._alone)
        self._blocks = [block]
        return proposal

    @torch.no_grad()
    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Draft S tokens at candidates of a proposal of this round.

        A proposal that was expanded later than this one cannot be expanded any more.  Syncs: one when B > 1.
        """
        state = self._round
        assert state is not None and state.inputs is inputs, "expand follows propose on the same inputs"
        at = next((i for i, block in enumerate(self._blocks) if block.hidden is proposal.hidden), None)
        assert at is not None, "only proposals of this round can be expanded"
        block = self._blocks[at]
        state.num_columns = block.seen.shape[2]
        batch = len(inputs.request_ids)
        node = frontier.request if frontier.node is None else frontier.node
        place, width = _grid(frontier.request, batch)

        def lay(values: torch.Tensor) -> torch.Tensor:  # (F, ...) -> (N, ...), zeros where a request has fewer leaves
            if place is None:
                return values
            return values.new_zeros(batch * width, *values.shape[1:]).index_copy_(0, place, values)

        own = torch.full((width, width), float("-inf"), dtype=self.dtype, device=self.device).fill_diagonal_(0.0)
        depths = lay(block.depths.index_select(0, node) + (frontier.slot + 1))
        seen = lay(block.seen[node, frontier.slot])  # (N, D)
        hidden, slots = self._step(
            state, lay(block.hidden[node, frontier.slot]), lay(frontier.token_ids), depths, seen, own
        )
        result, after = self._unroll(state, hidden, slots, depths, torch.cat((seen, own.repeat(batch, 1)), 1), own)
        if place is not None:
            result.token_ids, result.logprobs = result.token_ids[place], result.logprobs[place]
            after = _Block(after.hidden[place], after.depths[place], after.seen[place])
            result.hidden = after.hidden
        self._blocks = [*self._blocks[: at + 1], after]
        return result

    # ---- pieces

    def _write_rows(self, inputs: DraftInputs, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Fused features (R, H) and projections (R, Q) of the new rows, whose KV is written to the pool."""
        assert inputs.new_features is not None
        self._angles = self.forward.angles(length + self.caps.max_depth + 1)
        hidden = torch.mm(inputs.new_features.to(self.dtype), self.forward.weights["fc"])
        qkv = self.forward.enter(hidden, inputs.new_token_ids, self._angles.index_select(0, inputs.new_positions))
        self.pool.index_copy_(0, inputs.new_slots, qkv[:, -self._kv_width :])
        return hidden, qkv

    def _open_round(self, inputs: DraftInputs, length: int) -> _Round:
        batch, c = len(inputs.request_ids), self.config
        room = length + c.num_slots * (1 + _SPARE_LEAVES)
        kv = torch.empty(batch, room, self._kv_width, dtype=self.dtype, device=self.device)
        table = inputs.slot_table[:, :length]
        bias = torch.zeros(batch, 1, length, dtype=self.dtype, device=self.device)
        if batch > 1:  # entries past a context are undefined
            present = torch.arange(length, device=self.device) < inputs.context_lens[:, None]
            bias.masked_fill_(~present[:, None], float("-inf"))
            table = table * present
        rows = self.pool.index_select(0, table.reshape(-1).clamp(0, self.pool.shape[0] - 1))
        kv[:, :length] = rows.view(batch, length, -1)
        return _Round(inputs, kv, length, bias, self.forward.scales(inputs.temperatures).T)

    def _unroll(
        self,
        state: _Round,
        hidden: torch.Tensor,
        slots: tuple[torch.Tensor, torch.Tensor],
        depths: torch.Tensor,
        seen: torch.Tensor | None,
        own: torch.Tensor,
    ) -> tuple[Proposal, _Block]:
        """Draft on below the first candidates of slot 0 until there are S slots.

        Args:
            hidden: (N, H) that proposed slot 0, with `slots`, its tokens and log-probabilities (N, K).
            depths: (N,) of the nodes that slot 0 hangs below.
            seen: (N, D) tree rows that a child of slot 0 sees; None = there are none.
            own: (W, W) which of the rows that a step adds each row of a request sees.
        """
        num_rows, width, count = hidden.shape[0], own.shape[0], self.config.num_slots - 1
        if count == 0:
            seen = own.new_zeros(num_rows, 0) if seen is None else seen
            block = _Block(hidden[:, None], depths, seen[:, None])
            one = Proposal(token_ids=slots[0][:, None], logprobs=slots[1][:, None], widths=None, hidden=block.hidden)
            return one, block
        first = 0 if seen is None else seen.shape[1]
        bias = torch.zeros(num_rows, count + 1, first + count * width, dtype=self.dtype, device=self.device)
        if seen is not None:
            bias[:, :, :first] = seen[:, None]
        bias[:, :, first:] = own.repeat(num_rows // width, count)[:, None]
        steps = torch.arange(count + 1, device=self.device)
        later = (steps[:-1] >= steps[:, None]).repeat_interleave(width, 1)  # (S, count * W): rows of later steps
        bias[:, :, first:].masked_fill_(later, float("-inf"))
        every_id, every_logprob, every_hidden = [slots[0]], [slots[1]], [hidden]
        for step in range(count):
            visible = None if seen is None else bias[:, step, : first + step * width]
            hidden, slots = self._step(state, hidden, slots[0][:, 0], depths + (step + 1), visible, own)
            every_id.append(slots[0])
            every_logprob.append(slots[1])
            every_hidden.append(hidden)
        block = _Block(torch.stack(every_hidden, 1), depths, bias)
        ids, logprobs = torch.stack(every_id, 1), torch.stack(every_logprob, 1)
        return Proposal(token_ids=ids, logprobs=logprobs, widths=None, hidden=block.hidden), block

    def _step(
        self,
        state: _Round,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        depths: torch.Tensor,
        seen: torch.Tensor | None,
        own: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """One forward of W drafted tokens of each request; writes their tree rows.

        Args:
            hidden: (N, H) that proposed the tokens (N,), which lie at `depths` (N,).
            seen: (N, D) additive bias over the tree rows so far; None = all are seen. own: (W, W) over the new ones.
        Returns: the rows' hidden states and their best candidates.
        """
        batch, width = len(state.inputs.request_ids), own.shape[0]
        owner, newest = state.grid(width)
        qkv = self.forward.enter(hidden, token_ids, self._angles.index_select(0, newest + depths))
        state.columns(width).copy_(qkv[:, -self._kv_width :].view(batch, width, -1))
        tree = None if seen is None else torch.cat((seen.view(batch, width, -1), own.expand(batch, -1, -1)), 2)
        hidden = self.forward.finish(hidden, self._attend(qkv, state, tree))
        steps = depths.clamp(max=self.config.num_steps - 1)
        return hidden, self.forward.heads(hidden, state.scales[steps, owner][:, None])

    def _attend(self, qkv: torch.Tensor, state: _Round, tree_bias: torch.Tensor | None) -> torch.Tensor:
        """Queries (B * W, Q) over context and tree rows -> (B * W, Hq * Dh). tree_bias: (B, W, D); None = all are seen."""
        c, batch = self.config, len(state.inputs.request_ids)
        groups, width, end = c.num_heads // c.num_kv_heads, qkv.shape[0] // batch, state.length + state.num_columns
        q = qkv[:, : c.num_heads * c.head_dim].reshape(batch, width, c.num_kv_heads, groups, c.head_dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(batch, c.num_kv_heads, groups * width, c.head_dim)
        kv = state.kv[:, :end].unflatten(2, (2, c.num_kv_heads, c.head_dim)).permute(2, 0, 3, 1, 4)
        bias: torch.Tensor | None = None
        if tree_bias is not None:
            bias = torch.cat((state.context_bias.expand(-1, width, -1), tree_bias), 2).repeat(1, groups, 1)[:, None]
        elif batch > 1:
            bias = F.pad(state.context_bias, (0, state.num_columns)).expand(-1, groups * width, -1)[:, None]
        out = F.scaled_dot_product_attention(q, kv[0], kv[1], bias, scale=1.0)
        out = out.view(batch, c.num_kv_heads, groups, width, c.head_dim)
        return out.permute(0, 3, 1, 2, 4).reshape(batch * width, -1)


def _grid(request: torch.Tensor, batch: int) -> tuple[torch.Tensor | None, int]:
    """Place of each leaf (F,) in a (B, W) grid, None when they lie there in order already, and W."""
    if batch == 1:
        return None, max(1, request.numel())
    return leaf_grid(request, batch)


FAMILY = DrafterFamily(name=EagleModel.drafter_type, config=EagleConfig, model=EagleModel, drafter=EagleDrafter)
