"""Incremental parallel-head drafting equals the training forward, causal and bidirectional, round after round."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.adapt.families.parallel_head import ParallelLossConfig, anchored_forward, parallel_training_loss
from paceline.adapt.families.row_batch import RowBatch, collate
from paceline.adapt.families.target_handle import TargetTables
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.kernels.reference.draft_ingest import draft_ingest
from paceline.serving.drafters.interface import Frontier
from paceline.serving.drafters.network import rope_cos_sin
from paceline.serving.loading.families import build_drafter
from paceline.serving.parallel_head.drafter import ParallelHeadDrafter
from paceline.serving.parallel_head.model import ParallelHeadConfig, ParallelHeadModel
from paceline.serving.sampling.request import RequestTrace
from tests.helpers.drafters import (
    SIZES,
    TOLERANCE,
    FakeTarget,
    Request,
    V,
    assert_proposal_matches,
    make_inputs,
    new_requests,
    prefill_chunked,
    text_batch,
    tiny_head,
)

SLOTS = 5
pytestmark = pytest.mark.usefixtures("draft_forward")
KINDS = pytest.mark.parametrize("is_causal", [True, False], ids=["jetspec", "dflash"])


@torch.no_grad()
def reference_logits(model, embed, head, request):
    """Training forward at the request's anchor, on its whole text: (S, V)."""
    batch = text_batch(request.features, request.tokens)
    hidden = anchored_forward(model, batch, embed, torch.tensor([[request.context]]))
    return model.normed(hidden[0, 0]) @ (
        head.T if model.config.draft_vocab_size is None else head[model.draft_token_ids].T
    )


def reduced_head(is_causal, first=12, **changes):
    """A head that drafts 30 tokens from `first` on, which hold 0.8 of the text."""
    made = tiny_head(is_causal, draft_vocab_size=30, **changes)
    made[0].draft_token_ids.copy_(torch.arange(30) + first)
    made[0].log_coverage.fill_(math.log(0.8))
    return made


@KINDS
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 3, "num_kv_heads": 1},
        {"mask_token_id": 4, "num_kv_heads": 4},
        {"rope_scaling": (8.0, 1.0, 4.0, 64.0)},
        {"draft_vocab_size": 30},
        {"is_shifted": True},
    ],
)
def test_incremental_drafting_equals_the_training_forward_over_rounds(is_causal, count, scattered, changes):
    rng = np.random.default_rng(3)
    model, embed, head = tiny_head(is_causal, **changes)
    drafter = ParallelHeadDrafter(model, embed, head, num_candidates=6)
    requests = new_requests(drafter, count, rng, scattered)
    prefill_chunked(drafter, requests)
    for round_index in range(6):
        proposal = drafter.propose(make_inputs(requests, [(r.done, r.context) for r in requests]))
        for i, r in enumerate(requests):
            assert_proposal_matches(proposal, i, reference_logits(model, embed, head, r))
            r.done = r.context
            r.context += int(rng.integers(1, 6))  # a + 1 tokens: rejects and accepts
        if round_index == 3:  # preemption: the newest request loses its rows and is ingested again elsewhere
            r = requests[-1]
            drafter.release(r.name)
            r.slots = r.slots.flip(0)
            drafter.ingest(make_inputs([r], [(0, r.context - 1)]))
            r.done = r.context - 1


@KINDS
def test_a_batch_drafts_what_each_request_drafts_alone(is_causal):
    rng = np.random.default_rng(5)
    model, embed, head = tiny_head(is_causal, edge_rank=3)
    drafter = ParallelHeadDrafter(model, embed, head, num_candidates=6)
    requests = new_requests(drafter, 4, rng)
    together = drafter.propose(make_inputs(requests, [(0, r.context) for r in requests], 0.7))
    for i, r in enumerate(requests):
        alone = drafter.propose(make_inputs([r], [(0, r.context)], 0.7))
        assert alone.token_ids[0].tolist() == together.token_ids[i].tolist()
        assert torch.allclose(alone.logprobs[0], together.logprobs[i], atol=TOLERANCE)
        assert torch.allclose(alone.edge_logprobs[0], together.edge_logprobs[i], atol=TOLERANCE)


