"""The packed training step against a loop over rows and slots."""

import pytest
import torch

from paceline.adapt.families import row_batch
from paceline.adapt.families import specblock as specblock_loss
from paceline.adapt.families.row_batch import collate
from paceline.adapt.families.specblock import LossConfig, block1_forward, training_loss
from paceline.adapt.families.target_handle import TargetTables
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel, rank_class, rank_features
from tests.helpers.drafters import EMBED, SIZES, V, logged_text, perturb

PLAIN = {"rank_weight": 0.0, "calibration_weight": 0.0, "next_block_share": 1.0, "early_start_share": 0.0}


def tiny_model(seed=0, **changes):
    torch.manual_seed(seed)
    return SpecBlockModel(
        SpecBlockConfig(**{**SIZES, "embed_size": EMBED, "rank_hidden": 8, "num_blocks": 3, **changes})
    )


def generator():
    return torch.Generator().manual_seed(0)


def make_half_right(model, traces, embed):
    """Change texts so that many drafts are right: the greedy token of block 1 becomes the text where a draw says so."""
    for t in traces:
        for p in range(t.prompt_len + 1, len(t.token_ids)):
            if (p * 7) % 3:
                first = block1_forward(model, collate([t]), embed)
                slot = (p * 5) % 2
                row = p - 2 - slot
                best = model.lm_head(model.normed(first.hidden[0, row, slot])).argmax()
                t.token_ids[p] = int(best)


@torch.no_grad()
def loop_oracle(model, traces, embed, decay=0.8, log_coverage_ids=None, has_valid_prefix=True):
    """Block 1 by a plain loop: summed loss and histogram of leading correct slots."""
    k = model.config.num_slots
    total, histogram, rows = 0.0, [0] * (k + 1), 0
    to_draft = (
        {int(t): d for d, t in enumerate(model.draft_token_ids)} if log_coverage_ids else {i: i for i in range(V)}
    )
    for t in traces:
        hidden = block1_forward(model, collate([t]), embed).hidden[0]
        for row in range(len(t.token_ids) - 1):
            if row + 2 >= len(t.token_ids) or row + 2 < t.prompt_len:
                continue
            rows += 1
            correct, is_right = 0, True
            for slot in range(k):
                p = row + 2 + slot
                if p >= len(t.token_ids):
                    break
                logq = model.lm_head(model.normed(hidden[row, slot])).log_softmax(-1)
                if t.topk_ids is None:
                    target = {t.token_ids[p]: 1.0}
                else:
                    i = p - t.prompt_len
                    target = {int(a): float(b.exp()) for a, b in zip(t.topk_ids[i], t.topk_logprobs[i], strict=True)}
                inside = {to_draft[a]: m for a, m in target.items() if a in to_draft}
                rest = 1 - sum(inside.values())
                loss = -sum(m * float(logq[d]) for d, m in inside.items())
                if rest > 1e-6:
                    loss -= rest * float(
                        torch.log1p(-sum(logq[d].exp() for d in inside) if inside else torch.zeros(()))
                    )
                total += decay**slot * loss
                is_right = is_right and to_draft.get(t.token_ids[p]) == int(logq.argmax())
                if has_valid_prefix and not is_right:
                    break
                correct += is_right
            histogram[correct] += 1
    return total / rows, histogram, rows


@pytest.mark.parametrize("has_topk", [True, False])
@pytest.mark.parametrize("has_valid_prefix", [True, False])
def test_packed_loss_and_valid_prefix_equal_the_loop(has_topk, has_valid_prefix):
    model, embed = tiny_model(), torch.randn(V, EMBED)
    traces = [logged_text(i, 14 + 5 * i, 3 + 2 * i, has_topk=has_topk) for i in range(3)]
    make_half_right(model, traces, embed)
    loss, histogram, rows = loop_oracle(model, traces, embed, has_valid_prefix=has_valid_prefix)
    config = LossConfig(num_blocks=1, has_valid_prefix=has_valid_prefix, **PLAIN)
    got, report = training_loss(model, collate(traces), TargetTables(embed), config, generator())
    assert float(got.detach()) == pytest.approx(loss, rel=1e-4)
    assert report["correct1"].tolist() == histogram
    assert sum(histogram[2:]) > 0, "the case must reach later slots"
    assert int(report["rows"]) == rows == collate(traces).num_rows


