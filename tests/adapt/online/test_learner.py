"""A learner trains exactly its arm's parameters, goes on from its state as if it had never stopped, and refuses to diverge."""

import dataclasses

import pytest
import torch

from paceline.adapt.data.trace_store import MAX_TRACE_ROWS
from paceline.adapt.families.target_handle import TargetTables
from paceline.adapt.online.learner import (
    AVERAGED_STEPS,
    MAX_SEEN,
    WARMUP_STEPS,
    Learner,
    is_rehearsed,
    learn_all,
    select_parameters,
)
from paceline.contracts import ArmSpec
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.serving.drafters.deltas import factor_layers, merge
from paceline.serving.sampling.request import RequestTrace
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel

VOCAB, EMBED, FEATURES = 32, 8, 12
CONFIG = SpecBlockConfig(
    hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=VOCAB,
    feature_size=FEATURES, embed_size=EMBED,
)  # fmt: skip
TARGET_EMBED = torch.randn(VOCAB, EMBED, generator=torch.Generator().manual_seed(0))


def make_trace(i, num_outputs=30):
    """A text in which each token follows from the one before: learnable from the token path alone."""
    g = torch.Generator().manual_seed(i)
    tokens = [int(torch.randint(0, VOCAB, (1,), generator=g))]
    for _ in range(4 + num_outputs - 1):
        tokens.append((tokens[-1] * 5 + 3) % VOCAB)
    ids = torch.tensor(tokens[4:], dtype=torch.int32)[:, None]
    return RequestTrace(
        request_id=f"r{i}", bucket="b", temperature=0.0, prompt_len=4, token_ids=tokens,
        features=torch.randn(len(tokens) - 1, FEATURES, generator=g), topk_ids=ids,
        topk_logprobs=torch.full(ids.shape, -0.01), target_version="t",
    )  # fmt: skip


def make_model():
    torch.manual_seed(0)
    return SpecBlockModel(CONFIG)


TRACES = [make_trace(i) for i in range(40)]


def arm(parameters="full", **changes):
    return ArmSpec(name="a", parameters=parameters, num_rows=1000, **changes)


def make_learner(parameters="full", seed=1, **changes):
    return Learner(make_model(), TargetTables(TARGET_EMBED), arm(parameters, **changes), seed=seed)


