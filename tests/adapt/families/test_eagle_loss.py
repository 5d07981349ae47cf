"""The packed training-time test against a loop over rows, steps and visible keys."""

import math

import pytest
import torch
import torch.nn.functional as F

from paceline.adapt.families import row_batch
from paceline.adapt.families.eagle3 import EagleLossConfig, follow_reach, training_loss, unrolled_hidden
from paceline.adapt.families.recipe import most_frequent_tokens
from paceline.adapt.families.row_batch import collate
from paceline.adapt.families.target_handle import TargetTables
from paceline.adapt.gate.shadow import shadow_scores
from paceline.adapt.online.learner import Learner, learn_all, select_parameters
from paceline.contracts import ArmSpec
from paceline.serving.drafters.network import rope_cos_sin
from paceline.serving.eagle3.drafter import EagleDrafter
from paceline.serving.eagle3.model import EagleConfig, EagleModel
from tests.helpers.drafters import EMBED, FEATURES, V, logged_text

PLAIN = EagleLossConfig(num_steps=3, calibration_weight=0.0)


def tiny_model(seed=0, **changes):
    torch.manual_seed(seed)
    values = {
        "hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "vocab_size": V,
        "feature_size": FEATURES, "embed_size": EMBED, "num_steps": 3,
    }  # fmt: skip
    return EagleModel(EagleConfig(**{**values, **changes}))


@torch.no_grad()
def loop_hidden(model, t, embed, row, num_steps):
    """Hidden states of one row, step by step, with an explicit list of the keys that it sees."""
    c = model.config
    features = F.linear(t.features, model.fc.weight)

    def project(hidden, token, position):
        cos, sin = rope_cos_sin(torch.tensor([[position]]), c.head_dim, c.rope_theta)
        return [x[0, :, 0] for x in model.qkv(hidden[None, None], embed[token][None, None], cos, sin)]

    rows = [project(features[j], t.token_ids[j + 1], j) for j in range(row + 1)]
    keys, values = [r[1] for r in rows], [r[2] for r in rows]
    hidden, query, out = features[row], rows[-1][0], []
    for step in range(num_steps):
        if step > 0:
            token = t.token_ids[row + 1 + step] if row + 1 + step < len(t.token_ids) else 0
            query, k, v = project(hidden, token, row + step)
            keys, values = [*keys, k], [*values, v]
        heads = []
        for h in range(c.num_heads):
            group = h // (c.num_heads // c.num_kv_heads)
            k, v = torch.stack([x[group] for x in keys]), torch.stack([x[group] for x in values])
            heads.append((k @ query[h] * c.head_dim**-0.5).softmax(0) @ v)
        hidden = model.finish(hidden[None, None], torch.stack(heads)[None, :, None])[0, 0]
        out.append(hidden)
    return out


@torch.no_grad()
def loop_oracle(model, traces, embed, num_steps=3, decay=0.8):
    """Summed loss per row and histogram of tokens in a row that the greedy chain gets right."""
    draft_ids = model.draft_token_ids.tolist() if model.config.draft_vocab_size else list(range(V))
    total, histogram, rows = 0.0, [0] * (num_steps + 1), 0
    for t in traces:
        for row in range(max(0, t.prompt_len - 2), len(t.token_ids) - 2):
            rows += 1
            correct, is_right = 0, True
            for step, hidden in enumerate(loop_hidden(model, t, embed, row, num_steps)):
                p = row + 2 + step
                if p >= len(t.token_ids):
                    break
                logq = model.lm_head(model.normed(hidden)).log_softmax(-1)
                i = p - t.prompt_len
                target = {int(a): float(b.exp()) for a, b in zip(t.topk_ids[i], t.topk_logprobs[i], strict=True)}
                is_right &= draft_ids[int(logq.argmax())] == t.token_ids[p]
                correct += is_right
                if int(t.topk_ids[i][0]) not in draft_ids:
                    continue
                outside = sum(m for a, m in target.items() if a not in draft_ids)
                inside = {draft_ids.index(a): m / (1 - outside) for a, m in target.items() if a in draft_ids}
                rest = max(0.0, 1 - sum(inside.values()))
                loss = -sum(m * float(logq[d]) for d, m in inside.items())
                loss -= rest * float(torch.log1p(-sum(logq[d].exp() for d in inside)))
                total += decay**step * loss
            histogram[correct] += 1
    return total / rows, histogram, rows


