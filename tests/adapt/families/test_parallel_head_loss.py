"""The packed training step of a parallel head against a loop over anchors and slots."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from paceline.adapt.families import parallel_head as parallel_head_loss
from paceline.adapt.families.parallel_head import (
    ParallelLossConfig,
    anchored_forward,
    draw_anchors,
    follow_reach,
    follow_rounds,
    parallel_training_loss,
    slot_values,
    slot_weights,
    soft_kl,
    supervised_anchors,
)
from paceline.adapt.families.recipe import DrafterRecipe
from paceline.adapt.families.row_batch import collate
from paceline.adapt.families.target_handle import TargetTables
from paceline.adapt.families.training import training_family
from paceline.errors import ConfigError
from paceline.serving.parallel_head.model import ParallelHeadConfig, ParallelHeadModel
from tests.helpers.drafters import HIDDEN, SIZES, V, logged_text

SLOTS = 4
KINDS = pytest.mark.parametrize("is_causal", [True, False], ids=["jetspec", "dflash"])
EMBED = torch.randn(V, HIDDEN, generator=torch.Generator().manual_seed(5))
HEAD = torch.randn(V, HIDDEN, generator=torch.Generator().manual_seed(6))
TABLES = TargetTables(embed=EMBED, head=HEAD)


def tiny_head(is_causal=True, seed=0, **changes):
    torch.manual_seed(seed)
    model = ParallelHeadModel(ParallelHeadConfig(**{**SIZES, "is_causal": is_causal, "num_slots": SLOTS, **changes}))
    if model.config.edge_rank:
        with torch.no_grad():
            model.edge_out.normal_()
    return model


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def loop_oracle(model, traces, config, head=HEAD):
    """Every anchor on its own and every slot by a direct formula: loss, histogram of leading correct slots, anchors."""
    total, weight_sum, histogram, anchors = 0.0, 0.0, [0] * (SLOTS + 1), 0
    for t in traces:
        n = len(t.token_ids)
        for a in range(max(1, t.prompt_len), n - 1):
            anchors += 1
            hidden = anchored_forward(model, collate([t]), EMBED, torch.tensor([[a]]))[0, 0]
            correct, is_open = 0, True
            for s in range(SLOTS):
                p = a + 1 + s
                if p >= n:
                    break
                z = model.normed(hidden[s]) @ head.T
                if model.config.edge_rank and s > 0 and config.edge_share:
                    z = z + model.edge_in[t.token_ids[p - 1]] @ model.edge_out.T
                q = z.softmax(-1).tolist()
                loss = -math.log(q[t.token_ids[p]])
                if config.objective == "forward_kl":
                    i = p - t.prompt_len
                    target = {t.token_ids[p]: 1.0}
                    if t.topk_ids is not None:
                        target = {int(v): math.exp(x) for v, x in zip(t.topk_ids[i], t.topk_logprobs[i], strict=True)}
                    loss = sum(m * math.log(m / q[v]) for v, m in target.items())
                    rest = 1 - sum(target.values())
                    if rest > 1e-6:
                        loss += rest * math.log(rest / (1 - sum(q[v] for v in target)))
                weight = 1.0 if config.decay_share is None else math.exp(-s / (config.decay_share * SLOTS))
                weight = weight if config.values is None else config.values[s]
                total, weight_sum = total + weight * loss, weight_sum + weight
                is_open = is_open and int(z.argmax()) == t.token_ids[p]
                correct += is_open
            histogram[correct] += 1
    return total / weight_sum, histogram, anchors


def make_half_right(model, traces):
    """Change texts so that many drafts are right: the head's own token of a slot becomes the text where a draw says so."""
    for t in traces:
        for p in range(t.prompt_len + 1, len(t.token_ids)):
            if (p * 7) % 3:
                a = max(t.prompt_len, p - 1 - (p * 5) % 2)
                with torch.no_grad():
                    hidden = anchored_forward(model, collate([t]), EMBED, torch.tensor([[a]]))[0, 0, p - 1 - a]
                    t.token_ids[p] = int((model.normed(hidden) @ HEAD.T).argmax())


