"""Incremental SpecBlock drafting equals the training forward, round after round."""

import numpy as np
import pytest
import torch

from paceline.adapt.families.specblock import block1_forward, next_block_forward
from paceline.serving.drafters.interface import Frontier
from paceline.serving.specblock.drafter import SpecBlockDrafter
from paceline.serving.specblock.model import SpecBlockModel
from tests.helpers.drafters import (
    HIDDEN,
    TOLERANCE,
    Request,
    V,
    assert_proposal_matches,
    make_inputs,
    new_requests,
    prefill_chunked,
    text_batch,
    tiny_specblock,
)

pytestmark = pytest.mark.usefixtures("draft_forward")


@torch.no_grad()
def reference_logits(model, embed, request, leaves):
    """Training forward of the committed rows: block 1 at the newest row, and block 2 at (slot, token) leaves."""
    n = request.context
    batch = text_batch(request.features[:n], request.tokens[: n + 1])
    first = block1_forward(model, batch, embed)
    out = [model.lm_head(model.normed(first.hidden[0, -1]))]
    for slot, token in leaves:
        one = torch.tensor([[1]])
        state = next_block_forward(
            model, embed, first, [], rows=one * (n - 1), starts=one * (slot + 1), offsets=one * (slot + 1),
            cond=first.hidden[:, -1, slot][:, None] if model.config.inherits_hidden else first.cond[:, -1:],
            token_ids=one * token,
        )  # fmt: skip
        out.append(model.lm_head(model.normed(state.hidden[0, 0])))
    return out


def check_round(drafter, model, embed, requests, spans, rng):
    inputs = make_inputs(requests, spans)
    proposal = drafter.propose(inputs)
    leaves = [
        [(int(rng.integers(model.config.num_slots)), int(rng.integers(V))) for _ in range(int(rng.integers(1, 4)))]
        for _ in requests
    ]
    flat = [(i, *leaf) for i, per in enumerate(leaves) for leaf in per]
    rng.shuffle(flat)
    frontier = Frontier(
        request=torch.tensor([f[0] for f in flat]),
        slot=torch.tensor([f[1] for f in flat]),
        token_ids=torch.tensor([f[2] for f in flat]),
    )
    second = drafter.expand(inputs, proposal, frontier)
    for i, request in enumerate(requests):
        first, *rest = reference_logits(model, embed, request, leaves[i])
        assert_proposal_matches(proposal, i, first)
        wanted = dict(zip(leaves[i], rest, strict=True))
        for at, (owner, slot, token) in enumerate(flat):
            if owner == i:
                assert_proposal_matches(second, at, wanted[(int(slot), int(token))])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"num_layers": 1}, {"num_layers": 3, "num_kv_heads": 1}, {"compat_rope": True}, {"has_shift": False},
        {"inherits_hidden": False},
    ],
)  # fmt: skip
def test_incremental_drafting_equals_the_training_forward_over_rounds(count, scattered, changes):
    rng = np.random.default_rng(3)
    model, embed = tiny_specblock(**changes)
    drafter = SpecBlockDrafter(model, embed, num_candidates=6)
    requests = new_requests(drafter, count, rng, scattered)
    prefill_chunked(drafter, requests)
    for round_index in range(6):
        spans = [(r.done, r.context) for r in requests]
        check_round(drafter, model, embed, requests, spans, rng)
        for r in requests:
            r.done = r.context
            r.context += int(rng.integers(1, 6))  # a + 1 tokens: rejects and accepts
        if round_index == 3:  # preemption: the newest request loses its rows and is ingested again elsewhere
            r = requests[-1]
            drafter.release(r.name)
            drafter.pool[:, r.slots] = float("nan")
            r.slots = r.slots.flip(0)
            drafter.pool[:, r.slots] = 0
            drafter.ingest(make_inputs([r], [(0, r.context - 1)]))
            r.done = r.context - 1


def test_a_batch_of_prompts_is_ingested_together():
    rng = np.random.default_rng(5)
    model, embed = tiny_specblock()
    drafter = SpecBlockDrafter(model, embed, num_candidates=6)
    drafter.alloc(200)
    requests = [Request(f"r{i}", rng, 40, 12 + 7 * i, list(range(50 * i, 50 * i + 40))) for i in range(3)]
    drafter.ingest(make_inputs(requests, [(0, r.context - 1) for r in requests]))
    check_round(drafter, model, embed, requests, [(r.context - 1, r.context) for r in requests], rng)


