"""JetSpec and DFlash drafters are trained by the recipe, updated by its arms, scored by replay and judged by the gate."""

import dataclasses
import json

import pytest
import torch

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.families import training
from paceline.adapt.families.recipe import DrafterRecipe
from paceline.adapt.families.target_handle import TargetTables, load_target_handle
from paceline.adapt.families.training import training_family
from paceline.adapt.gate.shadow import fixed_rounds, replay_rounds, shadow_scores
from paceline.adapt.online.learner import Learner, learn_all
from paceline.adapt.online.trainer import run_training_job
from paceline.adapt.recipes.drafter import train_drafter
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.contracts import ArmSpec, TrainJob
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.serving.loading.families import load_drafter
from paceline.serving.parallel_head.drafter import ParallelHeadDrafter
from paceline.serving.parallel_head.model import DRAFTER_TYPES, ParallelHeadConfig, ParallelHeadModel
from tests.helpers.replay import whole_tree
from tests.helpers.served import NODES, engine_rounds, serve
from tests.helpers.training import EMBED, FEATURES, TARGET, TEXT, VOCAB, learnable_trace
from tests.helpers.trees import draft_fixed

KINDS = pytest.mark.parametrize("name", sorted(DRAFTER_TYPES))
CPU = torch.device("cpu")


def make_model(name, seed=0, **changes):
    torch.manual_seed(seed)
    values = {
        "is_causal": DRAFTER_TYPES[name], "hidden_size": EMBED, "intermediate_size": 32, "num_heads": 2,
        "num_kv_heads": 1, "head_dim": 8, "vocab_size": VOCAB, "feature_size": FEATURES, "num_slots": 4, "edge_rank": 2,
    }  # fmt: skip
    return ParallelHeadModel(ParallelHeadConfig(**{**values, **changes}))


def update(model, parameters):
    arm = ArmSpec(name="a", parameters=parameters, num_rows=1000, learning_rate=2e-3)
    learner = Learner(model, TargetTables.of(TARGET, CPU), arm, seed=1)
    return [report.nll for report in learn_all(learner, [learnable_trace(f"t{i}") for i in range(24)], [])]


