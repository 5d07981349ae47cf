"""Recipe of a drafter: the target writes the text, packed rows, AdamW, warm-up and cosine, resumable."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated as A
from typing import Any

import torch

from paceline.adapt.data import corpus
from paceline.adapt.data.regenerate import RegenerateConfig, folder_documents, read_state, regenerate
from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.families.family import summarise
from paceline.adapt.families.recipe import DrafterRecipe, target_shape
from paceline.adapt.families.row_batch import collate
from paceline.adapt.families.target_handle import TargetHandle, TargetTables, load_target_handle
from paceline.adapt.families.training import StepReport, TrainingRun, training_family, wants_autocast, warmup_cosine
from paceline.adapt.gate.shadow import fixed_rounds, replay_rounds
from paceline.adapt.recipes.checkpoint import CHECKPOINT_FILE, load_checkpoint, own_folder, save_checkpoint
from paceline.adapt.recipes.learning_curve import CURVE_FILE, LearningCurve
from paceline.adapt.recipes.record import add_facts, training_facts, write_provenance
from paceline.errors import ConfigError
from paceline.names import is_label
from paceline.records import MODELS, Device, Setting, Threads, build, record
from paceline.serving.drafters.network import DrafterModel
from paceline.serving.loading.families import save_drafter
from paceline.serving.loading.target import read_target
from paceline.serving.sampling.request import RequestTrace

log = logging.getLogger(__name__)
Progress = Callable[[int, int, dict], None]
_BETA_FACTOR = 10.0
"""Learning rate of the calibration scalars over that of the weights; they have a whole run to settle."""
_SORT_WINDOW = 16
"""Batches whose requests are sorted by length together, so that a batch pads little."""
_EVAL_FRONTIER = 4
_VALIDATIONS = 20
_TEXT_STATE = "text.json"


@record()
class TrainDrafterOptions:
    """Writes weights, config, learning curve, PROVENANCE.md, shards and the checkpoint.

    Example: paceline train-drafter --target ~/models/qwen3 --out runs/mine --drafter eagle3 --domains '' --data texts
    """

    target: A[str, Setting(MODELS)]
    out: A[Path, Setting("Folder for weights, config, PROVENANCE.md, shards and the checkpoint.")]
    recipe: DrafterRecipe = field(default_factory=DrafterRecipe)
    data: A[
        Path | None, Setting("Folder of text data (docs/drafters.md); only code and chat need none.", is_folder=True)
    ] = None
    num_threads: Threads = None
    device: Device = "auto"


def plan_batches(lengths: Sequence[int], batch_rows: int, generator: torch.Generator) -> list[list[int]]:
    """Shuffle requests and group neighbours in length into batches of at most batch_rows padded rows."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    mean = max(1.0, sum(lengths) / max(1, len(lengths)))
    window = max(1, int(_SORT_WINDOW * batch_rows / mean))
    batches: list[list[int]] = []
    for at in range(0, len(order), window):
        batch: list[int] = []
        for i in sorted(order[at : at + window], key=lambda j: lengths[j]):
            if batch and (len(batch) + 1) * lengths[i] > batch_rows:
                batches.append(batch)
                batch = []
            batch.append(i)
        batches.append(batch)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def rate_at(step: int, total: int, recipe: DrafterRecipe) -> float:
    """Learning rate of a step of a complete recipe: linear warm-up, cosine to `final_share`."""
    assert recipe.learning_rate is not None
    warm = max(1, int(total * recipe.warmup_share))
    rise, fall = (step + 1) / warm, (step - warm) / max(1, total - warm)
    return recipe.learning_rate * warmup_cosine(rise if step < warm else 1.0, fall, recipe.final_share)