def test_drafting_leaves_only_the_rows_of_the_text_behind():
    rng = np.random.default_rng(1)
    model, embed, head = tiny_head()
    drafter = ParallelHeadDrafter(model, embed, head)
    (request,) = new_requests(drafter, 1, rng)
    inputs = make_inputs([request], [(0, request.context)])
    drafter.ingest(inputs)
    before = drafter.pool.clone()
    drafter.propose(inputs)
    assert torch.equal(drafter.pool[:, :60], before[:, :60])
    assert not before[:, request.slots[request.context :]].any()


def test_ingested_rows_equal_the_kernels_reference():
    rng = np.random.default_rng(1)
    model, embed, head = tiny_head(num_layers=3)
    drafter = ParallelHeadDrafter(model, embed, head)
    (request,) = new_requests(drafter, 1, rng, scattered=True)
    inputs = make_inputs([request], [(0, request.context)])
    drafter.ingest(inputs)
    layers = list(model.block_layers())
    cos, sin = rope_cos_sin(torch.arange(64), model.config.head_dim, model.config.rope_theta)
    expected = torch.zeros_like(drafter.pool)
    draft_ingest(
        features=inputs.new_features, fc=model.cond_proj.weight.detach().T, norm_weight=model.cond_norm.detach(),
        kv_weight=torch.cat([layer.kv_proj.weight.detach() for layer in layers]).T,
        k_norm_weight=torch.stack([layer.k_norm.detach() for layer in layers]), cos=cos, sin=sin,
        positions=inputs.new_positions, pool_rows=inputs.new_slots, pool=expected, eps=model.config.rms_eps,
    )  # fmt: skip
    assert torch.allclose(drafter.pool, expected, atol=1e-5)


@torch.no_grad()
def slot_states(model, embed, num_rows):
    """Hidden states of the slots of the same head with a block of `num_rows` slots."""
    config = dataclasses.replace(model.config, num_slots=num_rows)
    other = ParallelHeadModel(config)
    other.load_state_dict({k: v for k, v in model.state_dict().items() if k != "log_beta"}, strict=False)
    request = Request("r", np.random.default_rng(0), 30, 12, list(range(30)))
    batch = RowBatch(
        features=request.features[None], token_ids=torch.tensor(request.tokens)[None],
        is_output=torch.ones(1, 30, dtype=torch.bool), topk_ids=torch.zeros(1, 30, 1, dtype=torch.int64),
        topk_logprobs=torch.zeros(1, 30, 1), temperatures=torch.zeros(1),
    )  # fmt: skip
    return anchored_forward(other, batch, embed, torch.tensor([[12]]))[0, 0]


@KINDS
def test_only_a_causal_block_can_be_cut_without_changing_its_earlier_rows(is_causal):
    model, embed, _ = tiny_head(is_causal)
    whole, cut = slot_states(model, embed, 5), slot_states(model, embed, 3)
    assert torch.allclose(whole[:3], cut, atol=1e-5) == is_causal
    assert float((whole[:3] - cut).abs().max()) > 0.01 or is_causal


def test_logprobs_are_calibrated_by_temperature_class_and_slot():
    rng = np.random.default_rng(0)
    model, embed, head = tiny_head()
    with torch.no_grad():
        model.log_beta.copy_(torch.randn_like(model.log_beta) * 0.5)
    drafter = ParallelHeadDrafter(model, embed, head, num_candidates=6)
    (request,) = new_requests(drafter, 1, rng)
    logits = reference_logits(model, embed, head, request)
    for temperature, kind, divisor in ((0.0, 0, 1.0), (0.7, 1, 0.7)):
        proposal = drafter.propose(make_inputs([request], [(0, request.context)], temperature))
        assert_proposal_matches(proposal, 0, logits * model.log_beta[kind].exp()[:, None] / divisor)