def test_a_token_outside_the_draft_vocabulary_ends_the_prefix():
    model, embed = tiny_model(draft_vocab_size=24), torch.randn(V, EMBED)
    with torch.no_grad():
        model.draft_token_ids.copy_(torch.arange(24) + 8)
    traces = [logged_text(i, 20, 4) for i in range(3)]
    for t in traces:
        hidden = block1_forward(model, collate([t]), embed).hidden[0]
        for p in range(6, 20, 2):  # even positions right for slot 0; odd ones keep their random, often outside, token
            t.token_ids[p] = int(model.draft_token_ids[model.lm_head(model.normed(hidden[p - 2, 0])).argmax()])
    loss, histogram, _ = loop_oracle(model, traces, embed, log_coverage_ids=True)
    got, report = training_loss(
        model, collate(traces), TargetTables(embed), LossConfig(num_blocks=1, **PLAIN), generator()
    )
    assert float(got.detach()) == pytest.approx(loss, rel=1e-4)
    assert report["correct1"].tolist() == histogram


def test_requests_of_a_batch_do_not_touch_each_other_in_any_block():
    model, embed = tiny_model(), torch.randn(V, EMBED)
    traces = [logged_text(i, 30 - 6 * i, 3 + i) for i in range(3)]
    make_half_right(model, traces, embed)
    config = LossConfig(num_blocks=3, side_share=0.0, **PLAIN)
    together, report = training_loss(model, collate(traces), TargetTables(embed), config, generator())
    alone = [training_loss(model, collate([t]), TargetTables(embed), config, generator()) for t in traces]
    rows = sum(float(r["rows"]) for _, r in alone)
    assert float(together.detach()) == pytest.approx(
        sum(float(x.detach()) * float(r["rows"]) for x, r in alone) / rows, rel=1e-4
    )
    for key in ("correct1", "correct2", "correct3"):
        assert report[key].tolist() == sum(r[key] for _, r in alone).tolist()


def test_later_text_does_not_reach_earlier_rows():
    model, embed = tiny_model(), torch.randn(V, EMBED)
    t = logged_text(0, 20, 4)
    before = block1_forward(model, collate([t]), embed).hidden[0, :10]
    t.features[10:] += 1.0
    t.token_ids[11:] = [0] * 9
    assert torch.allclose(before, block1_forward(model, collate([t]), embed).hidden[0, :10], atol=1e-5)


def test_a_row_goes_on_where_serving_would_after_its_first_miss():
    starts = specblock_loss._draw_starts(torch.tensor([0, 1, 3, 4]), 4, 0.0, generator())
    assert starts.tolist() == [1, 2, 4, 4]
    early = specblock_loss._draw_starts(torch.full((1000,), 3), 4, 1.0, generator())
    assert set(early.tolist()) == {1, 2, 3, 4}


@pytest.mark.parametrize("name", ["has_shift", "inherits_hidden"])
def test_every_ablation_changes_what_the_second_block_says(name):
    embed = torch.randn(V, EMBED)
    traces = [logged_text(i, 20, 4) for i in range(3)]
    model = perturb(tiny_model())  # a new shift changes nothing
    make_half_right(model, traces, embed)
    losses = []
    for value in (True, False):
        ablated = tiny_model(**{name: value})
        ablated.load_state_dict({k: v for k, v in model.state_dict().items() if k in ablated.state_dict()})
        loss, report = training_loss(ablated, collate(traces), TargetTables(embed), LossConfig(**PLAIN), generator())
        assert int(report["rows2"]) > 0
        losses.append(float(loss.detach()))
    assert losses[0] != losses[1]


