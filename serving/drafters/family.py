"""Drafter family: the settings, the network and the drafter behind a `drafter_type`; what all drafters with weights share.

Shape legend: V target vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch

from paceline.errors import DrafterMismatchError
from paceline.kernels.cpu.memory import pool_zeros
from paceline.kernels.dispatch import Kernels
from paceline.serving.drafters.deltas import RANK_STEP, check_factors
from paceline.serving.drafters.forward import DrafterForward, choose_head_dtype
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.drafters.native import GrowingDecoder
from paceline.serving.drafters.network import DrafterConfig, DrafterModel, TargetHandles, check_state


class NativeForm(Protocol):
    """The compiled form of a family."""

    decoder: GrowingDecoder


class TrainedDrafter(ABC):
    """A drafter with weights, which can be replaced in place; its KV lives at the target's pool rows.

    Not thread-safe; owned by the engine.
    """

    forward_class: ClassVar[type[DrafterForward]]
    config: DrafterConfig
    forward: DrafterForward
    num_deltas = delta_rank = 0
    """Of `hold_deltas`."""
    _native: NativeForm | None
    """None: torch's operators or kernels compute the layers."""

    def __init__(
        self,
        model: DrafterModel,
        target_embed: torch.Tensor,
        target_head: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        head_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        num_candidates: int = 8,
        version: str = "",
        kernels: Kernels | None = None,
    ) -> None:
        """target_embed, target_head: (V, E), the target's token embedding and output head; no head = tied to the embedding.

        The model's weights are copied into fused tensors.
        head_dtype: of the output head; None = dtype. Everything behind its logits is float32.
        kernels: None = those of the device.
        Raises: DrafterMismatchError when the target's tensors have another shape.
        """
        c = self.config = model.config
        self.version, self.dtype, self.device = version, dtype, torch.device(device)
        self.kv_dtype = dtype
        """Of the drafter's own K/V."""
        head = target_embed if target_head is None else target_head
        wanted = (c.vocab_size, getattr(c, "embed_size", c.hidden_size))
        for name, table in (("embedding", target_embed), ("output head", head)):
            if tuple(table.shape) != wanted:
                raise DrafterMismatchError(f"target {name} must be {wanted}, got {tuple(table.shape)}")
        count = min(num_candidates, c.max_candidates)
        self.caps = self._capabilities(count)
        self._shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        self.forward = self.forward_class(
            c, target_embed, head, dtype=dtype, head_dtype=head_dtype or dtype, device=self.device,
            num_candidates=count, kernels=kernels,
        )  # fmt: skip
        self._prepare()
        self.alloc(0)
        self.load_state(model.state_dict())

    @classmethod
    def make(
        cls,
        model: Any,
        target: TargetHandles,
        *,
        dtype: torch.dtype | None = None,
        head_dtype: torch.dtype | None = None,
        num_candidates: int = 8,
        version: str = "",
    ) -> Self:
        """The serving form of a model; a number type that is None is chosen for the target's device."""
        device, c = torch.device(target.device), model.config
        # float32 on the CPU, where drafting cost is operators
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        head_dtype = head_dtype or choose_head_dtype(dtype, device, c.num_draft_ids * c.hidden_size)
        return cls(
            model, target.embed_weight, target.head_weight, dtype=dtype, head_dtype=head_dtype, device=device,
            num_candidates=num_candidates, version=version,
        )  # fmt: skip

    @abstractmethod
    def _capabilities(self, num_candidates: int) -> DrafterCaps: ...

    @abstractmethod
    def _pool_shape(self, num_rows: int) -> tuple[int, ...]:
        """Shape of the KV of so many pool rows."""

    @abstractmethod
    def _prepare(self) -> None:
        """Make what the family keeps besides weights and KV."""

    # ---- weights and KV

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights in place (same storage, so captured graphs stay valid). Live drafter KV becomes stale.

        Raises: DrafterMismatchError on missing, surplus, misshapen or non-finite tensors; nothing is changed then.
        """
        check_state(state, self._shapes, self.config.vocab_size)
        self.forward.load(state)
        self.pool.zero_()  # what other weights wrote is stale, and weights that were broken may have left NaN

    def hold_deltas(self, num_deltas: int, rank: int) -> None:
        """Make room for `num_deltas` versions that are deltas of this drafter's weights, of a rank up to `rank`; once, before
        work is captured. Requests choose theirs by `DraftInputs.deltas`."""
        self.num_deltas, self.delta_rank = num_deltas, -(-rank // RANK_STEP) * RANK_STEP
        self._delta_holder.hold_deltas(num_deltas, self.delta_rank)

    @property
    def _delta_holder(self) -> DrafterForward | GrowingDecoder:
        return self.forward if self._native is None else self._native.decoder

    def check_delta(self, factors: Mapping[str, torch.Tensor]) -> None:
        """Raise DrafterMismatchError when there is no room for these factors, or they do not fit."""
        check_factors(factors, {n: self._shapes[n + ".weight"] for n in self.config.delta_linears}, self.delta_rank)

    @torch.no_grad()
    def load_delta(self, at: int, factors: Mapping[str, torch.Tensor]) -> None:
        """Replace delta number `at` in place; no request drafts with it now.

        Raises: DrafterMismatchError when the factors do not fit; nothing is changed then.
        """
        self.check_delta(factors)
        self._delta_holder.load_delta(at, factors)

    def alloc(self, num_pool_rows: int) -> None:
        """Allocate zeroed drafter KV for pool rows 0..num_pool_rows-1."""
        self.pool = pool_zeros(self._pool_shape(num_pool_rows), self.kv_dtype, self.device)

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one pool row over all layers."""
        return torch.Size(self._pool_shape(1)).numel() * self.kv_dtype.itemsize

    def release(self, request_id: str) -> None:  # noqa: B027 - what most drafters keep is nothing
        """Nothing is kept per request: the engine's page allocator owns the rows."""

    # ---- the drafter interface

    @abstractmethod
    def ingest(self, inputs: DraftInputs) -> None: ...

    @abstractmethod
    def propose(self, inputs: DraftInputs) -> Proposal: ...

    @abstractmethod
    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterFamily:
    """One kind of drafter."""

    name: str
    """`drafter_type` in config.json and in manifests."""
    config: type[DrafterConfig]
    """Reads a config.json mapping by `from_dict`."""
    model: type[DrafterModel]
    """Made from its settings, with random weights."""
    drafter: type[TrainedDrafter]
    """Made from a model by `make`."""
