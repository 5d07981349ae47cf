"""Target model: one packed ragged forward over a transformers model, paged KV, a tree mask and feature taps.

Shape legend: B requests, N packed rows (all requests), P prompt rows, W widest tree, L longest context, M rows whose
logits are wanted, V vocab, m tapped layers, Dm hidden size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from paceline.errors import ConfigError
from paceline.kernels.cpu.library import choose_isa
from paceline.kernels.dispatch import Kernels, select_kernels
from paceline.serving.target_model.fused import KV_DTYPE, FusedForward, is_dense, supports_fused
from paceline.serving.target_model.graph_capture import GraphBackend
from paceline.serving.target_model.int8 import served_version
from paceline.serving.target_model.kernel_forward import KernelForward
from paceline.serving.target_model.kv_cache import KVPool
from paceline.serving.target_model.native import NativeDecoder, new_native, supports_native
from paceline.serving.target_model.paged_attention import ATTENTION, PagedPass, register_attention
from paceline.serving.target_model.reordered import reorder_linears, supports_reordered

log = logging.getLogger(__name__)

_MAX_FUSED_ERROR_FP32 = 1e-4
_MAX_FUSED_ERROR_BF16 = 5e-2
"""Two correct bfloat16 forwards differ by their rounding, about 1e-2 after 32 layers."""


@dataclass(kw_only=True, slots=True)
class TargetBatch:
    """Packed rows of one forward, request after request."""

    token_ids: torch.Tensor  # (N,) int64
    positions: torch.Tensor  # (N,) int64, RoPE positions (context length + depth for tree rows)
    cu_rows: torch.Tensor  # (B + 1,) int64
    context_lens: torch.Tensor  # (B,) int64, committed rows visible to every row of the request
    slot_table: torch.Tensor  # (B, L) int64, pool row of each position; entries >= context_len are not read
    out_rows: torch.Tensor  # (N,) int64, pool row that takes each packed row's K/V
    ancestors: torch.Tensor | None = None  # (N, W) bool; None = causal inside the request (prefill)
    logit_rows: torch.Tensor | None = None  # (M,) int64 packed rows; None = all N


@dataclass(kw_only=True, slots=True)
class TargetOutput:
    """What a forward yields."""

    logits: torch.Tensor  # (M, V) float32
    features: torch.Tensor | None  # (N, m * Dm) in the model's dtype; None when the target has no taps


class RankLeader(Protocol):
    """Tells the other tensor-parallel ranks what rank 0 is about to do."""

    def send_pool(self, num_pages: int, page_tokens: int, num_scratch_rows: int) -> None: ...

    def send_forward(self, batch: TargetBatch) -> None: ...

    def send_commit(self, src_rows: torch.Tensor, dst_rows: torch.Tensor) -> None: ...

    def share(self, backend: GraphBackend) -> GraphBackend: ...


def default_tap_layers(num_layers: int) -> tuple[int, ...]:
    """SpecBlock's three taps 1, L/2 - 1, L - 4 (outputs of those layers); they may coincide in shallow targets."""
    return tuple(min(max(i, 0), num_layers - 1) for i in (1, num_layers // 2 - 1, num_layers - 4))


class TargetModel:
    """A transformers causal LM, unmodified, with paged KV and feature taps; not thread-safe."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        tap_layers: tuple[int, ...] | None,
        version: str,
        fast_path: bool | None = None,
        kernels: Kernels | None = None,
        num_ranks: int = 1,
        is_int8: bool = False,
    ) -> None:
        """num_ranks: tensor-parallel ranks that the model is split over; heads below are this rank's.

        is_int8: serve the 8-bit form of the model (int8.py), whose linear weights are freed. Raises: ConfigError.
        """
        register_attention()
        check_decoder(model)
        model.set_attn_implementation(ATTENTION)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.version, self.is_int8 = served_version(version, "int8" if is_int8 else ""), is_int8
        self.num_weights = sum(p.numel() for p in model.parameters())
        config = model.config.get_text_config()
        self.config = config
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        heads: int = config.num_attention_heads
        self.num_ranks = num_ranks
        self.num_heads = heads // num_ranks
        self.num_kv_heads: int = (getattr(config, "num_key_value_heads", None) or heads) // num_ranks
        self.head_dim: int = getattr(config, "head_dim", None) or self.hidden_size // heads
        self.leader: RankLeader | None = None
        """Rank 0's line to the other ranks, which repeat every forward and commit."""
        self.context_tokens = _context_tokens(config)
        _freeze_rope(model, self.context_tokens)
        weight: Any = model.get_input_embeddings().weight
        self.embed_weight: torch.Tensor = weight if num_ranks == 1 else weight.full_tensor()  # (V, Dm)
        self.lm_head: torch.nn.Module = model.get_output_embeddings()
        head: Any = self.lm_head.weight
        self.head_weight: torch.Tensor = head if num_ranks == 1 else head.full_tensor()  # (V, Dm)
        self.device: torch.device = self.embed_weight.device
        self.dtype: torch.dtype = self.embed_weight.dtype
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self.kernels = kernels or select_kernels(self.device)
        decoder = model.get_decoder()
        self.norm: torch.nn.Module = decoder.norm
        taps = default_tap_layers(self.num_layers) if tap_layers is None else tuple(tap_layers)
        if any(not 0 <= t < self.num_layers for t in taps):
            raise ConfigError(f"tap_layers must lie in [0, {self.num_layers}), got {taps}")
        self.tap_layers = taps
        self.feature_size = len(taps) * self.hidden_size
        self._tapped: dict[int, torch.Tensor] = {}
        for tap in set(taps):
            decoder.layers[tap].register_forward_hook(self._make_hook(tap), with_kwargs=True)
        self.kv_dtype = self.dtype
        self._fused: FusedForward | KernelForward | None = None
        self._native: NativeDecoder | None = None
        self.has_reordered_linears = False
        """Whether the modules' linear layers read reordered weights (reordered.py)."""
        if is_int8:
            if fast_path is False:
                raise ConfigError("fast_path must not be False with dtype int8: only the compiled forward serves it")
            self._use_int8()
        elif fast_path is not False and num_ranks == 1:
            self._choose_fast_path(is_required=fast_path is True)
        if not self.is_fast_path:
            self._check_modules()

    @property
    def dtype_name(self) -> str:
        """Number type of the linear weights, such as bfloat16 or int8."""
        return "int8" if self.is_int8 else str(self.dtype).removeprefix("torch.")

    @property
    def is_fast_path(self) -> bool:
        """Whether forwards run in one call or fused instead of through the transformers modules."""
        return self._native is not None or self._fused is not None

    @property
    def forward_name(self) -> str:
        """What computes forwards: native-ISA | kernels | fused | modules-reordered | modules."""
        if self._native is not None:
            return f"native-{self._native.isa}"
        if self._fused is not None:
            return "kernels" if isinstance(self._fused, KernelForward) else "fused"
        return "modules-reordered" if self.has_reordered_linears else "modules"

    @property
    def pads_requests(self) -> bool:
        """Whether attention pads the requests of a round to the widest and the longest one."""
        return self.kernels.is_reference and self._native is None

    @torch.inference_mode()
    def _choose_fast_path(self, *, is_required: bool) -> None:
        """Use the forward with the fewest operators that the family has here, if it reproduces the transformers forward."""
        error, limit = None, _MAX_FUSED_ERROR_FP32 if self.dtype == torch.float32 else _MAX_FUSED_ERROR_BF16
        if self.kernels.is_reference:
            if supports_native(self.model):
                self._native = new_native(self.model, self.tap_layers)
                error = self._paged_error()
                if error > limit:
                    self._native = None
            if self._native is None and supports_fused(self.model):  # it reads the reference's plans
                self._fused = FusedForward(self.model, self.tap_layers, self.kernels)
                self.kv_dtype = KV_DTYPE
                error = self._paged_error()
                if error > limit:
                    self._fused, self.kv_dtype = None, self.dtype
            if not self.is_fast_path and supports_reordered(self.model):
                self._reorder_linears()
        elif is_dense(self.model):
            try:
                self._fused = KernelForward(self.model, self.tap_layers, self.kernels)
                error = self._paged_error()
            except Exception:  # a kernel that this GPU or compiler does not take: the modules need fewer
                log.exception("the forward by kernels could not be run; the modules of transformers compute it")
                error = math.inf
            if error > limit:
                self._fused = None
            if self.device.type == "cuda":  # joined weights leave their parts' memory with torch, which others may need
                torch.cuda.empty_cache()
        if is_required and not self.is_fast_path:
            raise ConfigError(f"fast_path must be None or False for this target, got True (relative error {error})")
        log.info("target forward chosen forward=%s relative_error=%s", self.forward_name, error)

    def _reorder_linears(self) -> None:
        """Reorder the modules' linear weights if that leaves their logits equal."""
        expected = [self._module_logits(count) for count in (1, 9, 32)]
        undo = reorder_linears(self.model, (self.embed_weight, self.head_weight))
        try:
            got = [self._module_logits(count) for count in (1, 9, 32)]
            self.has_reordered_linears = all(map(torch.equal, got, expected))
        except Exception:  # modules that read their weights in a way of their own
            log.exception("reordered linear weights could not be used; the modules keep theirs")
        if not self.has_reordered_linears:
            undo()

    @torch.inference_mode()
    def _use_int8(self) -> None:
        """Use the compiled forward of the 8-bit form. Raises: ConfigError where there is none."""
        if choose_isa() is None:
            raise ConfigError(
                "dtype must not be int8 without the compiled forward (python -m paceline.kernels.cpu.build builds it, "
                "PACELINE_CPU_ISA may turn it off); "
                "choose auto or bfloat16"
            )
        if not (self.kernels.is_reference and self.num_ranks == 1 and supports_native(self.model, is_int8=True)):
            raise ConfigError(
                "dtype must be int8 only for a dense Llama or Qwen3 on the CPU that the compiled forward takes, from float32 or "
                "bfloat16 weights (docs/serve.md, On a CPU); choose auto or bfloat16"
            )
        self._native = new_native(self.model, self.tap_layers, is_int8=True, is_lent=True)
        self.kv_dtype = torch.bfloat16
        error = self._paged_error()
        if error > _MAX_FUSED_ERROR_BF16:
            raise ConfigError(f"dtype must not be int8 for this target, its forward is off by {error:.3g}; choose auto")
        log.info("target forward chosen forward=%s weights=int8 relative_error=%s", self.forward_name, error)

    def _paged_error(self) -> float:
        """Root-mean-square difference of paged and transformers logits over the logits' own, on fixed tokens.

        Half of them are a prompt, the others a path of a tree behind it, whose second row is no ancestor of any.
        """
        ids, expected = self._fixed_tokens(32), self._module_logits(32)
        count, half = ids.numel(), ids.numel() // 2
        rows = torch.arange(count + 1, device=self.device)
        is_path = torch.ones(count + 1 - half, dtype=torch.bool, device=self.device)
        is_path[1] = False
        ancestors = torch.ones(is_path.numel(), is_path.numel(), dtype=torch.bool, device=self.device).tril()
        ancestors[2:, 1] = False
        prompt = (ids[:half], rows[:half], rows[:half], 0, None)
        depths = is_path.cumsum(0) - is_path.int()  # the row that is no ancestor is a sibling of the third
        tree = (
            torch.cat((ids[half : half + 1], ids[:1], ids[half + 1 :])),
            half + depths,
            rows[half:],
            half,
            ancestors,
        )
        pool, got = self.new_kv_pool(1, count + 1, 0), []
        for token_ids, positions, out_rows, num_context, mask in (prompt, tree):
            batch = TargetBatch(
                token_ids=token_ids,
                positions=positions.clamp_max(count - 1),
                cu_rows=torch.tensor([0, token_ids.numel()], device=self.device),
                context_lens=torch.tensor([num_context], device=self.device),
                slot_table=rows[None, :half],
                out_rows=out_rows,
                ancestors=mask,
            )
            got.append(self.forward(batch, pool).logits)
        logits = torch.cat((got[0], got[1][is_path]))
        error = float((logits - expected).norm() / expected.norm().clamp_min(1e-12))
        return error if math.isfinite(error) else math.inf

    @torch.inference_mode()
    def _check_modules(self) -> None:
        """Refuse a family whose modules do something else with paged K/V than without."""
        try:
            error = self._paged_error()
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as e:
            raise unservable(self.config.model_type, f"it cannot attend to paged K/V ({first_line(e)})") from e
        if error > (_MAX_FUSED_ERROR_FP32 if self.dtype == torch.float32 else _MAX_FUSED_ERROR_BF16):
            raise unservable(self.config.model_type, f"with paged K/V its logits are off by {error:.3g}")

    def _fixed_tokens(self, count: int) -> torch.Tensor:
        return (torch.arange(min(count, self.context_tokens), device=self.device) * 7919 + 13) % self.vocab_size

    def _module_logits(self, count: int) -> torch.Tensor:
        """(count, V) float32 logits of the transformers modules on fixed tokens."""
        return self.model(input_ids=self._fixed_tokens(count)[None], use_cache=False).logits[0].float()

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        tap_layers: tuple[int, ...] | None = None,
        version: str | None = None,
        fast_path: bool | None = None,
        kernels: Kernels | None = None,
        is_int8: bool = False,
    ) -> TargetModel:
        """Wrap a model that is in memory.

        Args:
            version: None = a hash of the config and the weights.
            kernels: None = select_kernels of the model's device.
            is_int8: serve its 8-bit form; the model's linear weights are freed.
        """
        return cls(
            model, tokenizer, tap_layers=tap_layers, version=version or _model_version(model), fast_path=fast_path,
            kernels=kernels, is_int8=is_int8,
        )  # fmt: skip

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one pool row over all layers, K and V."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def feature_row_bytes(self) -> int:
        """Bytes of one row of tapped hidden states."""
        return self.feature_size * self.dtype.itemsize

    def new_kv_pool(
        self, num_pages: int, page_tokens: int, num_scratch_rows: int, *, keeps_features: bool = False
    ) -> KVPool:
        """Allocate a pool of this model's shape; rank 0 of several keeps the tapped hidden states of every row on demand."""
        if self.leader is not None:
            self.leader.send_pool(num_pages, page_tokens, num_scratch_rows)
        return KVPool(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_pages=num_pages,
            page_tokens=page_tokens,
            num_scratch_rows=num_scratch_rows,
            dtype=self.kv_dtype,
            device=self.device,
            feature_size=self.feature_size if keeps_features else 0,
            feature_dtype=self.dtype,
            kernels=self.kernels,
            on_commit=self.leader.send_commit if self.leader is not None else None,
        )

    def forward(self, batch: TargetBatch, kv: KVPool) -> TargetOutput:
        """Run the packed rows, write their K/V to `out_rows`, return logits and tapped features.

        Every row sees its request's committed rows and, of the request's own rows, its ancestors (or all earlier rows).
        """
        if self.leader is not None:
            self.leader.send_forward(batch)
        if self._native is not None:
            logits, features = self._native.run(
                batch.token_ids, batch.positions, batch.cu_rows, batch.context_lens, batch.slot_table, batch.out_rows,
                batch.ancestors, batch.logit_rows, kv.data,
            )  # fmt: skip
            return TargetOutput(logits=logits, features=features)
        return self._forward_by_torch(batch, kv)

    @torch.inference_mode()
    def _forward_by_torch(self, batch: TargetBatch, kv: KVPool) -> TargetOutput:
        plan = self.kernels.plan_attention(
            cu_rows=batch.cu_rows,
            context_lens=batch.context_lens,
            slot_table=batch.slot_table,
            out_rows=batch.out_rows,
            ancestors=batch.ancestors,
            num_groups=self.num_heads // self.num_kv_heads,
            dtype=self.kv_dtype,
        )
        if self._fused is not None:
            logits, features = self._fused.run(
                batch.token_ids, batch.positions, batch.out_rows, batch.logit_rows, plan, kv
            )
            return TargetOutput(logits=logits, features=features)
        state = PagedPass(kv=kv, plan=plan, out_rows=batch.out_rows, kernels=self.kernels)
        try:
            out = self.model(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                # A 4-D mask makes transformers build none; the attention function reads the plan instead.
                attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self.device),
                use_cache=False,
                logits_to_keep=0 if batch.logit_rows is None else batch.logit_rows,
                paceline_pass=state,
            )
            features = torch.cat([self._tapped[t] for t in self.tap_layers], -1) if self.tap_layers else None
        finally:
            self._tapped.clear()
        return TargetOutput(logits=out.logits[0].float(), features=features)

    def _make_hook(self, tap: int) -> Any:
        def hook(_module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if kwargs.get("paceline_pass") is not None:
                hidden = output[0] if isinstance(output, tuple) else output
                self._tapped[tap] = hidden[0]

        return hook


def _model_version(model: Any) -> str:
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def check_decoder(model: Any) -> None:
    """Refuse a model whose parts do not lie where a target's are looked for. Raises: ConfigError."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    lacking = [name for name in ("layers", "norm") if not hasattr(decoder, name)]
    if model.get_output_embeddings() is None:
        lacking.append("output head")
    if lacking:
        raise unservable(model.config.model_type, f"{type(decoder).__name__} has no {' and no '.join(lacking)}")


def unservable(family: str, why: str) -> ConfigError:
    """The refusal of a family of models."""
    return ConfigError(
        f"model must be of a family that can be served (Llama, Qwen2 and Qwen3, Mistral, Mixtral, Phi-3, Gemma 3, Granite, "
        f"OLMo 2 and others built like them), got {family}: {why}; choose another model"
    )


def first_line(error: BaseException) -> str:
    """What went wrong, for a sentence: libraries explain themselves over pages."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    last = next((i for i, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)  # it goes on in the next
    return " ".join(lines[: last + 1])[:300]


def _context_tokens(config: Any) -> int:
    """Longest context that full attention reproduces: a sliding window must never cut."""
    limit = int(config.max_position_embeddings)
    layer_types = getattr(config, "layer_types", None) or ()
    window = getattr(config, "sliding_window", None)
    is_sliding = "sliding_attention" in layer_types or (not layer_types and getattr(config, "use_sliding_window", True))
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(f"the target must use softmax attention in every layer, got {', '.join(sorted(unknown))}")
    return min(limit, int(window)) if window and is_sliding else limit


@torch.no_grad()
def _freeze_rope(model: Any, context_tokens: int) -> None:
    """Keep the RoPE frequencies of the whole context from the first token on.

    transformers' `dynamic` and `longrope` choose them anew in every forward, by the largest position of all packed rows: what
    a request writes would depend on its neighbours, on the cut of its prompt and on its drafts.
    """
    for rope in model.modules():
        kinds = getattr(rope, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        if not any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in by_layer.values()):
            continue
        device = model.get_input_embeddings().weight.device
        last = torch.tensor([[context_tokens - 1]], device=device)
        for layer_type in by_layer:
            rope(torch.zeros(1, device=device), last, **({} if layer_type is None else {"layer_type": layer_type}))
        rope.rope_type = dict.fromkeys(kinds, "static") if isinstance(kinds, dict) else "static"


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    found: set[int] = set()
    for source in (generation, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update(ids if isinstance(ids, list | tuple) else [ids])
    return frozenset(int(i) for i in found)


def forward_together(
    target: TargetModel, kv: KVPool, trees: TargetBatch, prompts: TargetBatch
) -> tuple[TargetOutput, TargetOutput]:
    """Run the rows of both batches in one forward; returns what each would have got from a forward of its own.

    One forward reads the weights once. It pays where the attention kernel takes ragged rows as they are (kernels that can
    be captured). The CPU reference pads every request to the one with most rows: with a chunk of 64 rows beside 16 requests
    of 5 rows it needs twice the time of two forwards, with 64 requests three times; there prompts keep their own forward.

    Args:
        trees: ancestors given, logits of all rows wanted.
        prompts: causal (no ancestors), logit_rows given.
    """
    num_rows = trees.token_ids.numel()
    out = target.forward(join_batches(trees, prompts), kv)
    features = out.features
    return (
        TargetOutput(logits=out.logits[:num_rows], features=None if features is None else features[:num_rows]),
        # A copy: what requests keep of it would keep the rows of the whole round alive.
        TargetOutput(logits=out.logits[num_rows:], features=None if features is None else features[num_rows:].clone()),
    )


def join_batches(trees: TargetBatch, prompts: TargetBatch) -> TargetBatch:
    """One batch of (N + P) rows, trees first; a prompt row's ancestors are the earlier rows of its request."""
    assert trees.ancestors is not None and prompts.ancestors is None
    assert trees.logit_rows is None and prompts.logit_rows is not None
    num_rows, device = trees.token_ids.numel(), trees.token_ids.device
    counts = prompts.cu_rows.diff()
    local = torch.arange(prompts.token_ids.numel(), device=device) - prompts.cu_rows[:-1].repeat_interleave(counts)
    width = max(trees.ancestors.shape[1], int(counts.max()))
    causal = torch.arange(width, device=device) <= local[:, None]  # (P, W) bool
    length = max(trees.slot_table.shape[1], prompts.slot_table.shape[1])
    tables = [pad(b.slot_table, (0, length - b.slot_table.shape[1])) for b in (trees, prompts)]
    return TargetBatch(
        token_ids=torch.cat((trees.token_ids, prompts.token_ids)),
        positions=torch.cat((trees.positions, prompts.positions)),
        cu_rows=torch.cat((trees.cu_rows, prompts.cu_rows[1:] + num_rows)),
        context_lens=torch.cat((trees.context_lens, prompts.context_lens)),
        slot_table=torch.cat(tables),
        out_rows=torch.cat((trees.out_rows, prompts.out_rows)),
        ancestors=torch.cat((pad(trees.ancestors, (0, width - trees.ancestors.shape[1])), causal)),
        logit_rows=torch.cat((torch.arange(num_rows, device=device), prompts.logit_rows + num_rows)),
    )
