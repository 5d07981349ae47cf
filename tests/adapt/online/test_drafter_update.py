"""An update trains exactly its arm's parameters, is reproducible, stops when asked and refuses to diverge."""

import pytest
import torch

from paceline.adapt.families.target_handle import TargetTables
from paceline.adapt.online.update import (
    UpdateStoppedError,
    plan_batches,
    rate_factor,
    rows_per_step,
    select_parameters,
    update_drafter,
)
from paceline.contracts import ArmSpec
from paceline.errors import ConfigError, DrafterMismatchError
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


def update(model, arm, traces=None, **changes):
    options = {
        "seed": 1, "time_share": lambda: 0.0, "should_stop": lambda: False, "progress": lambda *a: None, **changes,
    }  # fmt: skip
    traces = [make_trace(i) for i in range(24)] if traces is None else traces
    return update_drafter(model, TargetTables(TARGET_EMBED), traces, [], arm, **options)


def arm(parameters="full", **changes):
    return ArmSpec(name="a", parameters=parameters, num_rows=1000, **changes)


@pytest.mark.parametrize("parameters, trained", [
    ("calibration", {"log_beta", "rank_in.weight", "rank_out.weight"}),
    ("head", {"log_beta", "rank_in.weight", "rank_out.weight", "lm_head.weight", "final_norm"}),
])  # fmt: skip
def test_only_the_arms_parameters_change(parameters, trained):
    model = make_model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert set(select_parameters(model, parameters)) == trained
    update(model, arm(parameters))
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == trained


def test_the_full_arm_trains_every_parameter_and_lowers_the_cross_entropy():
    model = make_model()
    names = [n for n, _ in model.named_parameters()]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    values = []
    steps, last = update(model, arm(epochs=10), progress=lambda done, total, info: values.append(info["nll"]))
    assert steps == len(values) and last < values[0] - 0.1
    assert all(not torch.equal(model.state_dict()[n], before[n]) for n in names)


def test_equal_seeds_give_equal_weights():
    models = [make_model() for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        update(model, arm(), seed=seed)
    states = [m.state_dict() for m in models]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert any(not torch.equal(states[0][k], states[2][k]) for k in states[0])


def test_learning_rate_warms_up_peaks_and_settles_at_zero():
    values = [rate_factor(i / 100) for i in range(101)]
    assert values[0] == 0 and max(values) == 1 and values[100] < 1e-12
    assert values[:11] == sorted(values[:11]) and values[10:] == sorted(values[10:], reverse=True)


def test_the_time_budget_ends_the_update_early():
    shares = iter([0.0, 0.4, 0.9, 1.0])
    rates = []
    steps, _ = update(
        make_model(), arm(epochs=5), time_share=lambda: next(shares),
        progress=lambda done, total, info: rates.append(info["learning_rate"]),
    )  # fmt: skip
    assert steps == 3 and rates[1] > rates[2] and rates[2] < 0.1 * 5e-4


def test_the_update_stops_at_the_next_step():
    done = []
    with pytest.raises(UpdateStoppedError):
        update(make_model(), arm(), should_stop=lambda: len(done) == 2, progress=lambda d, t, i: done.append(d))
    assert done == [1, 2]


def test_non_finite_features_are_noticed():
    traces = [make_trace(i) for i in range(8)]
    traces[5].features[2, 3] = float("nan")
    with pytest.raises(DrafterMismatchError, match="diverged"):
        update(make_model(), arm(), traces)


@pytest.mark.parametrize("bad", [arm("lora"), arm(learning_rate=5e-3), arm(learning_rate=0.0)])
def test_arms_that_are_not_allowed_are_refused(bad):
    with pytest.raises(ConfigError):
        update(make_model(), bad)


def test_batches_cover_every_request_once_an_epoch():
    traces = [make_trace(i, num_outputs=10 + i) for i in range(20)]
    batches = plan_batches(traces, 3, torch.Generator().manual_seed(0))
    seen = [t.request_id for b in batches for t in b]
    assert sorted(seen) == sorted([t.request_id for t in traces] * 3)
    assert [rows_per_step(n) for n in (100, 6400, 10**6)] == [96, 200, 1024]
