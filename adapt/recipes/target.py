"""Recipe of the bundled target: tokenizer, packed windows, Muon + AdamW, WSD schedule, resumable checkpoints."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated as A

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paceline.adapt.data import corpus
from paceline.adapt.families.recipe import MAX_SEED
from paceline.adapt.recipes.checkpoint import CHECKPOINT_FILE, load_checkpoint, own_folder, save_checkpoint
from paceline.errors import ConfigError
from paceline.paths import write_atomic
from paceline.records import Device, Setting, Threads, count, record, require

log = logging.getLogger(__name__)

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}<|result|>{% else %}<|{{ m['role'] }}|>{% endif %}{{ m['content'] or '' }}\n"
    "{% for c in m.get('tool_calls') or [] %}<|call|>{{ c['function']['name'] }} {{ c['function']['arguments'] }}\n"
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@record()
class TargetRecipe:
    """Sizes, tokens and schedule of a target."""

    num_tokens: A[int, Setting("Training tokens in all.", flag="tokens", parser=count, ge=1)] = 5_400_000
    hidden_size: A[int, Setting("Hidden size.", flag="width", ge=1)] = 128
    num_layers: A[int, Setting("Layers.", flag="layers", ge=1)] = 32
    intermediate_size: int = 384
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 4096
    context_tokens: int = 512
    """Length of a training window and of the served context."""
    batch_windows: int = 8
    learning_rate: float = 3e-3
    decay_share: float = 0.3
    """Share of the tokens, the last ones, that run with a falling learning rate."""
    warmup_steps: int = 60
    weight_decay: float = 0.05
    domains: A[tuple[str, ...], Setting("Comma list of domains.", choices=corpus.DOMAINS)] = corpus.DOMAINS
    seed: A[int, Setting("Seed of weights and windows.", ge=0, le=MAX_SEED)] = 1

    def __post_init__(self) -> None:
        is_batch = self.num_tokens >= self.step_tokens
        require(is_batch, f"tokens must be at least one batch, {self.step_tokens}", self.num_tokens)

    @property
    def step_tokens(self) -> int:
        """Training tokens of an optimizer step."""
        return self.batch_windows * self.context_tokens


@record()
class TrainTargetOptions:
    """Writes weights, tokenizer, PROVENANCE.md and the checkpoint.

    Example, the bundled target: paceline train-target --data DIR --out DIR --compile
    """

    data: A[Path, Setting("Folder of text data (docs/drafters.md).", is_folder=True)]
    out: A[Path, Setting("Folder for weights, tokenizer, PROVENANCE.md and the checkpoint.")]
    recipe: TargetRecipe = field(default_factory=TargetRecipe)
    num_threads: Threads = None
    device: Device = "auto"
    compile: A[bool, Setting("Compile the layers: faster on a CPU.")] = False


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer whose digits stay single tokens, with the chat markers as special tokens."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(corpus.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token=corpus.END, pad_token=corpus.PAD)
    fast.add_special_tokens({"additional_special_tokens": list(corpus.SPECIAL_TOKENS[2:])})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode_documents(tokenizer: PreTrainedTokenizerFast, docs: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate documents, each closed by the end token; return (token ids uint16, document start offsets int64)."""
    ids = [t + [tokenizer.eos_token_id] for t in tokenizer(docs, add_special_tokens=False)["input_ids"]]
    starts = np.cumsum([0] + [len(t) for t in ids[:-1]])
    return np.concatenate([np.array(t, dtype=np.uint16) for t in ids]), starts.astype(np.int64)