def make_half_right(model, traces, embed):
    """Change texts so that greedy drafts are often right, at the first step and behind it."""
    for t in traces:
        for p in range(t.prompt_len + 1, len(t.token_ids)):
            if step := p % 3:
                hidden = loop_hidden(model, t, embed, p - 1 - step, step)[-1]
                best = int(model.lm_head(model.normed(hidden)).argmax())
                t.token_ids[p] = int(model.draft_token_ids[best]) if model.config.draft_vocab_size else best


@pytest.mark.parametrize("draft_vocab", [None, 24])
def test_packed_loss_equals_the_loop(draft_vocab):
    model, embed = tiny_model(draft_vocab_size=draft_vocab), torch.randn(V, EMBED)
    if draft_vocab:
        with torch.no_grad():
            model.draft_token_ids.copy_(torch.arange(24) + 8)
    traces = [logged_text(i, 12 + 4 * i, 3 + 2 * i) for i in range(3)]
    make_half_right(model, traces, embed)
    loss, histogram, rows = loop_oracle(model, traces, embed)
    got, report = training_loss(model, collate(traces), TargetTables(embed), PLAIN, torch.Generator().manual_seed(0))
    assert float(got.detach()) == pytest.approx(loss, rel=1e-4)
    assert report["correct1"].tolist() == histogram and int(report["rows"]) == rows
    assert min(histogram[:3]) > 0, "the case must hold rows that end at different steps"


def test_what_lies_outside_the_draft_vocabulary_counts_in_the_nll():
    model, embed = tiny_model(draft_vocab_size=24, num_steps=1), torch.randn(V, EMBED)
    traces, config = [logged_text(i, 24, 4) for i in range(3)], EagleLossConfig(num_steps=1, calibration_weight=0.0)
    is_taught = torch.cat([t.topk_ids[:, 0] < 24 for t in traces])
    model.log_coverage.fill_(math.log(0.8))
    loss, report = training_loss(model, collate(traces), TargetTables(embed), config, torch.Generator())
    rows, taught = int(report["rows"]), int(is_taught.sum())
    assert rows == len(is_taught) and 0 < taught < rows
    expected = float(loss.detach()) * rows - taught * math.log(0.8) - (rows - taught) * math.log(0.2)
    assert float(report["nll1"]) == pytest.approx(expected, rel=1e-5)


def test_steps_are_fed_with_the_drafters_own_hidden_states():
    model, embed = tiny_model(), torch.randn(V, EMBED)
    states = list(unrolled_hidden(model, collate([logged_text(0, 12, 4)]), embed, 3))
    (gradient,) = torch.autograd.grad(states[2][0, 5].sum(), states[0], retain_graph=True)
    assert (
        float(gradient[0, 5].abs().sum()) > 0 and float(gradient[0, :5].abs().sum() + gradient[0, 6:].abs().sum()) == 0
    )


def test_requests_of_a_batch_do_not_touch_each_other():
    model, embed = tiny_model(), torch.randn(V, EMBED)
    traces = [logged_text(i, 30 - 6 * i, 3 + i) for i in range(3)]
    together, _ = training_loss(model, collate(traces), TargetTables(embed), PLAIN, torch.Generator().manual_seed(0))
    alone = [
        training_loss(model, collate([t]), TargetTables(embed), PLAIN, torch.Generator().manual_seed(0)) for t in traces
    ]
    rows = [float(r["rows"]) for _, r in alone]
    mean = sum(float(loss.detach()) * n for (loss, _), n in zip(alone, rows, strict=True)) / sum(rows)
    assert float(together.detach()) == pytest.approx(mean, rel=1e-5)


def test_chunked_output_head_gives_the_same_loss_and_gradients(monkeypatch):
    model, embed = tiny_model(), torch.randn(V, EMBED)
    batch, results = collate([logged_text(i, 24, 4) for i in range(3)]), []
    for limit in (2**26, V * 7):
        monkeypatch.setattr(row_batch, "_MAX_LOGITS", limit)
        model.zero_grad()
        loss, _ = training_loss(
            model, batch, TargetTables(embed), EagleLossConfig(num_steps=3), torch.Generator().manual_seed(0)
        )
        loss.backward()
        results.append((float(loss.detach()), model.fc.weight.grad.clone(), model.log_beta.grad.clone()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results[0][1:], results[1][1:], strict=True))


