"""Native EAGLE-3: the layer and the output head at true-feature rows, or at a step's tree rows, in one compiled call.

A step's rows are rows of their requests whose keys are the context and the request's columns of tree rows. Column c of
request i is row B * c + i of the pool's spare rows.
Shape legend: B requests, R new rows, N rows of a step, W of a request at most, D columns of tree rows so far, H drafter
hidden size, Hkv KV heads, Dh head dim, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from paceline.kernels.cpu.library import Condition
from paceline.serving.drafters.interface import DraftInputs
from paceline.serving.drafters.native import GrowingDecoder
from paceline.serving.eagle3.forward import EagleForward
from paceline.serving.eagle3.tree import StepRows

_MAX_KEPT = 32


class NativeTree:
    """Context and tree rows of one drafter; the candidates' scores stay in torch."""

    visible, hidden, mask_dtype = True, False, torch.bool

    def __init__(self, forward: EagleForward, dtype: torch.dtype) -> None:
        """dtype: of the layer's weights and of the pool, float32 or bfloat16."""
        self._forward, self._config, self._dtype = forward, forward.config, dtype
        self._embedding = forward.embed_weight.contiguous()
        self.decoder = GrowingDecoder(forward.config, dtype)
        self._lone_rows: dict[int, StepRows] = {}  # by their number, up to _MAX_KEPT

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights. state: of the model, checked by the caller."""
        c, own = self._config, self.decoder.pack(state)
        layer = own.layer(
            "",
            "qkv_proj.weight",
            norm="hidden_norm",
            embed_norm=own.vector("embed_norm"),
            norms_stream=c.norm_before_residual,
        )
        self.decoder.load(
            layers=[layer],
            head=own.head(self._forward),
            final_norm=own.vector("final_norm"),
            embedding=self._embedding,
            condition=Condition(product=own.product("fc.weight"), feature_size=c.feature_size, dtype=self._dtype),
        )

    def bind(self, pool: torch.Tensor, num_rows: int) -> None:
        """Take the pool (num_rows and spare rows, 2 * Hkv * Dh)."""
        self.pool, self._num_rows, self.num_columns = pool, num_rows, 0
        self._spare = torch.arange(num_rows, pool.shape[0])

    def ingest(self, inputs: DraftInputs) -> None:
        self._write_rows(inputs, tail=0)

    def open(self, inputs: DraftInputs) -> tuple[torch.Tensor, torch.Tensor]:
        self._newest, self._inputs, self.num_columns = inputs.context_lens - 1, inputs, 0
        self.decoder.reach(int(inputs.context_lens.max()) + self._config.max_depth + 1)
        return self._write_rows(inputs, tail=1)

    def rows(self, request: torch.Tensor) -> StepRows:
        batch, count = self._newest.numel(), request.numel()
        if batch == 1 and count in self._lone_rows:
            return self._lone_rows[count]
        requests = request.numpy()
        counts, order = np.bincount(requests, minlength=batch), requests.argsort(kind="stable")
        cu = np.concatenate(([0], counts.cumsum()))
        owner, cells = requests[order], np.arange(count)
        column, place = cells - cu[owner], np.empty_like(order)
        place[order] = cells
        found = map(torch.from_numpy, (owner, column, column[:, None] == np.arange(counts.max()), place, order, cu))
        rows = StepRows(*found)
        if batch == 1:
            rows.place = None
            if count <= _MAX_KEPT:
                self._lone_rows[count] = rows
        return rows

    def step(
        self,
        rows: StepRows,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        depths: torch.Tensor,
        seen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert rows.cu is not None
        inputs, batch, before = self._inputs, self._newest.numel(), self.num_columns
        num_keys = self.num_columns = before + rows.width
        spare = self._spare_rows(batch * num_keys)
        is_alone = batch == 1
        out_rows = spare[before:] if is_alone else spare.index_select(0, (rows.column + before) * batch + rows.owner)
        keys = spare if is_alone else spare.view(num_keys, batch).T.reshape(-1)
        positions = (self._newest if is_alone else self._newest.index_select(0, rows.owner)) + depths
        return self.decoder.reach(0).run_stream(
            hidden,
            positions,
            rows.cu,
            inputs.context_lens,
            inputs.slot_table,
            out_rows,
            self.pool[None],
            token_ids=token_ids,
            deltas=inputs.deltas,
            keys=(torch.arange(0, batch * num_keys + 1, num_keys), keys),
            ancestors=rows.own.new_ones(1, num_keys).expand(hidden.shape[0], -1) if seen is None else seen,
        )

    # ---- pieces

    def _write_rows(self, inputs: DraftInputs, tail: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert inputs.new_features is not None
        return self.decoder.reach(int(inputs.new_positions.max()) + 1).run_stream(
            torch.empty(inputs.new_positions.numel(), self._config.hidden_size),
            inputs.new_positions,
            inputs.cu_new,
            inputs.new_positions.index_select(0, inputs.cu_new[:-1]),
            inputs.slot_table,
            inputs.new_slots,
            self.pool[None],
            token_ids=inputs.new_token_ids,
            features=inputs.new_features,
            deltas=inputs.deltas,
            tail=tail,
            wants_logits=tail != 0,
        )

    def _spare_rows(self, count: int) -> torch.Tensor:
        """The first spare rows; there are more in the pool from now on if it has not so many."""
        if self._spare.numel() < count:
            num_columns = self.num_columns
            with torch.inference_mode(False):  # other threads zero the pool when weights are swapped
                more = self.pool.new_zeros(2 * count - self._spare.numel(), self.pool.shape[1])
                pool = torch.cat((self.pool, more))
            self.bind(pool, self._num_rows)
            self.num_columns = num_columns
        return self._spare[:count]
