"""Export: a drafter version as vLLM, `speculators` and SGLang load it.

The inverse of the import, by the same tables of tensor names, so that what is written reads back as the same numbers.
Matrices and norms are written in bfloat16, in which engines serve. Calibrations of scores are left out: these engines
verify a chain of the best tokens, and no factor on a slot's logits changes which token is best.
Shape legend: V target vocabulary, Vd draft vocabulary, H hidden size, Dm target hidden size.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated as A
from typing import Any

import torch
from safetensors.torch import save

from paceline.adapt.data.blob_io import check_store, service_places
from paceline.adapt.families.target_handle import TargetHandle, load_target_handle
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.contracts import DrafterManifest
from paceline.errors import ConfigError, DrafterMismatchError, ManifestError
from paceline.paths import (
    BUNDLED_DRAFTERS,
    DATA_DIR,
    REGISTRY,
    all_homes,
    open_folder,
    resolve_drafter,
    resolve_model,
    write_atomic,
)
from paceline.records import MODELS, Setting, record
from paceline.serving.drafters.network import DrafterConfig
from paceline.serving.drafters.released_fields import (
    MASK_FILE,
    MASK_ID_TENSOR,
    MASK_TENSOR,
    Layout,
    release_tensors,
    release_vocabulary,
)
from paceline.serving.eagle3.model import EagleConfig
from paceline.serving.eagle3.released import eagle3_layout
from paceline.serving.loading.checkpoint import open_checkpoint
from paceline.serving.loading.families import build_model, read_drafter_files
from paceline.serving.loading.released import wanted_tap_layers
from paceline.serving.parallel_head.model import ParallelHeadConfig
from paceline.serving.parallel_head.released import parallel_head_layout
from paceline.serving.target_model.int8 import fits_version, is_int8_version

FORMATS = ("vllm", "speculators", "sglang")
DTYPE = torch.bfloat16
_EXPORTED = "eagle3, dflash and jetspec"
_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*")


@record()
class ExportDrafterOptions:
    """For EAGLE-3, DFlash and JetSpec: config.json, model.safetensors in bfloat16 and PROVENANCE.md; the folder appears
    whole or not at all. The command that starts the engine with it is printed.

    vllm: what vLLM loads as it is. speculators: the same for the library of that name, which vLLM reads, too. sglang: with
    SGLang's names. What a format has no place for is refused with the reason: SpecBlock and edge corrections everywhere,
    a learned mask vector outside of vLLM, a causal block (JetSpec) outside of vLLM.

    Examples: paceline export-drafter eagle3 --format vllm --out D (a bundled one);
    paceline export-drafter 3f9a01c2b7de --format vllm --target MODEL_DIR --data-dir STATE --out D (a version that a
    service learned; `paceline versions list` has the names).
    """

    version: A[
        str,
        Setting("Version in the registry below --data-dir, a bundled drafter's name, or a folder.", is_argument=True),
    ]
    format: A[str, Setting("vllm | speculators | sglang.", choices=FORMATS)]
    out: A[Path, Setting("New or empty folder.")]
    target: A[str, Setting(f"The target it drafts for: {MODELS}")] = "bundled"
    target_name: A[
        str | None, Setting("The target's name in a speculators config.json, ORG/MODEL; default: its folder's name.")
    ] = None
    data_dir: A[Path, Setting("Data folder of the service (paceline serve --data-dir) that learned VERSION.")] = Path(
        DATA_DIR
    )
    store_url: A[
        str | None, Setting("Object store of that service, where it has one, as s3://BUCKET/PREFIX.")
    ] = None  # fmt: skip

    def __post_init__(self) -> None:
        check_store(self.store_url)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    drafter_type: str
    method: str
    """As engines call it: 'eagle3' or 'dflash'."""
    num_draft_tokens: int
    """Draft tokens of a round that the drafter is made for."""
    tap_layers: tuple[int, ...]
    """Target layers that it reads, 0 = the first."""
    command: str
    """Starts the engine with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A drafter as it lies somewhere."""

    name: str
    config: dict[str, Any]
    state: dict[str, torch.Tensor]
    origin: str
    """Where it comes from, in sentences for PROVENANCE.md."""
    folder: Path | None = None
    """Where its licence may lie."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Around:
    """What an engine's config.json says of the target and the drafter's place at it."""

    path: Path
    name: str
    settings: Any
    """transformers' configuration of the target's text model."""
    tap_layers: tuple[int, ...]
    head_weight: torch.Tensor
    """(V, Dm)."""
    format: str

    def common(self, c: DrafterConfig, rope_scaling: tuple[float, ...] | None) -> dict[str, Any]:
        """Settings that all layouts call the same; rotary ones as transformers 4 and as transformers 5 writes them."""
        rope: dict[str, Any] = {"rope_type": "default"}
        if rope_scaling is not None:
            factor, low, high, context = rope_scaling
            rope = {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": int(context),
            }  # fmt: skip
        return {
            "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim,
            "vocab_size": c.vocab_size, "rms_norm_eps": c.rms_eps, "hidden_act": "silu", "attention_bias": False,
            "mlp_bias": False, "tie_word_embeddings": False, "rope_theta": c.rope_theta,
            "rope_scaling": None if rope_scaling is None else rope, "rope_parameters": {**rope, "rope_theta": c.rope_theta},
            "max_position_embeddings": self.settings.max_position_embeddings,
            "bos_token_id": self.settings.bos_token_id, "eos_token_id": self.settings.eos_token_id,
            "torch_dtype": str(DTYPE).removeprefix("torch."),
        }  # fmt: skip

    @property
    def aux_layers(self) -> list[int]:
        """The tapped layers as vLLM and `speculators` count them: the token embedding is 0, the first layer 1."""
        return [i + 1 for i in self.tap_layers]

    @property
    def mask_token_id(self) -> int:
        """A token in whose place a learned mask vector may stand: drafts that begin at it suffer, so one that ends texts."""
        pad, eos = self.settings.pad_token_id, self.settings.eos_token_id
        eos = eos[0] if isinstance(eos, list) else eos
        return pad if pad is not None else eos if eos is not None else 0

    def speculators(
        self, kind: str, num_draft_tokens: int, layer: dict[str, Any], own: dict[str, Any]
    ) -> dict[str, Any]:
        """A config.json of `speculators`. layer: settings of the drafter's layers. own: of the kind."""
        return {
            "architectures": [{"eagle3": "Eagle3DraftModel", "dflash": "DFlashDraftModel"}[kind]],
            "speculators_model_type": kind, "tie_word_embeddings": False, "torch_dtype": layer["torch_dtype"], **own,
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": kind, "default_proposal_method": "greedy",
                "proposal_methods": [{
                    "proposal_type": "greedy", "speculative_tokens": num_draft_tokens, "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }],
                "verifier": {"name_or_path": self.name, "architectures": self.settings.architectures or []},
            },
        }  # fmt: skip


@dataclass(kw_only=True, slots=True)
class _Release:
    """A drafter in an engine's layout."""

    method: str
    num_draft_tokens: int
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    mask: torch.Tensor | None = None
    """(H,), the learned mask vector."""


def export_drafter(options: ExportDrafterOptions, *, registry: str | None = None) -> Exported:
    """Write the folder of a drafter for another engine.

    registry: where the version is, a folder or a store's URL; None: it is looked for below `data_dir`.

    Raises: DrafterMismatchError when the drafter is not this target's or the format has no place for it; ConfigError and
    ManifestError when there is no such drafter, or `out` cannot be made.
    """
    with open_folder(options.out) as part:
        path = resolve_model(options.target)
        source, target = _find(options, path, registry)
        around = _Around(
            path=path, name=options.target_name or path.name, settings=open_checkpoint(path).config().get_text_config(),
            tap_layers=tuple(target.tap_layers or ()), head_weight=target.head_weight.detach().cpu(), format=options.format,
        )  # fmt: skip
        release = _release(source, around)
        weights = save(release.tensors, metadata={"format": "pt"})
        write_atomic(part / "model.safetensors", weights)
        write_atomic(part / "config.json", json.dumps(release.config, indent=1) + "\n")
        if release.mask is not None:
            file = io.BytesIO()
            torch.save({MASK_ID_TENSOR: around.mask_token_id, "embedding": release.mask.to(DTYPE, copy=True)}, file)
            write_atomic(part / MASK_FILE, file.getvalue())
        text = _provenance(source, target, around, hashlib.sha256(weights).hexdigest())
        write_atomic(part / "PROVENANCE.md", text)
        for file_path in _licences(source.folder):
            shutil.copyfile(file_path, part / file_path.name)
    return Exported(
        drafter_type=source.config["drafter_type"], method=release.method, num_draft_tokens=release.num_draft_tokens,
        tap_layers=around.tap_layers, command=_command(release, around, options.out),
    )  # fmt: skip


# ---- the drafter
def _registered(version: str, places: Sequence[str]) -> tuple[DrafterRegistry, DrafterManifest]:
    """The first registry that has a version. Raises: ManifestError, as the last one says it."""
    for place in places[:-1]:
        with contextlib.suppress(ManifestError):
            registry = DrafterRegistry(place)
            return registry, registry.get_manifest(version)
    registry = DrafterRegistry(places[-1])
    return registry, registry.get_manifest(version)


def _find(options: ExportDrafterOptions, model: Path, place: str | None) -> tuple[_Source, TargetHandle]:
    """The drafter that the options name, and its target; raises as export_drafter."""
    name, folder = options.version, Path(options.version).expanduser()
    if re.fullmatch(r"[0-9a-f]{12}", name) and not folder.is_dir():
        places = [str(home / REGISTRY) for home in all_homes(options.data_dir)] if place is None else [place]
        if place is None and options.store_url is not None:
            places = service_places(options.store_url, REGISTRY) or [options.store_url]
        registry, manifest = _registered(name, places)
        config = {**manifest.config, "drafter_type": manifest.drafter_type, "target_version": manifest.target_version}
        target = _target(model, config)
        _check_target(config, target)
        state = registry.load_state(name)
        return _Source(name=name, config=config, state=state, origin=_lineage(registry, name)), target
    found = resolve_drafter(name, options.target)
    if found is None:
        raise ConfigError(f"version must be a drafter with weights, got {name!r}; export {_EXPORTED}")
    target = _target(model, {"tap_layers": wanted_tap_layers(found)})
    config, state = read_drafter_files(found, target)
    _check_target(config, target)
    is_ours = name in BUNDLED_DRAFTERS or name == "bundled"
    origin = (
        "It comes with Paceline and is under its licence, Apache-2.0." if is_ours else "Its licence is its source's."
    )
    return _Source(name=found.name, config=config, state=state, origin=origin, folder=found), target


def _target(model: Path, config: Mapping[str, Any]) -> TargetHandle:
    dtype = "int8" if is_int8_version(str(config.get("target_version"))) else "auto"
    return load_target_handle(model, tap_layers=config.get("tap_layers"), dtype=dtype)


def _check_target(config: Mapping[str, Any], target: TargetHandle) -> None:
    """Raise DrafterMismatchError unless the drafter reads what this target gives."""
    if not fits_version(config.get("target_version"), target.version):
        raise DrafterMismatchError(
            f"target must be the one that the drafter was trained for, version {config.get('target_version')!r}, got "
            f"{target.version!r}; name it with --target"
        )
    if config.get("feature_size") != target.feature_size:
        raise DrafterMismatchError(
            f"feature_size of the drafter must be {target.feature_size}, as its tapped layers {target.tap_layers} have, got "
            f"{config.get('feature_size')!r}; import it with --taps"
        )


def _lineage(registry: DrafterRegistry, version: str) -> str:
    """What a registry knows of a version and its parents."""
    lines, at = [], version
    while at is not None:
        try:
            m = registry.get_manifest(at)
        except ManifestError:
            lines.append(f"- `{at}`: its manifest is gone")
            break
        learned = f"arm {m.arm}, bucket {m.bucket}, {m.num_train_rows:,} rows" if m.parent else "the first version"
        lines.append(f"- `{m.version}`: {learned}")
        at = m.parent  # type: ignore[assignment]
    return (
        "A version of a service's registry. The licence is that of the first version below; what came after was learnt "
        "from the text of that service's users, so see whether the weights may leave it.\n\n" + "\n".join(lines)
    )


def _licences(folder: Path | None) -> list[Path]:
    return [] if folder is None else sorted({p for pattern in _LICENCES for p in folder.glob(pattern) if p.is_file()})


# ---- its layout
def _release(source: _Source, around: _Around) -> _Release:
    """The drafter in the format's layout. Raises: DrafterMismatchError, with the reason, when there is no place for it."""
    model = build_model(source.config, source.state)
    c, taps = model.config, around.tap_layers
    is_rising = list(taps) == sorted(set(taps))
    rule = "read different target layers, the lowest first: engines hand them over in the order in which they run"
    _require(around, [(is_rising, rule, taps)])
    if isinstance(c, EagleConfig):
        return _eagle3(c, source.state, around)
    if isinstance(c, ParallelHeadConfig):
        return _parallel_head(c, source.state, around)
    raise DrafterMismatchError(
        f"version must be of a kind that {around.format} has a network for, {_EXPORTED}, got {model.drafter_type!r}; train "
        "one with `paceline train-drafter`"
    )


def _require(around: _Around, rules: Sequence[tuple[bool, str, object]]) -> None:
    """Raise DrafterMismatchError at the first rule that does not hold: (holds, 'must ...' and why, value)."""
    for ok, rule, value in rules:
        if not ok:
            raise DrafterMismatchError(f"a drafter for {around.format} must {rule}, got {value!r}")


def _tensors(c: DrafterConfig, layout: Layout, state: Mapping[str, torch.Tensor], rows: torch.Tensor | None) -> dict:
    """All tensors of a release. rows: (Vd, Dm) of an output head that is no weight of the drafter; None = none to write."""
    out = release_tensors(state, layout, DTYPE)
    if rows is not None:
        out["lm_head.weight"] = rows.to(DTYPE, copy=True)
    if c.draft_vocab_size is not None:
        out |= release_vocabulary(state["draft_token_ids"], c.vocab_size)
    return out


def _head_rows(c: DrafterConfig, state: Mapping[str, torch.Tensor], around: _Around) -> torch.Tensor:
    """(Vd, Dm) rows of the target's output head for the draft vocabulary."""
    return around.head_weight if c.draft_vocab_size is None else around.head_weight[state["draft_token_ids"].cpu()]


def _eagle3(c: EagleConfig, state: Mapping[str, torch.Tensor], around: _Around) -> _Release:
    is_sglang, taps = around.format == "sglang", around.tap_layers
    _require(
        around,
        (
            (c.hidden_size == c.embed_size, f"be as wide as the target's embedding, {c.embed_size}, which it shares", c.hidden_size),
            (not is_sglang or len(taps) == 3, "read three target layers, as SGLang's network does (vllm takes more)", taps),
            (
                not is_sglang or not c.norm_before_residual,
                "keep the residual before its norm, as SGLang's network does (vllm takes both)",
                "norm_before_residual",
            ),
        ),
    )  # fmt: skip
    layout, rows = eagle3_layout(c), None
    if c.shares_head:
        layout, rows = {k: v for k, v in layout.items() if k != "lm_head.weight"}, _head_rows(c, state, around)
    tensors = _tensors(c, layout, state, rows)
    own: dict[str, Any] = {
        "draft_vocab_size": c.num_draft_ids, "target_hidden_size": c.embed_size,
        "norm_before_residual": c.norm_before_residual,
    }  # fmt: skip
    layer = {"model_type": "llama", "num_hidden_layers": 1, **around.common(c, c.rope_scaling)}
    layer["num_aux_hidden_states"] = len(taps)  # vLLM takes 3 where this is absent, whatever the list of layers says
    if around.format == "speculators":
        own |= {"norm_before_fc": False, "eagle_aux_hidden_state_layer_ids": around.aux_layers}
        config = around.speculators("eagle3", c.num_steps, layer, own)
    elif is_sglang:  # which adds 1 to these; vLLM would not
        config = {**layer, **own, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps)}}
        tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    else:
        config = {**layer, **own, "eagle_aux_hidden_state_layer_ids": around.aux_layers}
    return _Release(
        method="eagle3", num_draft_tokens=c.num_steps, tensors=tensors,
        config={"architectures": ["LlamaForCausalLMEagle3"], **config},
    )  # fmt: skip