@pytest.mark.parametrize("has_topk", [True, False])
@pytest.mark.parametrize(
    "objective, share, values",
    [("forward_kl", None, None), ("cross_entropy", 0.7, None), ("forward_kl", 0.7, (1.5, 0.5, 0.2, 0.0))],
)
@pytest.mark.parametrize("edge_rank, edge_share", [(0, 1.0), (3, 1.0), (3, 0.0)])
@KINDS
def test_packed_loss_equals_the_direct_formula(is_causal, edge_rank, edge_share, objective, share, values, has_topk):
    model = tiny_head(is_causal, edge_rank=edge_rank)
    traces = [logged_text(i, 12 + 4 * i, 3 + 2 * i, has_topk=has_topk) for i in range(3)]
    make_half_right(model, traces)
    config = ParallelLossConfig(
        objective=objective,
        decay_share=share,
        values=values,
        num_anchors=None,
        calibration_weight=0.0,
        edge_share=edge_share,
    )
    loss, histogram, anchors = loop_oracle(model, traces, config)
    got, report = parallel_training_loss(model, collate(traces), TABLES, config, generator())
    assert float(got.detach()) == pytest.approx(loss, rel=1e-4)
    assert report["correct1"].tolist() == histogram
    assert sum(histogram[2:]) > 0 or (edge_rank and edge_share), "the case must reach later slots"
    assert int(report["rows"]) == int(report["rows1"]) == anchors


def test_forward_kl_is_zero_at_the_target_and_has_the_gradient_of_cross_entropy():
    logits = torch.randn(6, V, generator=generator()).requires_grad_()
    top = logits.detach().log_softmax(-1).topk(V, dim=-1)
    assert float(soft_kl(logits, top.indices, top.values).detach().abs().max()) < 1e-5
    ids = torch.randint(V, (6, 1), generator=generator(1))
    one_hot = soft_kl(logits, ids, torch.zeros(6, 1))
    assert torch.allclose(one_hot, F.cross_entropy(logits, ids[:, 0], reduction="none"), atol=1e-5)
    q = torch.randn(6, V, generator=generator(2)).log_softmax(-1)
    everything = torch.arange(V).expand(6, -1)
    expected = F.kl_div(logits.log_softmax(-1), q, log_target=True, reduction="none").sum(-1)
    assert torch.allclose(soft_kl(logits, everything, q), expected, atol=1e-4)


@pytest.mark.parametrize("name", ["jetspec", "dflash"])
def test_objective_and_slot_weights_are_chosen_apart_from_the_mask(name):
    def chosen(**options):
        loss = training_family(name).complete(DrafterRecipe(drafter=name, **options)).loss
        return loss.objective, loss.decay_share, loss.is_served

    assert chosen() == ("forward_kl", 7 / 15, False)
    assert chosen(objective="forward_kl", slot_decay="flat") == ("forward_kl", None, False), "as JetSpec's paper"
    assert chosen(objective="cross_entropy", slot_decay=str(7 / 15)) == ("cross_entropy", 7 / 15, False), "as DFlash's"
    assert chosen(slot_decay="served") == ("forward_kl", 7 / 15, True), (
        "the decay, until a replay says what slots are worth"
    )
    for wrong in ("steep", "0", "-1", "nan"):
        with pytest.raises(ConfigError, match=f"slot-decay must be flat, served or a number > 0, got '{wrong}'"):
            chosen(slot_decay=wrong)
    with pytest.raises(ConfigError, match="objective must be one of forward_kl, cross_entropy"):
        chosen(objective="reverse_kl")


@pytest.mark.parametrize("name", ["specblock", "eagle3"])
def test_families_with_one_loss_refuse_another(name):
    for options, flag in (({"objective": "forward_kl"}, "objective"), ({"slot_decay": "flat"}, "slot-decay")):
        with pytest.raises(ConfigError, match=f"{flag} must be left out for {name} drafters"):
            training_family(name).complete(DrafterRecipe(drafter=name, **options))


def test_a_slots_value_is_the_derivative_of_the_acceptance_length_by_its_log_probability():
    p = torch.tensor([0.8, 0.6, 0.5, 0.9], dtype=torch.float64)
    log_p = p.log().requires_grad_()
    length = log_p.cumsum(0).exp().sum()
    (expected,) = torch.autograd.grad(length, log_p)
    draws = torch.rand(200_000, 4, generator=generator(), dtype=torch.float64) < p
    accepted = draws.long().cumprod(1).sum(1).tolist()
    assert slot_values([[*accepted, 4]], 4) == pytest.approx(expected.tolist(), abs=0.01)
    assert slot_values([[*accepted, 4]], 4)[0] == pytest.approx(sum(accepted) / len(accepted), abs=1e-4)