def test_logprobs_are_calibrated_by_temperature_class_block_and_slot():
    rng = np.random.default_rng(0)
    model, embed = tiny_specblock()
    with torch.no_grad():
        model.log_beta.copy_(torch.randn_like(model.log_beta) * 0.5)
    drafter = SpecBlockDrafter(model, embed, num_candidates=6)
    drafter.alloc(40)
    request = Request("r", rng, 40, 9, list(range(40)))
    logits, second = reference_logits(model, embed, request, [(2, 7)])
    for temperature, kind, divisor in ((0.0, 0, 1.0), (0.7, 1, 0.7)):
        inputs = make_inputs([request], [(0, 9)], temperature)
        proposal = drafter.propose(inputs)
        frontier = Frontier(request=torch.tensor([0]), slot=torch.tensor([2]), token_ids=torch.tensor([7]))
        leaf = drafter.expand(inputs, proposal, frontier)
        assert_proposal_matches(proposal, 0, logits * model.log_beta[kind, 0].exp()[:, None] / divisor)
        assert_proposal_matches(leaf, 0, second * model.log_beta[kind, 1].exp()[:, None] / divisor)


def test_widths_follow_the_rank_head_of_the_training_model():
    rng = np.random.default_rng(1)
    model, embed = tiny_specblock(num_slots=4)
    with torch.no_grad():
        model.log_beta.copy_(torch.randn_like(model.log_beta) * 0.3)
        model.rank_out.weight.mul_(20)
    drafter = SpecBlockDrafter(model, embed, num_candidates=8)
    drafter.alloc(40)
    for n in range(4, 20):
        request = Request("r", rng, 40, n, list(range(40)))
        proposal = drafter.propose(make_inputs([request], [(0, n)], 0.8))
        z = model.normed(proposal.hidden[0])
        classes = model.rank_logits(z, model.lm_head(z).topk(model.config.rank_topk).values).argmax(-1)
        expected = torch.tensor(model.config.branching)[classes]
        assert proposal.widths[0, 1:].tolist() == expected[1:].tolist()
        assert int(proposal.widths[0, 0]) == 8


def test_without_a_rank_head_path_scores_alone_decide():
    model, embed = tiny_specblock(has_rank_head=False)
    rng = np.random.default_rng(2)
    drafter = SpecBlockDrafter(model, embed, num_candidates=6)
    drafter.alloc(40)
    request = Request("r", rng, 40, 9, list(range(40)))
    assert drafter.propose(make_inputs([request], [(0, 9)])).widths.tolist() == [[6] * 4]


def test_a_reduced_draft_vocabulary_proposes_target_ids_and_pays_for_coverage():
    rng = np.random.default_rng(2)
    model, embed = tiny_specblock(draft_vocab_size=30)
    with torch.no_grad():
        model.draft_token_ids.copy_(torch.arange(30) + 15)
        model.log_coverage.fill_(-0.25)
    drafter = SpecBlockDrafter(model, embed, num_candidates=5)
    drafter.alloc(40)
    request = Request("r", rng, 40, 9, list(range(40)))
    proposal = drafter.propose(make_inputs([request], [(0, 9)]))
    expected = torch.log_softmax(reference_logits(model, embed, request, [])[0], -1).topk(5)
    assert proposal.token_ids[0].tolist() == (expected.indices + 15).tolist()
    assert torch.allclose(proposal.logprobs[0], expected.values - 0.25, atol=TOLERANCE)


def test_a_bfloat16_output_head_stays_close_and_takes_new_weights():
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU has no bfloat16 products")
    rng = np.random.default_rng(6)
    (model, embed), (other, _) = tiny_specblock(0), tiny_specblock(1)
    request = Request("r", rng, 40, 20, list(range(40)))
    drafter = SpecBlockDrafter(model, embed, num_candidates=1, head_dtype=torch.bfloat16)
    drafter.alloc(40)
    for m in (model, other):
        drafter.load_state(m.state_dict())
        got = drafter.propose(make_inputs([request], [(0, 20)]))
        expected = torch.log_softmax(reference_logits(m, embed, request, [])[0], -1).gather(-1, got.token_ids[0])
        assert torch.allclose(got.logprobs[0], expected, atol=0.1)


def test_a_new_shift_leaves_the_residual_stream_as_it_is():
    """Each slot begins as itself, without a share of the slot before it, and learns both."""
    model = SpecBlockModel(tiny_specblock(num_layers=3)[0].config)
    x = torch.randn(3, 4, HIDDEN)
    for i in range(2):
        assert torch.equal(model.shift(i, x), x)
        assert model.shifts[i].weight.requires_grad


def test_off_the_cpu_a_mask_begins_with_its_memory(monkeypatch):
    """Views of kept masks begin anywhere, and CUDA's attention refuses one that is not aligned to 16 bytes."""
    model, embed = tiny_specblock()
    attention = SpecBlockDrafter(model, embed)._attention
    c, seen = attention.config, []
    qkv = torch.empty(2 * c.num_slots, attention._qkv_width, device="meta")
    kv = torch.empty(1, 5, c.num_slots, attention._kv_width, device="meta")

    def attend(query, key, value, mask, scale):
        seen.append(mask)
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    buffer = torch.empty(2 * c.num_slots, 64, device="meta")
    attention._attend_one(qkv, kv, buffer[:, 3 : 3 + 5 * c.num_slots])
    attention._attend_one(qkv[:1], kv, buffer[:1, 3 : 3 + 5 * c.num_slots])
    assert [mask.storage_offset() for mask in seen] == [0, 0]