@pytest.mark.parametrize("parameters, trained", [
    ("calibration", {"log_beta"}),
    ("head", {"log_beta", "final_norm", "edge_in", "edge_out"}),
    ("full", None),
])  # fmt: skip
@KINDS
def test_an_arm_changes_its_own_parameters_only(name, parameters, trained):
    model = make_model(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    nll = update(model, parameters)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == ({n for n, _ in model.named_parameters()} if trained is None else trained)
    if trained is None:
        assert nll[-1] < nll[0] - 0.1


@KINDS
def test_a_learner_learns_the_slots_that_are_reached_and_goes_on_with_them(name):
    text = [learnable_trace(f"t{i}") for i in range(200)]
    arm = ArmSpec(name="a", parameters="full", num_rows=1000, learning_rate=2e-3)

    def learner(seed):
        return Learner(make_model(name, edge_rank=0), TargetTables.of(TARGET, CPU), arm, seed=seed)

    whole, half, again = learner(1), learner(1), learner(9)
    slots = []
    for i, trace in enumerate(text):
        whole.learn(trace)
        slots.append(whole._run.loss.num_learned_slots)
        if i % 7 == 0:
            whole.learn(learnable_trace(f"o{i}", bucket="code", num_outputs=30), is_rehearsal=True)
            assert whole._run.loss.num_learned_slots == slots[-1], (
                "another class's text says nothing of this one's slots"
            )
    assert slots[0] == 2 and slots[-1] == 4, "a fresh one is right nowhere; the text can be learned"
    cut = next(i for i, num in enumerate(slots) if num == 3)
    learn_all(half, text[: cut + 1], [])
    tensors, record = half.state()
    again.restore({k: v.clone() for k, v in tensors.items()}, record)
    assert again._reached == half._reached and again._run.loss == half._run.loss
    learn_all(half, text[cut + 1 :], [])
    learn_all(again, text[cut + 1 :], [])
    assert all(torch.equal(a, b) for a, b in zip(half.snapshot().values(), again.snapshot().values(), strict=True))
    tensors, record = half.state()
    with pytest.raises(DrafterMismatchError, match="learner state"):
        learner(1).restore(tensors, record | {"reached": [1.0, "x"]})
    old = {k: v for k, v in record.items() if k != "reached"}
    again = learner(1)
    again.restore(tensors, old)
    assert again._run.loss.num_learned_slots == 2, "of a release that kept none"


@KINDS
@pytest.mark.parametrize("parameters", ["calibration", "head", "full", "lora"])
def test_a_learner_in_bfloat16_keeps_float32_weights_and_learns(name, parameters):
    arm = ArmSpec(name="a", parameters=parameters, num_rows=1000, learning_rate=2e-3, rank=2)
    learner = Learner(make_model(name), TargetTables.of(TARGET, CPU), arm, seed=1)
    learner._run._is_autocast = True
    before = {k: v.clone() for k, v in learner.model.state_dict().items()}
    learn_all(learner, [learnable_trace(f"t{i}") for i in range(6)], [])
    state = learner.model.state_dict()
    assert all(
        v.dtype == before[k].dtype and bool(v.isfinite().all()) for k, v in state.items() if v.is_floating_point()
    )
    assert any(not torch.equal(v, before[k]) for k, v in state.items() if k in before) or parameters == "lora"
    assert all(v.dtype == torch.float32 for v in learner.snapshot().values() if v.is_floating_point())


def test_wide_drafters_learn_in_bfloat16_where_the_hardware_has_it(monkeypatch):
    for has_it, size, kind, expected in (
        (True, 512, "cpu", True), (True, 511, "cpu", False), (True, 16, "cuda", True), (False, 4096, "cpu", False),
    ):  # fmt: skip
        monkeypatch.setattr(training, "has_native_bf16", lambda device, has_it=has_it: has_it)
        assert training.wants_autocast(size, torch.device(kind)) is expected


@KINDS
def test_a_training_order_improves_a_drafter_and_registers_it(tmp_path, name):
    store, registry = TraceStore(tmp_path / "traces"), DrafterRegistry(tmp_path / "registry")
    shards = [store.write_shard([learnable_trace(f"m{i}") for i in range(160)], "math")]
    model = make_model(name)
    first = registry.put(
        model.state_dict(), drafter_type=name, config=model.config.to_dict(), target_version=TARGET.version
    ).version
    job = TrainJob(
        job_id="j1", bucket="math", arm=ArmSpec(name="full-1k", parameters="full", num_rows=10_000, learning_rate=2e-3),
        base_version=first, first_version=first, shard_ids=shards, rehearsal_shard_ids=[], seed=3, time_limit_s=120.0,
        min_gain=0.15,
    )  # fmt: skip
    result = run_training_job(job, store, registry, TARGET)
    assert result.status == "accepted", result.reason
    assert registry.get_manifest(result.version).drafter_type == name
    assert result.candidate.acceptance_length > result.incumbent.acceptance_length + 0.1


@pytest.mark.parametrize("edge_rank", [0, 3])
@KINDS
def test_replay_equals_served_rounds(name, edge_rank):
    def make(target, seed, overconfidence=0.0, family=name):
        model = make_model(
            name, seed, hidden_size=target.hidden_size, vocab_size=target.vocab_size, feature_size=target.feature_size,
            edge_rank=edge_rank,
        )  # fmt: skip
        with torch.no_grad():
            model.log_beta[:, 1:] += overconfidence
            if edge_rank:
                model.edge_out.normal_()
        return ParallelHeadDrafter(model, target.embed_weight, target.head_weight)

    target, sink = serve(8, make=make)
    nodes = NODES
    rounds = replay_rounds(make(target, 0), sink.traces, whole_tree(lambda d, i: draft_fixed(d, i, nodes)))
    assert any(a > 0 for r in rounds for a in r)
    for trace, replayed in zip(sink.traces, rounds, strict=True):
        served = engine_rounds(sink, trace.request_id)
        assert [r["num_accepted_tokens"] for r in served][:-1] == replayed[:-1] and len(served) == len(replayed)
    scores = shadow_scores({"a": make(target, 0), "b": make(target, 1)}, sink.traces, num_nodes=nodes)
    assert [s.num_tokens for s in scores["a"]] == [s.num_tokens for s in scores["b"]] and scores["a"] != scores["b"]
    assert len(replay_rounds(make(target, 0, 2.0), sink.traces, fixed_rounds(nodes, 4))) == 8


@pytest.mark.parametrize(
    "name, edge_rank, draft_vocab",
    [("jetspec", 3, None), ("dflash", None, None), ("jetspec", 3, 24), ("dflash", None, 24)],
)
def test_the_recipe_trains_a_drafter_that_loads(tmp_path, target_dir, prompts_dir, name, edge_rank, draft_vocab):
    recipe = DrafterRecipe(
        drafter=name,
        domains=(),
        text=TEXT,
        held_out_tokens=60,
        epochs=2.5,
        batch_rows=96,
        num_slots=5,
        edge_rank=edge_rank,
        draft_vocab_size=draft_vocab,
    )
    seen = []
    (numbers,) = train_drafter(
        target_dir, prompts_dir, tmp_path, recipe, progress=lambda done, total, info: seen.append(info.get("loss"))
    ).values()
    losses = [x for x in seen if x is not None]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert numbers["nll"] > 0 and numbers["acceptance_length_sampled"] >= 1
    shares = [numbers[f"block1_slot{s}"] for s in range(5)]
    assert shares == sorted(shares, reverse=True)
    drafter = load_drafter(tmp_path, load_target_handle(target_dir))
    assert (drafter.caps.name, drafter.caps.num_slots, drafter.config.edge_rank) == (name, 5, edge_rank or 0)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (
        config["drafter_type"] == name
        and config["draft_vocab_size"] == draft_vocab
        and config["learned_rows"][prompts_dir.name] > 0
    )
    assert '"objective"' in (tmp_path / "PROVENANCE.md").read_text(encoding="utf-8")


def test_what_a_family_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="edge-rank must be left out for specblock drafters"):
        training_family("specblock").complete(dataclasses.replace(DrafterRecipe(), edge_rank=8))