def _parallel_head(c: ParallelHeadConfig, state: Mapping[str, torch.Tensor], around: _Around) -> _Release:
    is_vllm, is_sglang, mask = around.format == "vllm", around.format == "sglang", c.mask_token_id
    _require(
        around,
        (
            (c.edge_rank == 0, "have no edge correction, for which its DFlash has no tensors: train without --edge-rank", f"edge_rank {c.edge_rank}"),
            (not c.is_shifted, "draft with the rows behind the anchor, as DFlash does", "is_shifted"),
            (is_vllm or not c.is_causal, "have a block that sees itself whole, as its DFlash does (vllm takes JetSpec)", "a causal block"),
            (is_vllm or mask is not None, "use a token of the target as mask (vllm takes a learned vector)", "a learned mask vector"),
            (not is_sglang or c.draft_vocab_size is None, "draft the target's whole vocabulary, as SGLang's DFlash does", c.draft_vocab_size),
        ),
    )  # fmt: skip
    rows = None if c.draft_vocab_size is None else _head_rows(c, state, around)
    tensors = _tensors(c, parallel_head_layout(c), state, rows)
    layer = {
        "model_type": "qwen3", "num_hidden_layers": c.num_layers, "layer_types": ["full_attention"] * c.num_layers,
        "use_sliding_window": False, "sliding_window": None, **around.common(c, c.rope_scaling),
    }  # fmt: skip
    mask_id = around.mask_token_id if mask is None else mask
    own: dict[str, Any] = {"block_size": c.num_slots + 1, "draft_vocab_size": c.num_draft_ids}
    if around.format == "speculators":
        own |= {
            "aux_hidden_state_layer_ids": around.aux_layers, "mask_token_id": mask_id, "sample_from_anchor": False,
            "target_hidden_size": c.hidden_size,
        }  # fmt: skip
        config = around.speculators("dflash", c.num_slots, layer, own)
    else:
        head: dict[str, Any] = {"mask_token_id": mask_id, "target_layer_ids": list(around.tap_layers)}
        if is_vllm:
            head |= {"causal": c.is_causal, "causal_head": c.is_causal}
            layer["is_causal"] = c.is_causal
        config = {
            "architectures": ["DFlashDraftModel"], **layer, **own, "dflash_config": head,
            "num_target_layers": around.settings.num_hidden_layers,
        }  # fmt: skip
    vector = state[MASK_TENSOR].detach().cpu() if mask is None else None
    return _Release(method="dflash", num_draft_tokens=c.num_slots, config=config, tensors=tensors, mask=vector)