class BestWeights:
    """The weights of a run that were worth most on held-out text."""

    def __init__(self) -> None:
        self.step: int | None = None
        """Optimizer step after which they were taken; None: nothing was offered."""
        self.acceptance_length = self.nll = 0.0
        self.state: dict[str, torch.Tensor] = {}

    def offer(self, model: DrafterModel, step: int, *, nll: float, acceptance_length: float) -> None:
        """Copy the model's weights if they accept more tokens a round, or as many with a lower nll."""
        if self.step is None or (acceptance_length, -nll) > (self.acceptance_length, -self.nll):
            self.step, self.nll, self.acceptance_length = step, nll, acceptance_length
            self.state = {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}

    @contextmanager
    def placed_in(self, model: DrafterModel) -> Iterator[None]:
        """The model has these weights, and its own again afterwards."""
        own = {name: t.detach().clone() for name, t in model.state_dict().items()}
        model.load_state_dict(self.state or own)
        try:
            yield
        finally:
            model.load_state_dict(own)


class _Progress:
    """How far a run came, beside its model and optimizer: what a checkpoint holds."""

    def __init__(self, run: TrainingRun, num_steps: int) -> None:
        """num_steps: of the whole run."""
        self.run, self.seconds, self.rows = run, 0.0, 0
        self.curve, self.best = LearningCurve(num_steps), BestWeights()

    def add(self, report: StepReport, seconds: float) -> None:
        """Count a step that took so long."""
        self.rows += int(report.rows)
        self.seconds += seconds
        self.curve.add(step=self.run.step, rows=self.rows, seconds=self.seconds, loss=report.loss, nll=report.nll)

    def validate(self, nll: float, acceptance_length: float) -> None:
        """Take in what the weights are worth now."""
        self.curve.validate(nll=nll, acceptance_length=acceptance_length)
        self.best.offer(self.run.model, self.run.step, nll=nll, acceptance_length=acceptance_length)

    def save(self, path: Path, settings: str) -> None:
        state = {
            "settings": settings,
            "step": self.run.step,
            "seconds": self.seconds,
            "rows": self.rows,
            "curve": self.curve.state(),
            "best": vars(self.best),
            "loss": json.dumps(asdict(self.run.loss)),
            "model": self.run.model.state_dict(),
            "optimizer": self.run.optimizer.state_dict(),
        }
        save_checkpoint(path, state)

    def resume(self, state: dict[str, Any]) -> None:
        self.run.model.load_state_dict(state["model"])
        self.run.optimizer.load_state_dict(state["optimizer"])
        self.run.step, self.seconds, self.rows = int(state["step"]), float(state["seconds"]), int(state["rows"])
        self.curve.resume(state["curve"])
        vars(self.best).update(state["best"])
        self.run.loss = build(type(self.run.loss), json.loads(state["loss"]))
        log.info("resumed from step %d", self.run.step)


@torch.no_grad()
def evaluate(
    model: DrafterModel, tables: TargetTables, traces: Sequence[RequestTrace], recipe: DrafterRecipe
) -> dict[str, float]:
    """The family's held-out numbers. tables: of the target, on the model's device. recipe: complete."""
    family = training_family(model.drafter_type)
    config = family.held_out_loss(recipe.loss)
    device = next(model.parameters()).device
    sums: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    lengths = [min(len(t.token_ids), recipe.max_rows) for t in traces]
    for plan in plan_batches(lengths, recipe.batch_rows, generator):
        batch = collate([traces[i] for i in plan], max_rows=recipe.max_rows, device=device)
        for key, value in family.loss(model, batch, tables, config, generator)[1].items():
            sums[key] = sums.get(key, torch.zeros(())) + value.cpu()
    return summarise(sums)


def replay(
    model: DrafterModel, target: TargetHandle, traces: Sequence[RequestTrace], num_nodes: int
) -> list[list[int]]:
    """num_accepted_tokens of each text's rounds by exact replay with trees of so many draft nodes."""
    make = training_family(model.drafter_type).serving.drafter.make
    drafter = make(model, target, dtype=torch.float32, head_dtype=torch.float32)
    rounds = fixed_rounds(num_nodes, _EVAL_FRONTIER, is_calibrated=False)
    return replay_rounds(drafter, traces, rounds, device=target.device)


def replayed_length(traces: Sequence[RequestTrace], rounds: Sequence[Sequence[int]]) -> float:
    """Tokens per round, pooled; the first token of a text is prefill's."""
    num_tokens = sum(len(t.token_ids) - t.prompt_len - 1 for t in traces)
    return num_tokens / max(1, sum(map(len, rounds)))