@torch.no_grad()
def exact_edges(model, logits, token_ids, scale):
    """Corrected log-probabilities over the whole vocabulary, gathered: (S - 1, K, K)."""
    out = []
    for s in range(1, logits.shape[0]):
        corrected = (logits[s] + model.edge_bias(token_ids[s - 1])) * scale[s]  # (K, V)
        out.append(corrected.log_softmax(-1)[:, token_ids[s]])
    return torch.stack(out)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_edge_scores_are_the_corrected_probabilities_below_each_parent(temperature):
    rng = np.random.default_rng(0)
    model, embed, head = tiny_head(edge_rank=4)
    with torch.no_grad():
        model.edge_in.mul_(3)
        model.edge_out.mul_(3)
        model.log_beta.copy_(torch.randn_like(model.log_beta) * 0.3)
    drafter = ParallelHeadDrafter(model, embed, head, num_candidates=V)  # all candidates: no rest to assume about
    (request,) = new_requests(drafter, 1, rng)
    logits = reference_logits(model, embed, head, request)
    proposal = drafter.propose(make_inputs([request], [(0, request.context)], temperature))
    scale = model.log_beta[int(temperature > 0)].exp() / (temperature or 1.0)
    expected = exact_edges(model, logits, proposal.token_ids[0], scale)
    assert torch.allclose(proposal.edge_logprobs[0], expected, atol=1e-3)
    assert float((expected[:, 0] - expected[:, 1]).abs().max()) > 0.1, "the case must tell parents apart"
    few = ParallelHeadDrafter(model, embed, head, num_candidates=6)
    few.alloc(60)
    part = few.propose(make_inputs([request], [(0, request.context)], temperature))
    assert float(part.edge_logprobs.exp().sum(-1).max()) <= 1 + 1e-5


@KINDS
def test_a_reduced_vocabulary_proposes_target_ids_and_pays_for_coverage(is_causal):
    """Edges, too; a swap to weights that draft other tokens gathers their rows."""
    rng = np.random.default_rng(0)
    model, embed, head = reduced_head(is_causal, edge_rank=4)
    other = reduced_head(is_causal, first=20, seed=1, edge_rank=4)[0]
    drafter = ParallelHeadDrafter(model, embed, head, num_candidates=30)
    (request,) = new_requests(drafter, 1, rng)
    for one, first in ((model, 12), (other, 20)):
        drafter.load_state(one.state_dict())
        proposal = drafter.propose(make_inputs([request], [(0, request.context)]))
        logits = reference_logits(one, embed, head, request)
        draft_ids = proposal.token_ids - first
        expected = logits.log_softmax(-1).gather(-1, draft_ids[0]) + math.log(0.8)
        assert torch.allclose(proposal.logprobs[0], expected, atol=TOLERANCE)
        edges = exact_edges(one, logits, draft_ids[0], torch.ones(SLOTS)) + math.log(0.8)
        assert torch.allclose(proposal.edge_logprobs[0], edges, atol=1e-3)


@KINDS
@torch.no_grad()
def test_training_scores_a_drafted_token_as_serving_does(is_causal):
    """The loss of a text is minus the proposals' scores along it, apart from the share of tokens that are not drafted."""
    model, embed, head = reduced_head(is_causal, edge_rank=4)
    drafter = ParallelHeadDrafter(model, embed, head, num_candidates=30)
    (request,) = new_requests(drafter, 1, np.random.default_rng(0))
    begin, end = request.context, request.context + 14
    request.tokens = [12 + t % 30 for t in request.tokens]
    request.tokens[begin + 6] = 3  # outside: neither it nor what is behind it in a block can be drafted
    coverage, total, first_nll, count = math.log(0.8), 0.0, 0.0, 0
    for anchor in range(begin, end - 1):
        request.context = anchor
        proposal = drafter.propose(make_inputs([request], [(request.done, anchor)]))
        request.done, before = anchor, None
        for slot, token in enumerate(request.tokens[anchor + 1 : end][:SLOTS]):
            found = (proposal.token_ids[0, slot] == token).nonzero().flatten().tolist()
            if slot == 0:
                first_nll -= float(proposal.logprobs[0, 0, found[0]]) if found else math.log(0.2)
            if not found:
                break
            scores = proposal.logprobs[0, 0] if slot == 0 else proposal.edge_logprobs[0, slot - 1, before]
            before, count, total = found[0], count + 1, total + float(scores[found[0]]) - coverage
    trace = RequestTrace(
        request_id="r", bucket="b", temperature=0.0, prompt_len=begin, token_ids=request.tokens[:end],
        features=request.features[: end - 1], topk_ids=None, topk_logprobs=None, target_version="t",
    )  # fmt: skip
    for objective in ("cross_entropy", "forward_kl"):  # the same where the target is sure of its text
        config = ParallelLossConfig(
            objective=objective, decay_share=None, num_anchors=None, calibration_weight=0.0, edge_share=1.0
        )
        loss, report = parallel_training_loss(
            model, collate([trace]), TargetTables(embed, head), config, torch.Generator().manual_seed(0)
        )
        assert float(loss) == pytest.approx(-total / count, rel=1e-4)
        assert float(report["nll1"]) == pytest.approx(first_nll, rel=1e-4)
        assert int(report["rows"]) == end - 1 - begin