# ---- its words
def _provenance(source: _Source, target: TargetHandle, around: _Around, sha256: str) -> str:
    """PROVENANCE.md of the export, with the source's own below."""
    own = source.folder / "PROVENANCE.md" if source.folder else None
    beneath = own.read_text(encoding="utf-8") if own and own.is_file() else ""
    return (
        f"# Provenance of the drafter\n\nExported from the drafter `{source.name}` of Paceline "
        f"({source.config['drafter_type']}) in the layout of {around.format}; nothing was trained. {source.origin}\n\n"
        f"Target: `{around.name}`, version `{target.version}`. It reads the outputs of target layers "
        f"{list(around.tap_layers)} (0 = the first). `model.safetensors`: sha256 `{sha256}`, {str(DTYPE).removeprefix('torch.')}; "
        "calibrations of scores are left out.\n" + (f"\n---\n\n{beneath}" if beneath else "")
    )


def _command(release: _Release, around: _Around, out: Path) -> str:
    """The command that starts the engine with the drafter."""
    target, folder = shlex.quote(str(around.path)), shlex.quote(str(out))
    if around.format == "sglang":
        words = f"python -m sglang.launch_server --model-path {target} --speculative-draft-model-path {folder}"
        if release.method == "dflash":
            return f"{words} --speculative-algorithm DFLASH"
        k = release.num_draft_tokens
        return (
            f"{words} --speculative-algorithm EAGLE3 --speculative-num-steps {k} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {k + 1}"
        )
    settings = {"method": release.method, "model": str(out), "num_speculative_tokens": release.num_draft_tokens}
    return f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(settings))}"