def test_calibration_reaches_log_beta_alone():
    model, embed = tiny_model(), torch.randn(V, EMBED)
    batch, gradients = collate([logged_text(0, 24, 4), logged_text(1, 24, 4, temperature=0.7)]), []
    for weight in (0.0, 5.0):
        model.zero_grad()
        config = EagleLossConfig(num_steps=3, calibration_weight=weight, side_share=1.0)
        training_loss(model, batch, TargetTables(embed), config, torch.Generator().manual_seed(0))[0].backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert gradients[0]["log_beta"] is None and bool((gradients[1]["log_beta"] != 0).all())
    assert all(torch.equal(gradients[0][n], g) for n, g in gradients[1].items() if n != "log_beta")


def test_the_draft_vocabulary_holds_the_most_frequent_output_tokens_and_their_share():
    a, b = logged_text(0, 12, 4), logged_text(1, 8, 4)
    a.token_ids, b.token_ids = [9] * 4 + [5, 5, 5, 7, 7, 30, 2, 5], [9] * 4 + [7, 7, 2, 2]
    ids, log_share = most_frequent_tokens([a, b], 3, V)
    assert ids.tolist() == [2, 5, 7]
    assert float(log_share.exp()) == pytest.approx(12 / 14)
    assert most_frequent_tokens([a, b], V, V)[1] == 0


def regular_traces(count=6, length=40):
    """Texts whose tokens follow from one another, so that a drafter can learn them from the tokens alone."""
    out = []
    for i in range(count):
        t = logged_text(i, length, 3, has_topk=False)
        t.token_ids = [(i * 5 + p) % 12 for p in range(length)]
        out.append(t)
    return out


def test_a_tiny_drafter_learns_a_regular_text_and_is_accepted_far_above_chance():
    model, embed, traces = tiny_model(), torch.randn(V, EMBED), regular_traces()
    batch, optimizer = collate(traces[:4]), torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []

    def acceptance():
        scores = shadow_scores({"": EagleDrafter(model, embed)}, traces[4:], num_nodes=4, is_calibrated=False)[""]
        return sum(s.num_tokens for s in scores) / sum(s.num_rounds for s in scores)

    before = acceptance()
    for _ in range(60):
        loss, report = training_loss(
            model, batch, TargetTables(embed), EagleLossConfig(num_steps=3), torch.Generator().manual_seed(0)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    histogram = report["correct1"] / report["correct1"].sum()
    assert losses[-1] < 0.3 * losses[0] and float(histogram[3]) > 0.8
    assert before < 1.4 and acceptance() > 2.6


@pytest.mark.parametrize("parameters, trained", [
    ("calibration", {"log_beta"}),
    ("head", {"log_beta", "lm_head.weight", "final_norm"}),
    ("full", None),
])  # fmt: skip
def test_every_arm_of_an_online_update_trains_its_parameters(parameters, trained):
    model, embed = tiny_model(draft_vocab_size=20), torch.randn(V, EMBED)
    names = {n for n, _ in model.named_parameters()} if trained is None else trained
    arm = ArmSpec(name="a", parameters=parameters, num_rows=1000, learning_rate=2e-3)
    assert set(select_parameters(model, arm)) == names
    before = {k: v.clone() for k, v in model.state_dict().items()}
    nll = [r.nll for r in learn_all(Learner(model, TargetTables(embed), arm, seed=1), regular_traces(12) * 4, [])]
    assert {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])} == names
    assert parameters == "calibration" or nll[-1] < nll[0] - 0.05


def test_fewer_steps_are_the_first_ones():
    model, embed = tiny_model(), torch.randn(V, EMBED, generator=torch.Generator().manual_seed(5))
    traces = [logged_text(i, 24, 4) for i in range(3)]
    make_half_right(model, traces, embed)
    counts = []
    for config in (PLAIN, follow_reach(PLAIN, [1.0, 0.2, 0.05], model.config)):
        _, report = training_loss(model, collate(traces), TargetTables(embed), config, torch.Generator().manual_seed(0))
        counts.append(report["correct1"].tolist())
    whole, first = counts
    assert whole[2] + whole[3] > 0, "some rows get two right"
    assert first == [whole[0], whole[1], whole[2] + whole[3]]
    assert follow_reach(config, [1.0, 0.3, 0.1], model.config).num_steps == 3
