"""Files of a released drafter: config.json and safetensors, in one file or in shards.

Weights are read from safetensors only: other weight files can run code when they are opened. The one vector of
`mask_embedding.pt`, for which there is no other form, is read by torch's loader of plain tensors. Tensor names are
brought to one form, so that what follows knows one name for each tensor. All layouts share settings, reduced vocabularies and checks: a setting or tensor that our
networks cannot express is refused by the name of its feature, never dropped.
Shape legend: V target vocabulary, Vd draft vocabulary, Dm target hidden size.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.network import DrafterConfig, TargetHandles

_CONFIG, _SINGLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
MASK_FILE = "mask_embedding.pt"
"""A parallel head's learned mask vector, beside its weights: the file that vLLM looks for."""
MASK_TENSOR, MASK_ID_TENSOR = "mask_embedding", "mask_token_id"
"""What of it stands among the tensors of a release: the vector (H,), and the token that it replaces where that is told."""
_MAX_MASK_BYTES = 1 << 20
"""Far above the largest vector, 64 Ki doubles; what is longer is something else."""
_RENAMED = (("model.", ""), ("midlayer.", "layers.0."))
"""Prefixes of tensor names and what stands for them here; applied in this order."""


def read_released_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a folder. Raises: DrafterMismatchError when it is not a readable JSON object."""
    path = Path(folder) / _CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise DrafterMismatchError(f"drafter folder {folder} must hold a readable {_CONFIG}: {e}") from e
    if not isinstance(values, dict):
        raise DrafterMismatchError(f"{_CONFIG} of a drafter must be a JSON object, got {type(values).__name__}")
    return values


def read_released_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of model.safetensors or of its shards, on the CPU, by their name without `model.` before it; the one
    layer of EAGLE-3 is `layers.0` whatever its release calls it, and rotary tables, which hold nothing, are left out.

    Raises: DrafterMismatchError when the weights are absent, unreadable or not safetensors.
    """
    found: dict[str, torch.Tensor] = {}
    for path in _weight_files(Path(folder)):
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as e:
            raise DrafterMismatchError(f"{path.name} must be a readable safetensors file: {e}") from e
        for name, tensor in tensors.items():
            if name.endswith("rotary_emb.inv_freq"):
                continue
            for prefix, instead in _RENAMED:
                if name.startswith(prefix):
                    name = instead + name.removeprefix(prefix)
            if name in found:
                raise DrafterMismatchError(f"weights must hold every tensor once, {name} appears twice in {folder}")
            found[name] = tensor
    return found | _read_mask(Path(folder))