def test_rank_and_calibration_losses_train_only_their_own_parameters():
    model, embed = tiny_model(), torch.randn(V, EMBED)
    traces = [logged_text(i, 20, 4, temperature=0.8 * (i % 2)) for i in range(4)]
    token_only, _ = training_loss(
        model, collate(traces), TargetTables(embed), LossConfig(num_blocks=1, **PLAIN), generator()
    )
    token_only.backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert "log_beta" not in before and not any(n.startswith("rank") for n in before)
    model.zero_grad()
    every = {**PLAIN, "rank_weight": 1.0, "calibration_weight": 1.0}
    loss, _ = training_loss(
        model, collate(traces), TargetTables(embed), LossConfig(num_blocks=1, side_share=1.0, **every), generator()
    )
    loss.backward()
    for n, p in model.named_parameters():
        if n in before:
            assert torch.allclose(p.grad, before[n], atol=1e-6), n
        elif n == "log_beta" or n.startswith("rank"):
            assert float(p.grad.abs().sum()) > 0, n


def test_without_the_backbone_only_heads_get_gradients():
    model, embed = tiny_model(), torch.randn(V, EMBED)
    loss, _ = training_loss(
        model, collate([logged_text(1, 20, 4)]), TargetTables(embed), LossConfig(), generator(), trains_backbone=False
    )
    loss.backward()
    with_grad = {n for n, p in model.named_parameters() if p.grad is not None}
    assert "lm_head.weight" in with_grad and "final_norm" in with_grad
    assert not any(n.startswith(("layers", "shifts", "fuse", "cond")) for n in with_grad)


def test_chunked_output_head_gives_the_same_loss_and_gradients(monkeypatch):
    model, embed = tiny_model(), torch.randn(V, EMBED)
    batch = collate([logged_text(i, 24, 4) for i in range(3)])
    config = LossConfig(side_share=0.5)
    results = []
    for limit in (2**26, V * 7):
        monkeypatch.setattr(row_batch, "_MAX_LOGITS", limit)
        model.zero_grad()
        loss, _ = training_loss(model, batch, TargetTables(embed), config, generator())
        loss.backward()
        results.append((float(loss.detach()), model.cond_proj.weight.grad.clone()))
    # rank frequencies are counted per chunk, so only the token loss is compared through the backbone's gradient
    assert torch.allclose(results[0][1], results[1][1], atol=1e-5)


def test_a_tiny_drafter_learns_a_regular_text():
    torch.manual_seed(0)
    model, embed = tiny_model(num_blocks=2), torch.randn(V, EMBED)
    traces = []
    for i in range(4):
        t = logged_text(i, 40, 3, has_topk=False)
        t.token_ids = [(i * 5 + p) % 12 for p in range(40)]
        traces.append(t)
    batch = collate(traces)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss, report = training_loss(model, batch, TargetTables(embed), LossConfig(), generator())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    histogram = report["correct1"] / report["correct1"].sum()
    assert float(histogram[4]) > 0.6
    assert float(report["correct2"][0] / report["correct2"].sum()) < 0.4


def test_rank_features_and_classes_are_those_of_the_definition():
    logits = torch.randn(3, 20).sort(descending=True).values
    f = rank_features(logits)
    logp = logits - logits.logsumexp(-1, keepdim=True)
    assert f.shape == (3, 15)
    assert torch.allclose(f[:, 10], logits[:, 0] - logits[:, 1], atol=1e-5)
    assert torch.allclose(f[:, 12], logits[:, 0] - logits[:, 4], atol=1e-5)
    assert torch.allclose(f[:, 14], -(logp.exp() * logp).sum(-1), atol=1e-5)
    assert rank_class(torch.tensor([0, 1, 3, 4, 9, 10])).tolist() == [0, 1, 1, 2, 2, 3]