def test_slots_that_no_tree_reached_keep_a_small_value_and_last_rounds_say_nothing():
    assert slot_values([], 2) == slot_values([[2], [2]], 2) == pytest.approx((0.75, 0.25))
    values = slot_values([[1, 0] * 50], 4)
    assert values[0] > values[1] > values[2] > values[3] > 0 and values[2] < 0.01
    config = ParallelLossConfig(is_served=True)
    assert torch.equal(slot_weights(config, 2), slot_weights(ParallelLossConfig(), 2)), "nothing is known yet"
    assert slot_weights(follow_rounds(config, [[2], [2]], 2), 2).tolist() == pytest.approx([0.75, 0.25])
    assert follow_rounds(ParallelLossConfig(), [[2]], 2).values is None


def test_settings_of_the_loss_are_checked():
    for wrong in ({"objective": "reverse_kl"}, {"decay_share": 0.0}, {"num_anchors": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ParallelLossConfig(**wrong)


def test_anchors_are_distinct_supervised_positions_drawn_evenly():
    is_output = torch.zeros(2, 30, dtype=torch.bool)
    is_output[0, 10:30] = True
    is_output[1, 4:7] = True
    allowed = supervised_anchors(is_output)
    assert allowed[0].nonzero()[:, 0].tolist() == list(range(10, 29))
    assert allowed[1].nonzero()[:, 0].tolist() == [4, 5]
    counts = torch.zeros(30)
    for seed in range(300):
        anchors, is_real = draw_anchors(is_output, 6, generator(seed))
        assert is_real.sum(1).tolist() == [6, 2]
        for b in range(2):
            own = anchors[b][is_real[b]]
            assert own.unique().numel() == own.numel() and bool(allowed[b, own].all())
        counts += torch.bincount(anchors[0], minlength=30)
    assert counts[10:29].min() > 0.5 * 300 * 6 / 19, "every supervised position is drawn about equally often"
    every, is_real = draw_anchors(is_output, None, generator())
    assert sorted(every[0][is_real[0]].tolist()) == list(range(10, 29))


@KINDS
def test_an_anchor_sees_strictly_earlier_context_and_its_own_block_only(is_causal):
    model, t = tiny_head(is_causal), logged_text(0, 24, 4)
    before = anchored_forward(model, collate([t]), EMBED, torch.tensor([[8, 12, 17]]))
    t.features[12:] += 1.0  # the feature of anchor 12 itself is not there while drafting
    t.token_ids[13:] = [0] * 11
    after = anchored_forward(model, collate([t]), EMBED, torch.tensor([[8, 12, 17]]))
    assert torch.allclose(before[:, :2], after[:, :2], atol=1e-5)
    assert float((before[:, 2] - after[:, 2]).abs().max().detach()) > 0.01
    alone = anchored_forward(model, collate([t]), EMBED, torch.tensor([[12]]))
    assert torch.allclose(after[:, 1], alone[:, 0], atol=1e-5)


def test_requests_of_a_batch_do_not_touch_each_other():
    model = tiny_head(edge_rank=2)
    traces = [logged_text(i, 30 - 6 * i, 3 + i) for i in range(3)]
    config = ParallelLossConfig(decay_share=None, num_anchors=None, calibration_weight=0.0, edge_share=1.0)
    together, report = parallel_training_loss(model, collate(traces), TABLES, config, generator())
    alone = [parallel_training_loss(model, collate([t]), TABLES, config, generator()) for t in traces]
    slots = [
        sum(min(SLOTS, len(t.token_ids) - 1 - a) for a in range(t.prompt_len, len(t.token_ids) - 1)) for t in traces
    ]
    mean = sum(float(x.detach()) * n for (x, _), n in zip(alone, slots, strict=True)) / sum(slots)
    assert float(together.detach()) == pytest.approx(mean, rel=1e-4)
    assert report["correct1"].tolist() == sum(r["correct1"] for _, r in alone).tolist()


def test_calibration_trains_only_its_own_scalars():
    model = tiny_head(edge_rank=2)
    traces = [logged_text(i, 20, 4, temperature=0.8 * (i % 2)) for i in range(4)]
    grads = []
    for weight in (0.0, 1.0):
        model.zero_grad()
        config = ParallelLossConfig(num_anchors=None, calibration_weight=weight, calibration_share=1.0)
        parallel_training_loss(model, collate(traces), TABLES, config, generator())[0].backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert float(grads[1].pop("log_beta").abs().min()) > 0
    grads[0].pop("log_beta", None)
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.allclose(grads[0][n], grads[1][n], atol=1e-6) for n in grads[0])


def test_without_the_backbone_only_what_lies_behind_it_gets_gradients():
    model = tiny_head(edge_rank=2)
    config = ParallelLossConfig()
    batch = collate([logged_text(1, 20, 4)])
    parallel_training_loss(model, batch, TABLES, config, generator(), trains_backbone=False)[0].backward()
    with_grad = {n for n, p in model.named_parameters() if p.grad is not None}
    assert with_grad == {"final_norm", "edge_in", "edge_out", "log_beta"}


def test_chunked_output_head_gives_the_same_loss_and_gradients(monkeypatch):
    model, batch = tiny_head(edge_rank=2), collate([logged_text(i, 24, 4) for i in range(3)])
    results = []
    for limit in (2**26, V * 7):
        monkeypatch.setattr(parallel_head_loss, "_MAX_LOGITS", limit)
        model.zero_grad()
        loss, report = parallel_training_loss(model, batch, TABLES, ParallelLossConfig(), generator())
        loss.backward()
        results.append((float(loss.detach()), model.cond_proj.weight.grad.clone(), report["correct1"]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-5)
    assert torch.equal(results[0][2], results[1][2])


def test_a_batch_without_supervised_anchors_has_no_loss():
    model = tiny_head()
    loss, report = parallel_training_loss(
        model, collate([logged_text(0, 6, 5), logged_text(1, 4, 4)]), TABLES, ParallelLossConfig(), generator()
    )
    loss.backward()
    assert float(loss.detach()) == 0 and int(report["rows"]) == 0


@pytest.mark.parametrize("edge_rank", [0, 4])
@KINDS
def test_a_tiny_head_learns_a_regular_text(is_causal, edge_rank):
    model = tiny_head(is_causal, edge_rank=edge_rank)
    traces = []
    for i in range(8):
        t = logged_text(i, 30, 4)
        t.token_ids[:] = [(7 * i + 3 * p) % V for p in range(30)]
        t.topk_ids[:] = -1
        t.topk_ids[:, 0] = torch.tensor(t.token_ids[4:])
        t.topk_logprobs[:] = -torch.inf
        t.topk_logprobs[:, 0] = 0.0
        traces.append(t)
    batch, config = collate(traces), training_family(model.drafter_type).defaults["loss"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, g = [], generator()
    for _ in range(75):
        loss, report = parallel_training_loss(model, batch, TABLES, config, g)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert float(report["correct1"][1:].sum() / report["rows"]) > 0.8


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("num", [1, 2, 3])
def test_the_first_slots_alone_are_what_they_are_among_all(is_causal, num):
    """Hidden states and, of a causal block, gradients: no row of it sees one behind it."""
    model, traces = tiny_head(is_causal, edge_rank=3), [logged_text(0, 24, 4), logged_text(1, 20, 5)]
    batch, anchors = collate(traces), torch.tensor([[8, 12], [9, 11]])
    whole, first = (anchored_forward(model, batch, EMBED, anchors, n) for n in (None, num))
    assert whole.shape[2] == 4 and first.shape[2] == num
    torch.testing.assert_close(first, whole[:, :, :num])
    config = ParallelLossConfig(num_anchors=None, calibration_weight=0.0, edge_share=1.0)
    values = tuple(1.0 if s < num else 0.0 for s in range(4))  # those behind weigh nothing
    losses, grads = [], []
    for one in (
        dataclasses.replace(config, values=values),
        dataclasses.replace(config, values=values, num_learned_slots=num),
    ):
        loss, report = parallel_training_loss(model, batch, TABLES, one, generator())
        model.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        assert report["correct1"].sum() == report["rows"]
    assert len(report["correct1"]) == num + 1
    torch.testing.assert_close(losses[1], losses[0])
    for name, grad in grads[1].items():
        torch.testing.assert_close(grad, grads[0][name], msg=name)


def test_slots_learn_online_that_one_anchor_in_ten_reaches():
    shape, whole = tiny_head(num_slots=6).config, training_family("jetspec").update_loss(tiny_head(num_slots=6), True)
    assert whole.num_learned_slots is None, "a job of epochs has no reach to follow"
    loss = follow_reach(whole, (), shape)
    assert loss.num_learned_slots == 2, "the edge correction begins at the second"
    for reach, num in (
        ([1.0, 0.4, 0.1, 0.09, 0.02, 0.0], 3),
        ([1.0] * 6, 6),
        ([1.0, 0.0, 0.0], 2),
        ([1.0, 0.5, 0.3], 3),  # two learned, and are right often enough that the next one does
        ([1.0, 0.5, 0.3, 0.2], 4),
        ((), 2),
    ):
        assert follow_reach(loss, reach, shape).num_learned_slots == num, reach
    assert follow_reach(loss, [1.0, 1.0], tiny_head(num_slots=1).config).num_learned_slots == 1
    assert training_family("jetspec").update_loss(tiny_head(num_slots=6), False).num_learned_slots is None, (
        "it costs nothing"
    )