def validation_split(
    traces: Sequence[RequestTrace], num_tokens: int
) -> tuple[list[RequestTrace], dict[str, list[RequestTrace]]]:
    """Held-out requests that choose the weights, and those of each domain that the report is on.

    The first ones of each domain, at most half of them, until they hold its share of `num_tokens` output tokens; a domain
    with a single request has it in both.
    """
    domains = sorted({t.bucket for t in traces})
    chosen: list[RequestTrace] = []
    rest: dict[str, list[RequestTrace]] = {}
    for domain in domains:
        kept = [t for t in traces if t.bucket == domain]
        count, tokens = 0, 0
        while count < max(1, len(kept) // 2) and tokens * len(domains) < num_tokens:
            tokens += len(kept[count].token_ids) - kept[count].prompt_len
            count += 1
        chosen += kept[:count]
        rest[domain] = kept[count:] or kept
    return chosen, rest


def train_drafter(
    target_dir: str | Path,
    data: Path | None,
    out: str | Path,
    recipe: DrafterRecipe,
    *,
    device: str = "cpu",
    checkpoint_every: int = 100,
    progress: Progress = lambda done, total, info: None,
    command: str = "paceline train-drafter",
) -> dict[str, dict[str, float]]:
    """Write text with the target, train a drafter on it, write weights, config.json, learning curve and PROVENANCE.md into
    `out`.

    Resumes: shards in `out/text`, optimizer state in `out/checkpoint.pt`; delete them to start again.
    Args:
        target_dir: folder of a local transformers checkpoint with its tokenizer.
        data: corpus folder, or any folder with .jsonl/.txt prompts when recipe.domains is empty.
        progress: (done, total, info); info["phase"] is "text" (tokens) or "train" (optimizer steps).
    Returns: per domain the held-out numbers; `trained_`: of about as many requests of its training text. Raises: ConfigError on
    missing data or a foreign checkpoint.
    """
    recipe = training_family(recipe.drafter).complete(
        dataclasses.replace(
            recipe,
            domains=tuple(dict.fromkeys(recipe.domains)),
            text=dataclasses.replace(recipe.text, seed=recipe.seed),
        )
    )
    sources = {d: corpus.licence(d, data) for d in recipe.domains}
    with own_folder(Path(out), (CURVE_FILE, _TEXT_STATE)):
        return _train(
            Path(target_dir), data, Path(out), recipe, sources, device=device, checkpoint_every=checkpoint_every,
            progress=progress, command=command,
        )  # fmt: skip


def _train(
    source: Path,
    data: Path | None,
    folder: Path,
    recipe: DrafterRecipe,
    sources: dict[str, str],
    *,
    device: str,
    checkpoint_every: int,
    progress: Progress,
    command: str,
) -> dict[str, dict[str, float]]:
    """`train_drafter` by a complete recipe in a folder of its own. sources: of the domains."""
    family = training_family(recipe.drafter)
    handle = load_target_handle(source, device=device)
    config = family.make_config(handle, target_shape(source), recipe)
    settings = json.dumps({"target": handle.version, "recipe": asdict(recipe), "config": config.to_dict()})
    checkpoint = folder / CHECKPOINT_FILE
    begun = load_checkpoint(checkpoint, device, ("settings", "model", "optimizer")) if checkpoint.is_file() else None
    if begun is not None and begun["settings"] != settings:  # before text is written for it
        raise ConfigError(f"{checkpoint} belongs to another recipe or target; delete it or pass its settings")
    text = {"sources": sources, **_write_text(source, data, folder, recipe, handle, sources, progress)}
    traces = _read(folder / "text")
    facts = training_facts(recipe.domains, traces)
    torch.manual_seed(recipe.seed)
    model = family.serving.model(config)
    family.prepare(model, traces, handle)
    lengths = [min(len(t.token_ids) - 1, recipe.max_rows) for t in traces]
    plan = _plan(lengths, recipe)
    model.to(device)
    run = TrainingRun(
        model,
        TargetTables.of(handle, torch.device(device)),
        recipe.loss,
        beta_factor=_BETA_FACTOR,
        weight_decay=recipe.weight_decay,
        max_rows=recipe.max_rows,
        is_autocast=wants_autocast(model.config.hidden_size, torch.device(device))
        if recipe.autocast is None
        else recipe.autocast,
    )
    done = _Progress(run, len(plan))
    validation, held_out = validation_split(_read(folder / "held_out"), recipe.validation_tokens)
    validate_every = recipe.validate_every or max(1, -(-len(plan) // _VALIDATIONS))
    if begun is not None:
        done.resume(begun)
        begun = None  # its weights are not held twice
    began = time.perf_counter()
    for report in run.train(
        [[traces[i] for i in batch] for batch in plan],
        rate_of=lambda step: rate_at(step, len(plan), recipe),
        # the row draws depend on (seed, step) only
        generator_of=lambda step: torch.Generator().manual_seed(recipe.seed * 1_000_003 + step),
    ):
        spent = time.perf_counter() - began
        done.add(report, spent)
        if run.step % validate_every == 0 or run.step == len(plan):
            nll = evaluate(model, run.tables, validation, recipe)["nll"]
            rounds = replay(model, handle, validation, recipe.num_nodes)
            done.validate(nll, replayed_length(validation, rounds))
            run.loss = family.follow_rounds(run.loss, rounds, config.num_slots)
        info = {"loss": report.loss, "nll": report.nll, "grad_norm": report.grad_norm}
        progress(run.step, len(plan), {"phase": "train", "rows_per_s": int(report.rows) / spent, **info})
        if run.step % checkpoint_every == 0 or run.step == len(plan):
            done.save(checkpoint, settings)
            _write_drafter(folder, done, handle.version, recipe, facts)
        began = time.perf_counter()
    _write_drafter(folder, done, handle.version, recipe, facts)
    results: dict[str, dict[str, float]] = {}
    with done.best.placed_in(model):
        for domain, kept in held_out.items():
            results[domain] = evaluate(model, run.tables, kept, recipe)
            sides = {
                "greedy": [t for t in kept if t.temperature == 0],
                "sampled": [t for t in kept if t.temperature > 0],
            }
            for kind, of_kind in sides.items():
                if of_kind:
                    length = replayed_length(of_kind, replay(model, handle, of_kind, recipe.num_nodes))
                    results[domain][f"acceptance_length_{kind}"] = length
            if seen := requests_like(kept, traces, domain):
                numbers = evaluate(model, run.tables, seen, recipe)
                results[domain] |= {f"trained_{name}": numbers[name] for name in ("nll", "block1_slot0")}
    training = {
        "command": command, "rows": done.rows, "steps": run.step, "kept_step": done.best.step, "seconds": done.seconds,
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    write_provenance(
        folder, recipe={**asdict(recipe), "loss": asdict(run.loss)}, config=config.to_dict(), text=text, results=results, num_nodes=recipe.num_nodes, done=training,
    )  # fmt: skip
    return results


def requests_like(kept: Sequence[RequestTrace], traces: Sequence[RequestTrace], domain: str) -> list[RequestTrace]:
    """About as many of a domain's training requests as `kept`, up to twice, whose prompts end with the same tokens."""
    ends = {t.token_ids[t.prompt_len - 1] for t in kept}
    alike = [t for t in traces if t.bucket == domain and t.token_ids[t.prompt_len - 1] in ends]
    return alike[:: max(1, len(alike) // len(kept))]  # requests of one batch have prompts of one length


def _write_drafter(
    folder: Path, done: _Progress, target_version: str, recipe: DrafterRecipe, facts: dict[str, Any]
) -> None:
    """What a drafter's folder holds while it is trained: the best weights, config.json with its facts, learning curve."""
    with done.best.placed_in(done.run.model):
        save_drafter(folder, done.run.model, target_version, matrix_dtype=getattr(torch, recipe.weights))
    add_facts(folder, facts)
    done.curve.write(folder)


def _plan(lengths: Sequence[int], recipe: DrafterRecipe) -> list[list[int]]:
    """All batches of the run; a function of the seed and the lengths alone, so that a run can resume anywhere."""
    plan: list[list[int]] = []
    for epoch in range(math.ceil(recipe.epochs)):
        generator = torch.Generator().manual_seed(recipe.seed * 7919 + epoch)
        batches = plan_batches(lengths, recipe.batch_rows, generator)
        share = min(1.0, recipe.epochs - epoch)
        plan += batches[: max(1, round(len(batches) * share))]
    return plan


def _documents(data: Path | None, recipe: DrafterRecipe) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    if recipe.domains:
        sides = [{d: corpus.documents(d, data, side) for d in recipe.domains} for side in ("train", "held_out")]
        return sides[0], sides[1]
    if data is None:
        raise ConfigError("data must name a folder with .jsonl or .txt prompts when no domains are given")
    every = folder_documents(data)
    held = [d for d in every if zlib.crc32(d.encode()) % 100 < 3] or every[:1]
    rest = set(every) - set(held)
    return {_folder_domain(data): [d for d in every if d in rest] or every}, {_folder_domain(data): held}


def _folder_domain(data: Path) -> str:
    """The domain that the files of a folder make, a bucket of their requests."""
    return data.name if is_label(data.name) else "prompts"


def _write_text(
    source: Path,
    data: Path | None,
    folder: Path,
    recipe: DrafterRecipe,
    handle: TargetHandle,
    sources: dict[str, str],
    progress: Progress,
) -> dict[str, Any]:
    """Regenerate training and held-out text unless it is complete; return the training text's state."""
    states = [folder / _TEXT_STATE, folder / "held_out.json"]
    text = asdict(recipe.text)
    held = {**text, "seed": recipe.text.seed + 1, "truncation_share": 0.0}
    held["num_tokens"] = recipe.held_out_tokens * max(1, len(recipe.domains))
    held["batch_requests"] = max(1, min(text["batch_requests"], recipe.held_out_tokens // 100))
    goals = [RegenerateConfig(**text), RegenerateConfig(**held)]
    found = [read_state(s) for s in states]
    if all(
        f is not None and f["tokens"] >= g.num_tokens and f["batches"] >= len(f["domains"])
        for f, g in zip(found, goals, strict=True)
    ):
        named = list(recipe.domains) or ([_folder_domain(data)] if data is not None else None)
        _check_text(found, goals, handle.version, named)
        return found[0] or {}
    sides = _documents(data, recipe)
    target = read_target(source, device=str(handle.device))
    done = []
    for side, goal, state_file, name in zip(sides, goals, states, ("text", "held_out"), strict=True):
        done.append(
            regenerate(
                target, TraceStore(folder / name), side, goal, state_file=state_file, sources=sources,
                progress=_named(progress, name),
            )
        )  # fmt: skip
    return done[0]


def _check_text(found: list[Any], goals: list[RegenerateConfig], version: str, domains: Sequence[str] | None) -> None:
    """Complete text must be of this target, these domains (None: whatever they are) and this seed."""
    for state, goal in zip(found, goals, strict=True):
        is_other = domains is not None and sorted(state["domains"]) != sorted(domains)
        if is_other or state["target_version"] != version or state["seed"] != goal.seed:
            raise ConfigError(
                f"the text in the folder was written by target {state['target_version']} for {', '.join(state['domains'])} "
                f"with seed {state['seed']}; choose another --out or delete it"
            )


def _named(progress: Progress, phase: str) -> Progress:
    return lambda done, total, info: progress(done, total, {"phase": phase, **info})


def _read(store_dir: Path) -> list[RequestTrace]:
    """Requests with a row to learn from, each once. Raises: ConfigError when there is none."""
    store = TraceStore(store_dir)
    found: dict[str, RequestTrace] = {}
    for info in sorted(store.list_shards(), key=lambda s: s.shard_id):
        for trace in store.read_shard(info.shard_id):
            if len(trace.token_ids) - trace.prompt_len >= 2:
                found.setdefault(trace.request_id, trace)
    if not found:
        raise ConfigError(
            f"{store_dir} must hold a request that the target answered with 2 tokens or more, got none; delete "
            f"{store_dir}.json to have it written anew, or ask for more text"
        )
    return list(found.values())
