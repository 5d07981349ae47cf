"""Shape benchmark: rounds of models of real size against the memory floor, with random weights, because a round's time
does not depend on their values.

A decode round must read every weight once and the KV rows of all running requests. The floor is those bytes over the
copy bandwidth measured in the same process; a round's distance from it is what kernels and host code could still win.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated as A
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from paceline.bench.common.engine_run import set_threads
from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import new_table, progress, say_file
from paceline.bench.engine.arms import EngineArm, make_groups, new_engine, random_prompts, run_alternating, wait
from paceline.bench.engine.cells import PLAIN, SPECULATIVE, split_of_rounds
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.errors import ConfigError
from paceline.paths import resolve_model
from paceline.records import DEVICES, Setting, record, require
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.loading.checkpoint import open_checkpoint
from paceline.serving.target_model.model import TargetModel

NUM_DRAFT_TOKENS = 8
"""Chain that the speculative arm verifies every round; its tokens are rejected: the price of a round, not a speedup."""
_SCALE = 16
_SCALED_LAYERS = 4


def llama_8b() -> PretrainedConfig:
    """The published shape of Llama-3.1-8B."""
    return LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip


def qwen3_8b() -> PretrainedConfig:
    """The published shape of Qwen3-8B."""
    return Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )  # fmt: skip


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {"llama-3.1-8b": llama_8b, "qwen3-8b": qwen3_8b}


@record()
class ShapesOptions:
    """What to measure; see EngineCommand."""

    shapes: A[tuple[str, ...], Setting(choices=tuple(SHAPES), non_empty=True)]
    batches: A[tuple[int, ...], Setting(ge=1, non_empty=True)] = (1, 4, 16, 64)
    prompt_tokens: int = 512
    max_tokens: int = 64
    num_groups: int = 3
    is_scaled_down: bool = False
    """True: width / 16, 4 layers, small vocabulary: exercises the path on a CPU; rows are labelled."""
    is_quick: bool = False
    device: A[str, Setting(choices=DEVICES)] = "auto"
    num_threads: int | None = None
    seed: int = 0
    json: Path | None = None

    def __post_init__(self) -> None:
        has_cuda = torch.cuda.is_available()
        require(
            self.device != "cuda" or has_cuda, "device must be auto or cpu without a GPU that torch can use", "cuda"
        )
        if not self.is_scaled_down and (self.device == "cpu" or not has_cuda):
            raise ConfigError(
                "--shapes needs a GPU: 8B random weights take 16 GB and seconds a round on a CPU; give --scale-down to run "
                "the same path on small layers (its figures say nothing about an 8B model)"
            )


class RejectedDrafter:
    """Confident and hardly ever right: a chain of the token 0 in every round; keeps no state."""

    def __init__(self, num_slots: int) -> None:
        self.caps = DrafterCaps(
            name="rejected", num_slots=num_slots, num_candidates=1, max_depth=num_slots, is_reentrant=False,
            needs_features=False, is_product=False,
        )  # fmt: skip

    def alloc(self, num_pool_rows: int) -> None:
        """Nothing to allocate."""

    def ingest(self, inputs: DraftInputs) -> None:
        """Nothing to do."""

    def propose(self, inputs: DraftInputs) -> Proposal:
        """The chain below each anchor."""
        ids = torch.zeros(len(inputs.request_ids), self.caps.num_slots, 1, dtype=torch.int64)
        return Proposal(token_ids=ids, logprobs=torch.full(ids.shape, -0.05), widths=None)

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Raises: AssertionError; the drafter is not re-entrant."""
        raise AssertionError("a drafter that is not re-entrant must not be asked to expand")

    def release(self, request_id: str) -> None:
        """Nothing to forget."""


def run_shapes(options: ShapesOptions, console: Console) -> dict[str, Any]:
    """Time rounds of every (shape, batch); prints a table, returns (and keeps on disk) the document.

    Raises: ConfigError, PacelineError, torch.OutOfMemoryError where the shape does not fit the device.
    """
    if options.is_quick:
        options = dataclasses.replace(options, batches=options.batches[:2], prompt_tokens=64, max_tokens=16, num_groups=1)  # fmt: skip
    set_threads(options.num_threads)
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    bandwidth = copy_bandwidth(device)
    result = ResultFile(
        options.json, command="bench engine --shapes", options=options,
        extra={"device": device.type, "copy_bytes_per_s": round(bandwidth), "rows": []},
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    with progress(console, "shapes", len(options.shapes) * len(options.batches)) as bar:
        for name in options.shapes:
            bar.name(f"{name}: random weights")
            target = random_target(name, device, is_scaled_down=options.is_scaled_down)
            for batch in options.batches:
                bar.name(f"{name} batch {batch}")
                rows.append(_row(name, target, batch, options, bandwidth))
                result.update(rows=rows)
                bar.step()
            del target
    document = result.close()
    console.print(_table(rows, bandwidth))
    say_file(console, "JSON", options.json)
    return document


def random_target(
    name: str, device: torch.device, *, is_scaled_down: bool, tap_layers: tuple[int, ...] | None = ()
) -> TargetModel:
    """A model of a shape with random weights, bf16 on a GPU; the bundled tokenizer stands in, no text is read.

    tap_layers: layers whose outputs drafters and traces read; None = the usual three.
    """
    config = SHAPES[name]()
    if is_scaled_down:
        config.hidden_size //= _SCALE
        config.intermediate_size //= _SCALE
        config.num_attention_heads //= 4
        config.num_key_value_heads //= 4
        config.head_dim = config.hidden_size // config.num_attention_heads
        config.num_hidden_layers, config.vocab_size = _SCALED_LAYERS, 4096
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:_SCALED_LAYERS]
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, None, None
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:  # weights are drawn where they stay
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tokenizer = open_checkpoint(resolve_model("bundled")).tokenizer()
    return TargetModel.from_model(model.to(device), tokenizer, tap_layers=tap_layers, version=f"random-{name}")