def test_a_correction_of_zero_changes_no_score():
    rng = np.random.default_rng(0)
    model, embed, head = tiny_head(edge_rank=4)
    with torch.no_grad():
        model.edge_out.zero_()
    drafter = ParallelHeadDrafter(model, embed, head, num_candidates=5)
    (request,) = new_requests(drafter, 1, rng)
    p = drafter.propose(make_inputs([request], [(0, request.context)]))
    assert torch.allclose(p.edge_logprobs, p.logprobs[:, 1:, None].expand_as(p.edge_logprobs), atol=1e-5)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made since it was entered, and the most that were alive at once."""

    def __init__(self):
        super().__init__()
        self.live, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.live = {p: (ref, size) for p, (ref, size) in self.live.items() if not ref.expired()}
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if storage.data_ptr() not in before:
                self.live[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, sum(size for _, size in self.live.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_weights_never_lie_in_memory_whole_beside_those_that_serve(dtype):
    model, embed, head = tiny_head(num_layers=12)
    drafter = ParallelHeadDrafter(model, embed, head, dtype=dtype)
    state = {k: v.to(dtype) if v.dim() == 2 else v for k, v in tiny_head(num_layers=12, seed=1)[0].state_dict().items()}
    with LiveBytes() as found:
        drafter.load_state(state)
    assert 0 < found.most < 0.5 * sum(4 * w.numel() for w in state.values())


def test_loading_other_weights_leaves_the_model_of_the_first_ones_alone():
    (model, embed, head), (other, _, _) = tiny_head(edge_rank=2), tiny_head(edge_rank=2, seed=1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    ParallelHeadDrafter(model, embed, head).load_state(other.state_dict())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_text_longer_than_the_first_tables_drafts_the_same():
    rng = np.random.default_rng(4)
    model, embed, head = tiny_head()
    drafter = ParallelHeadDrafter(model, embed, head, num_candidates=4)
    drafter.alloc(1300)
    request = Request("r", rng, 1300, 1290, list(range(1300)))
    proposal = drafter.propose(make_inputs([request], [(0, 1290)]))
    assert_proposal_matches(proposal, 0, reference_logits(model, embed, head, request))


def test_the_head_is_not_reentered():
    model, embed, head = tiny_head()
    drafter = ParallelHeadDrafter(model, embed, head)
    assert drafter.caps.is_product and drafter.caps.is_row_local and not drafter.caps.is_reentrant
    frontier = Frontier(request=torch.tensor([0]), slot=torch.tensor([0]), token_ids=torch.tensor([1]))
    with pytest.raises(NotImplementedError, match="one block"):
        drafter.expand(None, None, frontier)


def test_weights_and_configs_that_do_not_fit_are_refused():
    model, embed, head = tiny_head()
    target, state = FakeTarget(embed, head), model.state_dict()
    config = {"drafter_type": "jetspec", "target_version": "abc", **model.config.to_dict()}
    assert build_drafter(config, state, target).caps.name == "jetspec"
    for changes, message in (
        ({"drafter_type": "dflash"}, "is_causal"),
        ({"drafter_type": "specblock"}, "specblock|SpecBlock"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_layers": 3}, "missing"),
        ({"edge_rank": 2}, "missing"),
        ({"mask_token_id": 3}, "surplus"),
    ):
        with pytest.raises(DrafterMismatchError, match=message):
            build_drafter({**config, **changes}, state, target)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 3},
        {"num_slots": 0},
        {"edge_rank": 257},
        {"mask_token_id": V},
        {"num_layers": 0},
        {"corrects_first": True},
        {"draft_vocab_size": V + 1},
    ],
)
def test_settings_that_are_not_allowed_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes)) + "|num_heads"):
        ParallelHeadConfig(**{**SIZES, "is_causal": True, **changes})