def sample_windows(
    streams: dict[str, tuple[np.ndarray, np.ndarray]], rng: np.random.Generator, count: int, length: int
) -> torch.Tensor:
    """Draw (count, length + 1) int64 windows, domains in turn, half of them beginning at a document's start."""
    names = sorted(streams)
    rows = []
    for i in range(count):
        ids, starts = streams[names[(i + int(rng.integers(len(names)))) % len(names)]]
        limit = len(ids) - length - 1
        if limit <= 0:
            raise ConfigError(f"a domain has {len(ids)} tokens, fewer than one window of {length + 1}")
        at = int(starts[rng.integers(len(starts))]) if rng.random() < 0.5 else int(rng.integers(limit))
        at = min(at, limit)
        rows.append(ids[at : at + length + 1].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


def learning_rate(step: int, total: int, recipe: TargetRecipe) -> float:
    """Warm-up, constant, then linear decay to zero over the last `decay_share` of the steps."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    decay_from = int(total * (1 - recipe.decay_share))
    fall = 1.0 if step < decay_from else max(0.0, (total - step) / max(1, total - decay_from))
    return recipe.learning_rate * warm * fall


class _Master:
    """fp32 master weights and their optimizers behind a model in the compute dtype."""

    def __init__(self, model: Qwen3ForCausalLM, recipe: TargetRecipe) -> None:
        self.model_params = [p for p in model.parameters() if p.requires_grad]
        self.params = [torch.nn.Parameter(p.detach().float().clone()) for p in self.model_params]
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        pairs = list(zip(names, self.params, strict=True))
        matrices = [p for n, p in pairs if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
        others = [p for n, p in pairs if not (p.ndim == 2 and "embed" not in n and "lm_head" not in n)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]

    def step(self, lr: float) -> float:
        """Apply one optimizer step with gradient clipping at 1; return the gradient norm."""
        for master, p in zip(self.params, self.model_params, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for opt in self.optimizers:
            for group in opt.param_groups:
                group["lr"] = lr
            opt.step()
        self.publish()
        return float(norm)

    @torch.no_grad()
    def publish(self) -> None:
        for master, p in zip(self.params, self.model_params, strict=True):
            p.copy_(master)


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, stream: np.ndarray, length: int, num_windows: int = 24) -> float:
    """Mean next-token cross-entropy in nats over evenly spaced held-out windows."""
    num_windows = max(1, min(num_windows, (len(stream) - 1) // length))
    offsets = np.linspace(0, len(stream) - length - 1, num_windows).astype(int)
    total = 0.0
    for at in offsets:
        x = torch.from_numpy(stream[at : at + length + 1].astype(np.int64))[None].to(model.device)
        logits = model(input_ids=x[:, :-1], use_cache=False).logits.float()
        total += float(torch.nn.functional.cross_entropy(logits[0], x[0, 1:]))
    return total / num_windows


class _TargetRun:
    """Model, masters, windows and position of a run; what a checkpoint holds."""

    def __init__(self, model: Qwen3ForCausalLM, recipe: TargetRecipe, device: str) -> None:
        self.model, self.recipe = model, recipe
        self.master = _Master(model, recipe)  # keeps the fp32 initial values; only the computing copy is rounded
        torch.nn.Module.to(model, device=device, dtype=torch.bfloat16)
        self.master.model_params = [p for p in model.parameters() if p.requires_grad]
        if device != "cpu":
            for p in self.master.params:
                p.data = p.data.to(device)
        self.num_steps = recipe.num_tokens // recipe.step_tokens
        self.step, self.seconds = 0, 0.0
        self.rng = np.random.default_rng(recipe.seed)
        self.device = device

    def train_batch(self, streams: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
        """One optimizer step on windows of the streams."""
        began = time.perf_counter()
        x = sample_windows(streams, self.rng, self.recipe.batch_windows, self.recipe.context_tokens).to(self.device)
        hidden = self.model.model(input_ids=x[:, :-1], use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden).flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, x[:, 1:].reshape(-1))
        loss.backward()
        norm = self.master.step(learning_rate(self.step, self.num_steps, self.recipe))
        self.step += 1
        self.seconds += time.perf_counter() - began
        per_s = self.step * self.recipe.step_tokens / self.seconds
        return {"loss": loss.item(), "grad_norm": norm, "tokens_per_s": per_s}

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "params": [p.detach() for p in self.master.params],
            "optimizers": [o.state_dict() for o in self.master.optimizers],
            "rng": json.dumps(self.rng.bit_generator.state),
            "recipe": json.dumps(asdict(self.recipe)),
        }
        save_checkpoint(path, state)

    def resume(self, path: Path) -> None:
        state = load_checkpoint(path, self.device, ("recipe", "params", "optimizers"))
        kept, mine = (
            {k: v for k, v in json.loads(text).items() if k != "num_tokens"}
            for text in (state["recipe"], json.dumps(asdict(self.recipe)))
        )
        if kept != mine:
            raise ConfigError(f"{path} belongs to another recipe; delete it or pass its settings")
        with torch.no_grad():
            for p, saved in zip(self.master.params, state["params"], strict=True):
                p.copy_(saved)
        for opt, saved in zip(self.master.optimizers, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.step, self.seconds = int(state["step"]), float(state["seconds"])
        log.info("resumed from step %d of %d", self.step, self.num_steps)


def train_target(
    data: Path,
    out: Path,
    recipe: TargetRecipe,
    *,
    device: str = "cpu",
    compile_layers: bool = False,
    checkpoint_every: int = 100,
    progress: Callable[[int, int, dict], None] = lambda done, total, info: None,
    command: str = "paceline train-target",
) -> dict[str, float]:
    """Train the target and write safetensors, config, tokenizer and PROVENANCE.md into `out`.

    Resumes from `out/checkpoint.pt` when it is there; delete it to start again. `progress(done, total, info)` is
    called after every optimizer step. Returns the held-out loss per domain in nats per token.
    Raises: ConfigError when data is missing or the checkpoint belongs to another recipe.
    """
    with own_folder(out, (CHECKPOINT_FILE, "PROVENANCE.md")):
        return _train(data, out, recipe, device, compile_layers, checkpoint_every, progress, command)


def _train(
    data: Path,
    out: Path,
    recipe: TargetRecipe,
    device: str,
    compile_layers: bool,
    checkpoint_every: int,
    progress: Callable[[int, int, dict], None],
    command: str,
) -> dict[str, float]:
    torch.manual_seed(recipe.seed)
    train_docs = {d: corpus.documents(d, data, "train") for d in recipe.domains}
    checkpoint = out / CHECKPOINT_FILE
    if checkpoint.is_file() and (out / "tokenizer.json").is_file():  # without a checkpoint it may be of other domains
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    else:
        tokenizer = train_tokenizer([t for docs in train_docs.values() for t in docs], recipe.vocab_size)
        tokenizer.save_pretrained(out)
    streams = {d: encode_documents(tokenizer, docs) for d, docs in train_docs.items()}
    held = {d: encode_documents(tokenizer, corpus.documents(d, data, "held_out"))[0] for d in recipe.domains}
    log.info("training tokens per domain: %s", {d: len(s[0]) for d, s in streams.items()})
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        intermediate_size=recipe.intermediate_size,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.context_tokens,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.02,
    )
    model = Qwen3ForCausalLM(config)
    run = _TargetRun(model, recipe, device)
    model.train()
    if compile_layers:
        for layer in model.model.layers:
            layer.compile()
    if checkpoint.is_file():
        run.resume(checkpoint)
    run.master.publish()
    while run.step < run.num_steps:
        info = run.train_batch(streams)
        progress(run.step, run.num_steps, info)
        if run.step % checkpoint_every == 0 or run.step == run.num_steps:
            run.save(checkpoint)
            model.save_pretrained(out)
    model.eval()
    losses = {d: held_out_loss(model, s, recipe.context_tokens) for d, s in held.items()}
    model.save_pretrained(out)
    _write_provenance(out, data, recipe, losses, run.num_steps * recipe.step_tokens, run.seconds, command)
    return losses


def _write_provenance(
    out: Path, data: Path, recipe: TargetRecipe, losses: dict[str, float], tokens: int, seconds: float, command: str
) -> None:
    sources = "\n".join(f"- {d}: {corpus.licence(d, data)}" for d in recipe.domains)
    rows = "\n".join(f"| {d} | {v:.3f} |" for d, v in losses.items())
    write_atomic(
        out / "PROVENANCE.md",
        f"# Provenance of the target\n\nTrained from random initial weights by this project's own recipe.\n\n"
        f"Command: `{command}`\n\nSeed {recipe.seed}; {tokens:,} training tokens; {seconds / 60:.0f} minutes of "
        f"optimizer time; torch {torch.__version__} on {platform.machine()}.\n\n## Data and licences\n\n{sources}\n\n"
        f"## Held-out loss (3% of documents by hash)\n\n| domain | nats per token |\n|---|---|\n{rows}\n\n"
        f"## Recipe\n\n```json\n{json.dumps(asdict(recipe), indent=1)}\n```\n",
    )