def copy_bandwidth(device: torch.device, num_bytes: int | None = None, repeats: int = 5) -> float:
    """Bytes read and written per second by the best of some copies of a tensor larger than every cache."""
    size = num_bytes or (2**31 if device.type == "cuda" else 2**27)
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    sink = torch.empty_like(source)
    best = float("inf")
    for _ in range(repeats + 1):  # the first one touches the pages
        wait(device)
        began = time.perf_counter()
        sink.copy_(source)
        wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def floor_bytes(target: TargetModel, batch: int, context_tokens: float) -> tuple[int, int]:
    """(weight bytes, KV bytes) that one round must read; of the embedding table only the rows looked up."""
    parameters = sum(p.numel() * p.element_size() for p in target.model.parameters())
    is_tied = target.lm_head.weight is target.embed_weight
    table = 0 if is_tied else target.embed_weight.numel() * target.embed_weight.element_size()
    return parameters - table, int(batch * context_tokens * target.kv_row_bytes)


def _row(name: str, target: TargetModel, batch: int, options: ShapesOptions, bandwidth: float) -> dict[str, Any]:
    context = options.prompt_tokens + options.max_tokens
    tree = TreeConfig(max_draft_tokens=NUM_DRAFT_TOKENS, policy="fixed")
    config = EngineConfig(
        max_running=batch, max_waiting=max(256, batch), prefill_chunk_tokens=2048, prefix_caching=False, tree=tree
    )
    num_tokens = (batch + 1) * (context + NUM_DRAFT_TOKENS + 2 * config.page_tokens)
    drafter = RejectedDrafter(num_slots=NUM_DRAFT_TOKENS)
    arms = [
        EngineArm(PLAIN, new_engine(target, None, version=PLAIN, num_tokens=num_tokens, config=config), Group.PLAIN),
        EngineArm(SPECULATIVE, new_engine(target, drafter, version="rejected", num_tokens=num_tokens, config=config), Group.ADAPTIVE),
    ]  # fmt: skip
    prompts = random_prompts(target, (options.num_groups + 1) * batch, options.prompt_tokens, options.seed)
    groups = make_groups(
        prompts, bucket="random", batch=batch, group_size=batch, temperature=0.0, max_tokens=options.max_tokens,
        seed=options.seed, ignore_eos=True, label=f"{name}-",
    )  # fmt: skip
    timings = run_alternating(arms, groups, num_warmup=1, on_group=lambda: None)
    weights, kv = floor_bytes(target, batch, options.prompt_tokens + options.max_tokens / 2)
    floor_ms = 1e3 * (weights + kv) / bandwidth
    out: dict[str, Any] = {
        "shape": name, "is_scaled_down": options.is_scaled_down, "dtype": str(target.dtype), "batch": batch,
        "prompt_tokens": options.prompt_tokens, "weight_bytes": weights, "kv_bytes": kv, "floor_ms": round(floor_ms, 4),
        "num_draft_tokens": NUM_DRAFT_TOKENS, "arms": {},
    }  # fmt: skip
    for arm_name, own in timings.items():
        stretches = [s for g in own if (s := g.full_batch or g.whole) is not None]
        split = split_of_rounds(stretches)
        split["over_floor"] = round(split["round_ms"] / floor_ms, 3)
        split["tokens_per_s"] = round(sum(s.num_tokens for s in stretches) / sum(s.seconds for s in stretches), 2)
        out["arms"][arm_name] = split
    return out


def _table(rows: list[dict[str, Any]], bandwidth: float) -> Table:
    columns = ("shape", "batch", "weights GB", "KV GB", "floor ms", "plain ms", "/ floor", f"{NUM_DRAFT_TOKENS} drafts ms", "/ floor", "outside models")  # fmt: skip
    table = new_table(
        f"Random-weight models: round time over the memory floor (copy {bandwidth / 1e9:.0f} GB/s)", columns
    )
    for r in rows:
        plain, spec = r["arms"][PLAIN], r["arms"][SPECULATIVE]
        label = f"{r['shape']} (scaled down)" if r["is_scaled_down"] else r["shape"]
        table.add_row(
            label, str(r["batch"]), f"{r['weight_bytes'] / 1e9:.2f}", f"{r['kv_bytes'] / 1e9:.3f}", f"{r['floor_ms']:.3f}",
            f"{plain['round_ms']:.3f}", f"{plain['over_floor']:.2f}", f"{spec['round_ms']:.3f}", f"{spec['over_floor']:.2f}",
            f"{plain['outside_share']:.1%} / {spec['outside_share']:.1%}",
        )  # fmt: skip
    if any(r["is_scaled_down"] for r in rows):
        table.caption = "scaled down: says nothing about the model of that name"
    return table