def _read_mask(folder: Path) -> dict[str, torch.Tensor]:
    """The learned mask vector of a release, if it has one. Raises: DrafterMismatchError when it is unreadable."""
    path = folder / MASK_FILE
    if not path.is_file():
        return {}
    try:
        size = path.stat().st_size
        if size > _MAX_MASK_BYTES:
            raise ValueError(f"{size} bytes are more than one vector has")
        held = torch.load(path, map_location="cpu", weights_only=True)
        vector, token_id = (held["embedding"], held.get(MASK_ID_TENSOR)) if isinstance(held, dict) else (held, None)
        found = {MASK_TENSOR: torch.as_tensor(vector).reshape(-1)}
        return found if token_id is None else found | {MASK_ID_TENSOR: torch.tensor(int(token_id))}
    except Exception as e:  # a file from elsewhere may make the loader raise anything
        raise DrafterMismatchError(
            f"{MASK_FILE} must hold the embedding of the mask and nothing that runs code: {e!s:.200}; fetch the file again"
        ) from e


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        try:
            shards = sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise DrafterMismatchError(f"{_INDEX} must map tensor names to files under 'weight_map': {e!r}") from e
        bad = [s for s in shards if not isinstance(s, str) or Path(s).name != s or not (folder / s).is_file()]
        if bad:
            raise DrafterMismatchError(f"every shard of {_INDEX} must lie in the folder, missing {bad}; fetch it again")
        return [folder / s for s in shards]
    pickled = (
        sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLED and p.name != MASK_FILE)
        if folder.is_dir()
        else []
    )
    if pickled:
        raise DrafterMismatchError(
            f"drafter weights must be safetensors, got {', '.join(pickled)}, which can run code when opened; if you trust "
            "the file, convert it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        )
    raise DrafterMismatchError(f"drafter folder {folder} must hold {_SINGLE} or {_INDEX} with its shards")


Parts = tuple[tuple[str, tuple[int, ...]], ...]
"""Released tensors of one input, and their shapes, that are stacked by rows to one of ours."""
Layout = dict[str, Parts]
"""Tensor of ours -> what it is made of."""
H = TypeVar("H", bound=DrafterConfig)

_FEATURES = (  # part of a surplus tensor's name -> what it means
    ("scale", "quantised weights"),
    ("zero_point", "quantised weights"),
    ("experts", "a mixture of experts"),
    ("bias", "biases in projections"),
    ("fc_norm", "norms before the fusion of features"),
    ("input_norm", "norms before the fusion of features"),
    ("q_norm", "norms of queries and keys"),
    ("k_norm", "norms of queries and keys"),
    ("hidden_dim_adapter", "an adapter between hidden sizes"),
    ("markov_head", "a previous-token head"),
    ("confidence_head", "a confidence head"),
    ("prefix_gru", "a recurrent prefix head"),
    ("lm_head", "an output head of its own"),
    ("mask_", "a learned mask vector"),
    ("layers.", "more layers than config.json says"),
)


@dataclass(frozen=True, slots=True)
class ReleasedSettings:
    """The config.json of a released drafter."""

    values: Mapping[str, Any]

    def section(self, name: str) -> Mapping[str, Any]:
        """Settings that stand under a name, none where it is absent. Raises: DrafterMismatchError when it holds something else."""
        value = self.values.get(name) or {}
        if not isinstance(value, Mapping):
            raise DrafterMismatchError(f"{name} in config.json must be an object, got {value!r}")
        return value

    def layers(self, name: str) -> tuple[int, ...]:
        """Numbers of layers, none where they are absent. Raises: DrafterMismatchError when they are something else."""
        value = self.values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(i, int) for i in value):
            raise DrafterMismatchError(f"{name} in config.json must be a list of whole numbers, got {value!r}")
        return tuple(value)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number. Raises: DrafterMismatchError when it is absent without a default, or is none."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DrafterMismatchError(f"{name} in config.json must be a whole number >= 1, got {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise DrafterMismatchError(f"{name} in config.json must be a number > 0, got {value!r}")
        return float(value)

    def refuse_unless(self, name: str, allowed: Collection[Any], feature: str) -> None:
        """Raise DrafterMismatchError, naming the feature, unless a setting is absent or one of `allowed`."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise DrafterMismatchError(
                f"{name} = {value!r} in config.json means {feature}, which Paceline cannot serve"
            )

    def refuse_common(self) -> None:
        """Refuse what no family of ours has."""
        for name in ("hidden_act", "hidden_activation"):
            self.refuse_unless(name, ("silu", "swish"), "another activation than SwiGLU's")
        self.refuse_unless("attention_bias", (False,), "biases in attention projections")
        self.refuse_unless("mlp_bias", (False,), "biases in the MLP")
        self.refuse_unless("quantization_config", (), "quantised weights")
        for rope in (self, ReleasedSettings(self.section("rope_parameters"))):
            rope.refuse_unless("partial_rotary_factor", (1, 1.0), "rotary angles on a part of a head")
        kinds = sorted(set(self.values.get("layer_types") or ()) - {"full_attention"})
        if kinds:
            raise DrafterMismatchError(
                f"layer_types {kinds} in config.json mean layers with a sliding window, which Paceline cannot serve"
            )
        if self.values.get("sliding_window") and self.values.get(
            "use_sliding_window", not self.values.get("layer_types")
        ):
            self.refuse_unless("sliding_window", (), "layers with a sliding window")

    def common(self, hidden_size: int, rms_eps: float) -> dict[str, Any]:
        """Fields of a DrafterConfig that all releases call the same. rms_eps: where none is written."""
        heads = self.integer("num_attention_heads")
        return {
            "hidden_size": hidden_size,
            "intermediate_size": self.integer("intermediate_size"),
            "num_heads": heads,
            "num_kv_heads": self.integer("num_key_value_heads", heads),
            "head_dim": self.integer("head_dim", hidden_size // heads),
            "rms_eps": self.number("rms_norm_eps", rms_eps),
            "rope_theta": self.rope_theta(),
        }

    def rope_theta(self) -> float:
        """Base of the rotary angles, 10000 where none is written."""
        current = self.section("rope_parameters")
        return ReleasedSettings({**self.values, **current}).number("rope_theta", 10_000.0)

    def rope_scaling(self, *, can_scale: bool = True) -> tuple[float, ...] | None:
        """What rope_cos_sin takes: Llama-3.1's scaling, or None. Raises: DrafterMismatchError on every other scaling."""
        for name in ("rope_parameters", "rope_scaling"):
            source = self.section(name)
            if any(isinstance(value, Mapping) for value in source.values()):
                raise DrafterMismatchError(
                    f"{name} in config.json means rotary angles by the kind of layer, which Paceline cannot serve"
                )
            kind = source.get("rope_type") or source.get("type") or "default"
            if kind == "llama3" and can_scale:
                numbers = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
                if any(n not in source for n in numbers):
                    raise DrafterMismatchError(f"{name} of type 'llama3' in config.json must hold {', '.join(numbers)}")
                return tuple(ReleasedSettings(source).number(n, 0.0) for n in numbers)
            if kind != "default":
                raise DrafterMismatchError(
                    f"{name} of type {kind!r} in config.json means scaled rotary angles, which Paceline cannot serve here"
                )
        return None

    def check_vocabulary(self, target: TargetHandles, name: str = "vocab_size") -> int:
        """Size of the target's vocabulary, which the release must have been made for."""
        size = self.integer(name)
        if size != target.vocab_size:
            raise DrafterMismatchError(
                f"drafter was released for a target with vocabulary {size}, this target has {target.vocab_size}; load it "
                "with the target it was trained for"
            )
        return size


def fit_hidden_size(size: int, target: TargetHandles, what: str) -> int:
    """Check a size that must be the target's hidden size, and return it. Raises: DrafterMismatchError."""
    hidden = int(target.embed_weight.shape[1])
    if size != hidden:
        raise DrafterMismatchError(
            f"{what} must be the target's hidden size {hidden}, got {size}; load the drafter with the target it was trained for"
        )
    return size


def check_tensors(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], optional: Collection[str] = ()
) -> None:
    """Raise DrafterMismatchError unless the tensors are those of `shapes`, `optional` ones aside, and all finite."""
    missing = sorted(set(shapes) - set(tensors) - set(optional))
    surplus = sorted(set(tensors) - set(shapes))
    if surplus:
        feature = next((f for part, f in _FEATURES if any(part in name for name in surplus)), "another architecture")
        raise DrafterMismatchError(
            f"released drafter holds tensors that Paceline has no place for, {_some(surplus)}: {feature} cannot be served"
            + (f" (and it lacks {_some(missing)})" if missing else "")
        )
    if missing:
        raise DrafterMismatchError(f"released drafter must hold {_some(missing)}; the download may be incomplete")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise DrafterMismatchError(f"released tensor {name} must be {shapes[name]}, got {tuple(tensor.shape)}")
        if not tensor.is_floating_point() and name not in optional:
            raise DrafterMismatchError(
                f"released tensor {name} must hold floating-point numbers, got {tensor.dtype}: quantised weights cannot be served"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DrafterMismatchError(f"released tensor {name} must be finite; fetch the file again")


def check_shared(tensors: dict[str, torch.Tensor], name: str, own: torch.Tensor, feature: str) -> None:
    """Remove a copy of one of the target's tensors; refuse one that differs from it by more than its number type."""
    copy = tensors.pop(name, None)
    if copy is None:
        return
    if tuple(copy.shape) != tuple(own.shape) or not torch.equal(copy, own.detach().to(copy.device, copy.dtype)):
        raise DrafterMismatchError(
            f"released tensor {name} differs from the target's: {feature} cannot be served; check that the target is the "
            "one the drafter was trained for"
        )


def draft_token_ids(tensors: Mapping[str, torch.Tensor], num_draft_ids: int, vocab_size: int) -> torch.Tensor | None:
    """Target ids (Vd,) int64 of a reduced vocabulary; None when the draft vocabulary is the target's.

    A release stores `d2t`, what to add to a draft id to get its target id, and mostly `t2d`, which target ids have one.
    Raises: DrafterMismatchError when these contradict each other or leave the vocabulary.
    """
    if "d2t" not in tensors:
        if num_draft_ids != vocab_size:
            raise DrafterMismatchError(
                f"released drafter must hold d2t: its draft vocabulary {num_draft_ids} is not the target's {vocab_size}"
            )
        return None
    if tensors["d2t"].is_floating_point():
        raise DrafterMismatchError(f"d2t must hold whole numbers, got {tensors['d2t'].dtype}")
    ids = tensors["d2t"].long() + torch.arange(num_draft_ids)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or ids.unique().numel() != num_draft_ids:
        raise DrafterMismatchError(f"d2t must lead to different ids in [0, {vocab_size}), offsets from the draft ids")
    if "t2d" in tensors:
        has_id = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        if not torch.equal(tensors["t2d"].bool(), has_id):
            raise DrafterMismatchError("t2d must mark exactly the target ids that d2t leads to")
    return None if torch.equal(ids, torch.arange(vocab_size)) else ids


def take_vocabulary(config: H, tensors: Mapping[str, torch.Tensor], state: dict[str, torch.Tensor]) -> H:
    """Put the reduced vocabulary of a release into a drafter's state; the settings without one where it is the target's."""
    ids = draft_token_ids(tensors, config.num_draft_ids, config.vocab_size)
    if ids is None:
        return dataclasses.replace(config, draft_vocab_size=None)
    state |= {"draft_token_ids": ids, "log_coverage": torch.zeros(())}
    return config


def projections(c: DrafterConfig, prefix: str, names: str = "qkv", width: int | None = None) -> Parts:
    """The released projections of queries, keys and values of a layer. width: of what they read; None = the hidden size."""
    rows = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
    columns = c.hidden_size if width is None else width
    return tuple((f"{prefix}self_attn.{n}_proj.weight", (rows[n] * c.head_dim, columns)) for n in names)


def layer_output(c: DrafterConfig, ours: str, prefix: str) -> Layout:
    """What follows attention in a released Llama layer, as `add_output` names it. ours, prefix: before the names."""
    h, wide = c.hidden_size, c.intermediate_size
    return {
        ours + "o_proj.weight": ((prefix + "self_attn.o_proj.weight", (h, c.num_heads * c.head_dim)),),
        ours + "post_norm": ((prefix + "post_attention_layernorm.weight", (h,)),),
        ours + "gate_up_proj.weight": tuple((f"{prefix}mlp.{n}_proj.weight", (wide, h)) for n in ("gate", "up")),
        ours + "down_proj.weight": ((prefix + "mlp.down_proj.weight", (h, wide)),),
    }


def take_tensors(
    tensors: Mapping[str, torch.Tensor], layout: Layout, vocabulary: tuple[int, int] | None = None
) -> dict[str, torch.Tensor]:
    """Our state in float32, of a release that holds exactly the layout's tensors.

    vocabulary: (Vd, V) where a reduced one may be told. Raises: DrafterMismatchError, as check_tensors.
    """
    shapes = {name: shape for parts in layout.values() for name, shape in parts}
    tables: dict[str, tuple[int, ...]] = {} if vocabulary is None else {"d2t": vocabulary[:1], "t2d": vocabulary[1:]}
    check_tensors(tensors, {**shapes, **tables}, optional=tables)
    return {ours: torch.cat([tensors[name].float() for name, _ in parts]) for ours, parts in layout.items()}


def release_tensors(state: Mapping[str, torch.Tensor], layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The released tensors that `take_tensors` makes this state of, contiguous copies in `dtype`."""
    out: dict[str, torch.Tensor] = {}
    for ours, parts in layout.items():
        rows = state[ours].detach().cpu().split([shape[0] for _, shape in parts])
        out |= {name: part.to(dtype, copy=True) for (name, _), part in zip(parts, rows, strict=True)}
    return out


def release_vocabulary(ids: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    """`d2t` and `t2d` of a reduced vocabulary with target ids (Vd,) int64, as `draft_token_ids` reads them."""
    ids = ids.detach().cpu()
    return {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True),
    }


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