def copied(state):
    return {k: v.clone() for k, v in state.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("parameters, trained", [
    ("calibration", {"log_beta", "rank_in.weight", "rank_out.weight"}),
    ("head", {"log_beta", "rank_in.weight", "rank_out.weight", "lm_head.weight", "final_norm"}),
])  # fmt: skip
def test_only_the_arms_parameters_change(parameters, trained):
    learner = make_learner(parameters)
    before = copied(learner.model.state_dict())
    assert set(select_parameters(learner.model, arm(parameters))) == trained
    learn_all(learner, TRACES[:6], [])
    for state in (learner.model.state_dict(), learner.snapshot()):
        assert {k for k, v in state.items() if not torch.equal(v, before[k])} == trained


def test_the_full_arm_trains_every_parameter_and_lowers_the_cross_entropy():
    learner = make_learner(learning_rate=2e-3)
    before = copied(learner.model.state_dict())
    reports = learn_all(learner, TRACES, [])
    assert len(reports) == learner.num_steps == 40 and reports[-1].nll < reports[0].nll - 0.1
    assert all(not torch.equal(p, before[n]) for n, p in learner.model.named_parameters())


def test_a_request_whose_prompt_is_longer_than_a_batch_teaches():
    learner = make_learner()
    whole = make_trace(1, num_outputs=MAX_TRACE_ROWS + 60)
    ids = whole.topk_ids[-40:]
    trace = dataclasses.replace(
        whole, prompt_len=len(whole.token_ids) - 40, topk_ids=ids, topk_logprobs=torch.full(ids.shape, -0.01)
    )
    report = learner.learn(trace)
    assert report.rows == 40 and report.nll > 0


def test_of_a_long_answer_what_is_learned_is_booked():
    learner = make_learner()
    reports = [learner.learn(make_trace(1, num_outputs=n)) for n in (MAX_TRACE_ROWS + 500, MAX_TRACE_ROWS, 20)]
    assert learner.num_rows == sum(r.rows for r in reports) < 2 * MAX_TRACE_ROWS + 20


def test_a_delta_leaves_the_base_alone_and_serves_as_its_factors_say():
    base = make_model().state_dict()
    learner = make_learner("lora", rank=3, learning_rate=5e-3)
    assert same(learner.snapshot(), base), "it begins at the base"
    reports = [learner.learn(t) for t in TRACES]
    factors, whole = learner.factors(), learner.snapshot()
    assert same(merge(base, factors), whole) and set(whole) == set(base)
    changes = {name for name in base if not torch.equal(base[name], whole[name])}
    layers = CONFIG.delta_linears
    assert changes == {name + ".weight" for name in layers} and factor_layers(factors) == layers
    assert sum(r.nll for r in reports[-5:]) < sum(r.nll for r in reports[:5])
    again = Learner(make_model(), TargetTables(TARGET_EMBED), arm("lora", rank=3), seed=2, factors=factors)
    torch.testing.assert_close(again.snapshot(), whole)
    wider = Learner(make_model(), TargetTables(TARGET_EMBED), arm("lora", rank=5), seed=2, factors=factors)
    torch.testing.assert_close(wider.snapshot(), whole)


def test_factors_of_another_drafter_are_refused():
    factors = make_learner("lora", rank=3).factors()
    name = next(iter(factors))
    for wrong in ({}, {**factors, name: factors[name][:, :-1]}, {**factors, "x.down": factors[name]}):
        with pytest.raises(DrafterMismatchError):
            Learner(make_model(), TargetTables(TARGET_EMBED), arm("lora", rank=3), seed=2, factors=wrong)
    with pytest.raises(DrafterMismatchError):
        Learner(make_model(), TargetTables(TARGET_EMBED), arm("lora", rank=2), seed=2, factors=factors)


def test_equal_seeds_give_equal_weights():
    learners = [make_learner(seed=s) for s in (1, 1, 2)]
    for learner in learners:
        learn_all(learner, TRACES[:8], TRACES[8:12])
    a, b, c = (learner.snapshot() for learner in learners)
    assert same(a, b) and not same(a, c)


def test_the_rate_warms_up_and_stays():
    rates = [r.learning_rate for r in learn_all(make_learner(learning_rate=1e-3), TRACES[: WARMUP_STEPS + 6], [])]
    assert rates[:WARMUP_STEPS] == pytest.approx([1e-3 * (i + 1) / WARMUP_STEPS for i in range(WARMUP_STEPS)])
    assert set(rates[WARMUP_STEPS:]) == {1e-3}


def test_the_snapshot_is_the_mean_of_the_newest_weights():
    learner, name, seen = make_learner(), "lm_head.weight", []
    for i, trace in enumerate(TRACES[: AVERAGED_STEPS + 3]):
        learner.learn(trace)
        seen.append(learner.model.state_dict()[name].clone())
        if i < AVERAGED_STEPS:
            torch.testing.assert_close(learner.snapshot()[name], torch.stack(seen).mean(0))
    mean = learner.snapshot()[name]
    assert (mean - seen[-1]).norm() < (seen[0] - seen[-1]).norm()


@pytest.mark.parametrize("parameters", ["calibration", "head", "full"])
def test_a_learner_that_goes_on_from_its_state_is_the_one_that_never_stopped(parameters):
    whole, half, again = (make_learner(parameters, seed=s) for s in (1, 1, 9))
    learn_all(whole, TRACES, [])
    learn_all(half, TRACES[:17], [])
    half.mark_read(TRACES[:17])
    again.restore(*half.state())
    assert again.seen == half.seen and again.num_steps == 17 and again.num_rows == half.num_rows
    learn_all(again, TRACES[17:], [])
    assert same(whole.snapshot(), again.snapshot()) and same(whole.model.state_dict(), again.model.state_dict())
    assert again.num_rows == whole.num_rows


@pytest.mark.parametrize("spoil", [
    lambda t, r: t.pop("weights/log_beta"),
    lambda t, r: t.update({"weights/lm_head.weight": torch.zeros(3)}),
    lambda t, r: t["mean/lm_head.weight"].fill_(float("nan")),
    lambda t, r: r.pop("step"),
    lambda t, r: r.update(evidence={"test": {"num_requests": "many"}}),
    lambda t, r: r.update(step="x"),
    lambda t, r: t.pop("seen"),
])  # fmt: skip
def test_a_state_of_another_learner_is_refused(spoil):
    learner = make_learner()
    learn_all(learner, TRACES[:2], [])
    tensors, record = learner.state()
    tensors = copied(tensors)
    spoil(tensors, record)
    with pytest.raises(DrafterMismatchError, match="learner state"):
        make_learner().restore(tensors, record)


def test_what_was_read_is_remembered_up_to_a_bound():
    learner = make_learner()
    learner.seen = dict.fromkeys(range(MAX_SEEN))
    learner.mark_read(TRACES[:3])
    assert len(learner.seen) == MAX_SEEN and 2 not in learner.seen and 3 in learner.seen
    assert all(learner.has_read(t) for t in TRACES[:3]) and not learner.has_read(TRACES[3])


@pytest.mark.parametrize("share, expected", [(0.0, 0), (1 / 3, 50), (0.5, 100)])
def test_rehearsal_has_its_share_of_the_steps(share, expected):
    assert sum(is_rehearsed(i, share) for i in range(100)) == pytest.approx(expected, abs=1)


def test_rehearsal_counts_apart_from_the_rows_of_the_class():
    learner = make_learner(rehearsal_share=1 / 3)
    learn_all(learner, TRACES[:8], TRACES[8:])
    assert (learner.num_rows, learner.num_rehearsed_rows, learner.num_steps) == (240, 120, 12)


def test_non_finite_features_are_noticed():
    poisoned = make_trace(5)
    poisoned.features[2, 3] = float("nan")
    learner = make_learner()
    with pytest.raises(DrafterMismatchError, match="diverged"):
        learn_all(learner, [make_trace(0), poisoned], [])


@pytest.mark.parametrize("bad", [
    {"parameters": "lora"}, {"parameters": "heads"}, {"learning_rate": 5e-3}, {"parameters": "lora", "rank": 2, "learning_rate": 2e-2},
    {"learning_rate": 0.0}, {"learning_rate": float("nan")},
    {"rehearsal_share": 1.0}, {"rehearsal_share": -0.1},
])  # fmt: skip
def test_arms_that_are_not_allowed_are_refused(bad):
    with pytest.raises(ConfigError):
        make_learner(**bad)


@pytest.mark.parametrize("parameters", ["calibration", "head"])
def test_text_outside_the_draft_vocabulary_is_a_step_that_teaches_nothing(parameters):
    torch.manual_seed(0)
    model = SpecBlockModel(dataclasses.replace(CONFIG, draft_vocab_size=24))
    outside = dataclasses.replace(make_trace(0), token_ids=[VOCAB - 1] * 34)
    outside.topk_ids = torch.full_like(outside.topk_ids, VOCAB - 1)
    assert VOCAB - 1 not in model.draft_token_ids
    learner = Learner(model, TargetTables(TARGET_EMBED), arm(parameters), seed=1)
    before = {name: t.clone() for name, t in learner.model.state_dict().items()}
    learner.learn(outside)
    assert learner.num_steps == 1
    after = learner.model.state_dict()
    assert all(torch.equal(t, after[name]) for name, t in before.items() if parameters == "calibration")
    learner.learn(make_trace(1))
    assert learner.num_steps == 2 and all(bool(torch.isfinite(t).all()) for t in learner.model.state_dict().values())
