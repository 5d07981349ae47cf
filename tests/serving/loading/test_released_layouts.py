"""Released EAGLE-3, DFlash, JetSpec and SpecBlock files draft what their networks compute, or are refused by name."""

import json

import numpy as np
import pytest
import torch

from paceline.adapt.families.parallel_head import ParallelLossConfig, anchored_forward, parallel_training_loss
from paceline.adapt.families.row_batch import collate
from paceline.adapt.families.target_handle import TargetTables
from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.interface import Frontier
from paceline.serving.loading.families import build_model, load_drafter, read_drafter_files, save_drafter
from paceline.serving.loading.released import wanted_tap_layers
from paceline.serving.sampling.request import RequestTrace
from tests.helpers import released
from tests.helpers.drafters import Request, make_inputs, text_batch
from tests.helpers.released import BLOCK, DRAFT_VOCAB, HIDDEN, TAPS, VOCAB, make_target, write

TOLERANCE = 1e-4  # fp32, other reduction orders
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
MAKERS = {
    "eagle3": released.eagle3_files,
    "speculators": released.speculators_files,
    "dflash": released.parallel_head_files,
    "jetspec": lambda seed=0: released.parallel_head_files(seed, is_causal=True),
    "dspark": released.dspark_files,
    "specblock": released.specblock_files,
}
ALL = pytest.mark.parametrize("kind", sorted(MAKERS))


def load(folder, target=None, **options):
    return load_drafter(folder, target or make_target(), dtype=torch.float32, num_candidates=VOCAB, **options)


def request_of(drafter, seed=1, context=9):
    drafter.alloc(40)
    request = Request("r", np.random.default_rng(seed), 40, context, list(range(40)), 3 * HIDDEN)
    return request, make_inputs([request], [(0, context)])


def assert_slot(token_ids, logprobs, logits, ids):
    """One slot's candidates (K,) are the best of the reference logits, (V,) or (Vd,) with target ids `ids`."""
    wanted = torch.full((VOCAB,), float("-inf")).index_put_((ids,), logits.log_softmax(-1))
    assert token_ids.unique().numel() == token_ids.numel()
    assert torch.allclose(logprobs, wanted[token_ids], atol=TOLERANCE)
    assert torch.allclose(logprobs, wanted.topk(len(logprobs)).values, atol=TOLERANCE)


def target_ids(tensors):
    return tensors["d2t"] + torch.arange(DRAFT_VOCAB)


@pytest.mark.parametrize(("kind", "scaling"), [("eagle3", None), ("speculators", None), ("eagle3", SCALING)])
def test_eagle3_drafts_what_the_released_network_computes(tmp_path, kind, scaling):
    values, tensors = MAKERS[kind]()
    values["rope_scaling"] = scaling
    drafter = load(write(tmp_path, values, tensors))
    request, inputs = request_of(drafter)
    assert drafter.caps.name == "eagle3" and drafter.caps.num_candidates == DRAFT_VOCAB
    reference = released.Eagle3Forward(tensors, make_target().embed_weight, kind == "speculators", scaling)
    path, proposal = [], drafter.propose(inputs)
    for level in range(4):
        logits = reference.logits(request.features[:9], torch.tensor(request.tokens[:10]), path)
        assert_slot(proposal.token_ids[0, 0], proposal.logprobs[0, 0], logits[-1], target_ids(tensors))
        path.append(int(proposal.token_ids[0, 0, level]))
        front = Frontier(request=torch.tensor([0]), slot=torch.tensor([0]), token_ids=torch.tensor(path[-1:]))
        proposal = drafter.expand(inputs, proposal, front)


@pytest.mark.parametrize(("is_causal", "scaling"), [(True, None), (False, None), (False, SCALING)])
def test_a_parallel_head_drafts_what_the_released_network_computes(tmp_path, is_causal, scaling):
    values, tensors = released.parallel_head_files(is_causal=is_causal)
    if scaling is not None:
        values["rope_parameters"] = {**scaling, "rope_theta": values.pop("rope_theta")}
    drafter = load(write(tmp_path, values, tensors))
    request, inputs = request_of(drafter)
    assert drafter.caps.name == ("jetspec" if is_causal else "dflash") and drafter.caps.num_slots == BLOCK - 1
    proposal = drafter.propose(inputs)
    features, anchor = request.features[:9], request.tokens[9]
    logits = released.parallel_head_logits(tensors, make_target(), features, anchor, is_causal, scaling)[1:]
    for slot in range(BLOCK - 1):
        assert_slot(proposal.token_ids[0, slot], proposal.logprobs[0, slot], logits[slot], torch.arange(VOCAB))


@pytest.mark.parametrize("has_wrapper", [False, True])
def test_dspark_drafts_what_the_released_network_computes(tmp_path, has_wrapper):
    """Every row of the block drafts, the anchor's too; each slot's bias follows the token before it on its path."""
    drafter = load(write(tmp_path, *released.dspark_files(has_wrapper=has_wrapper)))
    _, tensors = released.dspark_files()
    request, inputs = request_of(drafter)
    c = drafter.config
    assert (drafter.caps.name, drafter.caps.num_slots, c.edge_rank) == ("dflash", BLOCK, released.MARKOV_RANK)
    proposal = drafter.propose(inputs)
    features, path, parent = request.features[:9], [request.tokens[9]], 0
    for slot in range(BLOCK):
        logits = released.dspark_logits(tensors, make_target(), features, path + [0] * (BLOCK - len(path)))[slot]
        token_ids = proposal.token_ids[0, slot]
        scores = proposal.logprobs[0, 0] if slot == 0 else proposal.edge_logprobs[0, slot - 1, parent]
        assert torch.allclose(scores, logits.log_softmax(-1)[token_ids], atol=TOLERANCE)
        parent = (slot * 7 + 3) % VOCAB  # any candidate of this slot
        path.append(int(token_ids[parent]))


def test_a_heads_confidence_is_not_kept_and_training_goes_on_as_it_was_released(tmp_path):
    config, state = read_drafter_files(write(tmp_path, *released.dspark_files()), make_target())
    assert not any("confidence" in name for name in state) and config["is_shifted"] and config["corrects_first"]
    model = build_model(config, state)
    rng = np.random.default_rng(1)
    request = Request("r", rng, 20, 9, list(range(20)), 3 * HIDDEN)
    batch = text_batch(request.features, request.tokens)
    with torch.no_grad():
        hidden = anchored_forward(model, batch, make_target().embed_weight, torch.tensor([[9]]))[0, 0]
        got = model.normed(hidden) @ make_target().head_weight.T + model.edge_bias(torch.tensor(request.tokens[9:14]))
    _, tensors = released.dspark_files()
    expected = released.dspark_logits(tensors, make_target(), request.features[:9], request.tokens[9:14])
    assert torch.allclose(got, expected, atol=TOLERANCE)
    trace = RequestTrace(
        request_id="r", bucket="b", temperature=0.0, prompt_len=18, token_ids=request.tokens, features=request.features,
        topk_ids=None, topk_logprobs=None, target_version="t",
    )  # fmt: skip
    tables = TargetTables(make_target().embed_weight, make_target().head_weight)
    loss, report = parallel_training_loss(
        model, collate([trace]), tables, ParallelLossConfig(calibration_weight=0.0), torch.Generator()
    )
    last = released.dspark_logits(tensors, make_target(), request.features[:18], [request.tokens[18], 0, 0, 0, 0])[0]
    wanted = -float(last.log_softmax(-1)[request.tokens[19]])
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-4) == float(report["nll1"])


def test_specblock_drafts_both_blocks_and_widths_as_the_released_network(tmp_path):
    values, tensors = released.specblock_files()
    drafter = load_drafter(write(tmp_path, values, tensors), make_target(), dtype=torch.float32)
    request, inputs = request_of(drafter)
    ids, branching = target_ids(tensors), torch.tensor([2, 4, 6, 4])
    first = drafter.propose(inputs)
    leaves = [(0, 3), (1, 11), (2, 4), (3, 40)]
    front = Frontier(
        request=torch.zeros(4, dtype=torch.int64), slot=torch.tensor([s for s, _ in leaves]), token_ids=torch.tensor([t for _, t in leaves]),
    )  # fmt: skip
    second = drafter.expand(inputs, first, front)
    reference = released.SpecBlockForward(tensors, make_target().embed_weight)
    runs = reference.run(request.features[:9], torch.tensor(request.tokens[:10]), leaves)
    seen = set()
    for node, (logits, classes) in enumerate(runs):
        proposal, at = (first, 0) if node == 0 else (second, node - 1)
        for slot in range(4):
            assert_slot(proposal.token_ids[at, slot], proposal.logprobs[at, slot], logits[slot], ids)
        assert torch.equal(proposal.widths.view(-1, 4)[at, 1:].long(), branching[classes][1:])
        seen |= set(classes.tolist())
    assert len(seen) > 1  # the rank head decides something here


@ALL
def test_shards_and_bfloat16_files_load_as_the_same_numbers(tmp_path, kind):
    values, tensors = MAKERS[kind]()
    narrow = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
    wide = {k: v.float() if v.is_floating_point() else v for k, v in narrow.items()}
    if kind == "speculators":
        wide["embed_tokens.weight"] = tensors["embed_tokens.weight"]  # a copy is compared in its own number type
    config, state = read_drafter_files(write(tmp_path / "a", values, wide), make_target())
    again, other = read_drafter_files(write(tmp_path / "b", values, narrow, shards=3), make_target())
    assert config == again and config["tap_layers"] == list(TAPS)
    assert set(state) == set(other) and all(torch.equal(state[k], other[k]) for k in state)


@ALL
def test_imported_weights_are_saved_in_our_layout_and_draft_the_same(tmp_path, kind):
    folder = write(tmp_path / "released", *MAKERS[kind]())
    target = make_target()
    config, state = read_drafter_files(folder, target)
    save_drafter(tmp_path / "ours", build_model(config, state), target.version, tap_layers=config["tap_layers"])
    proposals = []
    for path in (folder, tmp_path / "ours"):
        drafter = load(path)
        proposals.append(drafter.propose(request_of(drafter)[1]))
    assert wanted_tap_layers(tmp_path / "ours") == TAPS
    assert all(torch.equal(getattr(proposals[0], n), getattr(proposals[1], n)) for n in ("token_ids", "logprobs"))


@ALL
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 60}, "vocabulary 50, this target has 60"),
        ({"embed_weight": torch.zeros(VOCAB, 16), "feature_size": 48}, "target's hidden size 16, got 8"),
        ({"tap_layers": (0, 2, 4)}, r"load it with tap_layers=\(1, 5, 8\)"),
    ],
)
def test_another_target_is_refused_and_the_message_says_what_to_do(tmp_path, kind, change, message):
    folder = write(tmp_path, *MAKERS[kind]())
    with pytest.raises(DrafterMismatchError, match=message):
        load(folder, make_target(**change))


@ALL
@pytest.mark.parametrize("fault", ["missing", "bias", "shape", "nan", "whole"])
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, kind, fault):
    values, tensors = MAKERS[kind]()
    name = next(n for n in tensors if n.endswith("mlp.up_proj.weight"))
    ours = name.replace("midlayer.", "layers.0.")
    if fault == "missing":
        del tensors[name]
    elif fault == "bias":
        tensors[name.replace("weight", "bias")] = torch.zeros(3)
    elif fault == "shape":
        tensors[name] = torch.zeros(3, HIDDEN)
    elif fault == "whole":
        tensors[name] = tensors[name].to(torch.int8)
    else:
        tensors[name][0, 0] = float("nan")
    message = {
        "whole": f"{ours} must hold floating-point numbers, got torch.int8: quantised weights",
        "missing": f"must hold {ours}", "bias": "biases in projections cannot be served", "shape": rf"{ours} must be \(12, 8\), got \(3, 8\)",
        "nan": f"{ours} must be finite",
    }[fault]  # fmt: skip
    with pytest.raises(DrafterMismatchError, match=message):
        load(write(tmp_path, values, tensors))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        *((k, {"attention_bias": True}, "biases in attention") for k in ("eagle3", "dflash", "specblock")),
        *((k, {"hidden_act": "gelu"}, "another activation") for k in ("eagle3", "dflash", "specblock")),
        *((k, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "'linear'.*scaled rotary") for k in ("eagle3", "dflash", "specblock")),
        *((k, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "must hold factor, low_freq_factor") for k in ("eagle3", "dflash")),
        ("specblock", {"rope_scaling": SCALING}, "'llama3'.*scaled rotary"),
        ("eagle3", {"rope_scaling": {**SCALING, "high_freq_factor": 0.5}}, "low before high"),
        *((k, {"rope_parameters": {"rope_type": "yarn"}}, "'yarn'.*scaled rotary") for k in ("eagle3", "dflash")),
        *((k, {"quantization_config": {"bits": 4}}, "quantised") for k in ("eagle3", "dflash")),
        *((k, {"hidden_size": None}, "hidden_size in config.json must be a whole number") for k in ("eagle3", "dflash", "specblock")),
        *((k, {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "by the kind of layer") for k in ("eagle3", "dflash", "specblock")),
        *((k, {"rope_parameters": {"rope_theta": 5e3, "partial_rotary_factor": 0.5}}, "a part of a head") for k in ("eagle3", "dflash", "specblock")),
        *((k, {"hidden_act": None, "hidden_activation": "gelu"}, "another activation") for k in ("eagle3", "dflash", "specblock")),
        *((k, {"sliding_window": 8, "layer_types": ["sliding_attention"]}, "sliding window") for k in ("eagle3", "dflash", "specblock")),
        *((k, {"rope_scaling": "yarn"}, "rope_scaling in config.json must be an object, got 'yarn'") for k in ("eagle3", "dflash", "specblock")),
        ("eagle3", {"eagle_config": [1]}, "eagle_config in config.json must be an object"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a"]}}, "must be a list of whole numbers"),
        ("dflash", {"dflash_config": [1]}, "dflash_config in config.json must be an object"),
        ("dflash", {"dflash_config": {"mask_token_id": 49, "target_layer_ids": "158"}}, "must be a list of whole numbers"),
        ("speculators", {"transformer_layer_config": [1]}, "transformer_layer_config in config.json must be an object"),
        ("eagle3", {"num_hidden_layers": 2}, "more than one layer"),
        ("eagle3", {"sliding_window": 512}, "layers with a sliding window"),
        ("eagle3", {"partial_rotary_factor": 0.5}, "a part of a head"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5]}}, r"fuses 3 target layers, tap_layers are \(1, 5\)"),
        ("eagle3", {"target_hidden_size": 16}, "target_hidden_size must be the target's hidden size 8, got 16"),
        ("eagle3", {"norm_before_fc": True}, "norms before the fusion"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 12]}}, "the target has layers 0..11"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 5, 8]}}, r"load it with tap_layers=\(0, 5, 8\)"),
        ("eagle3", {"rms_norm_eps": "x"}, "rms_norm_eps in config.json must be a number"),
        ("eagle3", {"num_attention_heads": 3, "num_key_value_heads": 2}, "num_heads must be a multiple"),
        ("speculators", {"norm_before_residual": None}, "norm_before_residual must be true or false"),
        ("dflash", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ("dflash", {"draft_vocab_size": 30}, "must hold d2t"),
        ("dflash", {"sample_from_anchor": True}, "an anchor's row that drafts"),
        ("dflash", {"block_size": 64}, r"num_slots must be in \[1, 31\]"),
        *(("dflash", {"dflash_config": {"mask_token_id": 49, "target_layer_ids": list(TAPS), **c}}, m) for c, m in (
            ({"mask_token_id": None}, "mask_token_id in config.json must be an id"),
            ({"mask_token_id": 50}, r"must be an id in \[0, 50\), got 50"),
            ({"projector_type": "domino"}, "reads the whole path"), ({"markov_head_type": "rnn"}, "more than the previous token"),
            ({"markov_head_type": "gated"}, "more than the previous token"),
            ({"shift_label": True}, "the token after their own"),
            ({"attention_mode": "mla"}, "only gqa and mha"),
            ({"target_hidden_size": 16}, "target_hidden_size must be"),
        )),
        ("specblock", {"rank_classes": 5}, "another number of rank classes"),
        ("specblock", {"diffspec_draft_token_num": 17}, r"num_slots must be in \[1, 16\]"),
    ],
)  # fmt: skip
def test_settings_that_our_networks_lack_are_refused_by_the_name_of_the_feature(tmp_path, kind, changes, message):
    values, tensors = MAKERS[kind]()
    with pytest.raises(DrafterMismatchError, match=message):
        load(write(tmp_path, {**values, **changes}, tensors))


@pytest.mark.parametrize("kind", ["eagle3", "specblock"])
@pytest.mark.parametrize("fault", ["no d2t", "beyond", "twice", "t2d", "float"])
def test_a_reduced_vocabulary_that_contradicts_itself_is_refused(tmp_path, kind, fault):
    values, tensors = MAKERS[kind]()
    if fault == "no d2t":
        del tensors["d2t"]
    elif fault == "beyond":
        tensors["d2t"][-1] = VOCAB
    elif fault == "twice":
        tensors["d2t"][1] = tensors["d2t"][0] - 1
    elif fault == "t2d":
        tensors["t2d"] = ~tensors["t2d"]
    else:
        tensors["d2t"] = tensors["d2t"].float()
    message = {"no d2t": "must hold d2t", "t2d": "t2d must mark", "float": "whole numbers"}.get(fault, "different ids")
    with pytest.raises(DrafterMismatchError, match=message):
        load(write(tmp_path, values, tensors))


def test_a_full_draft_vocabulary_needs_no_map(tmp_path):
    values, tensors = released.eagle3_files()
    tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    tensors["d2t"], tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.int64), torch.ones(VOCAB, dtype=torch.bool)
    config, _ = read_drafter_files(write(tmp_path, {**values, "draft_vocab_size": VOCAB}, tensors), make_target())
    assert config["draft_vocab_size"] is None


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "specblock"])
def test_a_copy_of_the_targets_embedding_is_dropped_and_another_one_refused(tmp_path, kind):
    values, tensors = MAKERS[kind]()
    name = "input_layer.embed_tokens.weight" if kind == "specblock" else "embed_tokens.weight"
    load(write(tmp_path / "same", values, {**tensors, name: make_target().embed_weight.clone()}))
    with pytest.raises(DrafterMismatchError, match="a token embedding of its own cannot be served"):
        load(write(tmp_path / "other", values, {**tensors, name: torch.zeros(VOCAB, HIDDEN)}))


def test_an_output_head_of_its_own_is_refused_for_a_parallel_head(tmp_path):
    values, tensors = released.parallel_head_files()
    head = make_target().head_weight
    load(write(tmp_path / "same", values, {**tensors, "lm_head.weight": head.clone()}))
    with pytest.raises(DrafterMismatchError, match="an output head of its own cannot be served"):
        load(write(tmp_path / "other", values, {**tensors, "lm_head.weight": head + 1}))


def speculators_head_files(seed=0):
    """A DFlash head as `speculators` writes it: nested settings, layers counted from 1, an output head of few tokens."""
    flat, tensors = released.parallel_head_files(seed)
    own, nested = flat.pop("dflash_config"), {k: v for k, v in flat.items() if k not in ("architectures", "block_size")}
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
    values = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "block_size": BLOCK,
        "mask_token_id": own["mask_token_id"], "aux_hidden_state_layer_ids": [t + 1 for t in own["target_layer_ids"]],
        "draft_vocab_size": DRAFT_VOCAB, "sample_from_anchor": False, "transformer_layer_config": nested,
    }  # fmt: skip
    tables = {"d2t": ids - torch.arange(DRAFT_VOCAB), "lm_head.weight": make_target().head_weight[ids].clone()}
    return values, {**tensors, **tables}


def test_a_parallel_head_of_speculators_drafts_its_few_tokens(tmp_path):
    values, tensors = speculators_head_files()
    drafter = load(write(tmp_path / "a", values, tensors))
    request, inputs = request_of(drafter)
    assert wanted_tap_layers(tmp_path / "a") == TAPS and drafter.caps.num_slots == BLOCK - 1
    proposal = drafter.propose(inputs)
    logits = released.parallel_head_logits(tensors, make_target(), request.features[:9], request.tokens[9], False)[1:]
    ids = target_ids(tensors)
    for slot in range(BLOCK - 1):
        assert_slot(proposal.token_ids[0, slot], proposal.logprobs[0, slot], logits[slot][ids], ids)
    with pytest.raises(DrafterMismatchError, match="an output head of its own cannot be served"):
        load(write(tmp_path / "b", values, {**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1}))
    with pytest.raises(DrafterMismatchError, match="must be"):
        load(write(tmp_path / "c", values, {**tensors, "d2t": tensors["d2t"][:-1]}))


class Bomb:
    """Runs code where it is unpickled carelessly."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_learned_mask_vector_is_read(tmp_path):
    """The file that vLLM takes it from, a bare vector or one with the token that it replaces; never that token's row."""
    values, tensors = released.parallel_head_files()
    vector = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(4))
    target = make_target()
    embed = target.embed_weight.clone()
    embed[released.MASK_ID] = vector
    for name, held in (("bare", vector[None]), ("named", {"mask_token_id": released.MASK_ID, "embedding": vector})):
        folder = write(tmp_path / name, values, tensors)
        torch.save(held, folder / "mask_embedding.pt")
        drafter = load(folder)
        request, inputs = request_of(drafter)
        proposal = drafter.propose(inputs)
        replaced = make_target(embed_weight=embed)
        logits = released.parallel_head_logits(tensors, replaced, request.features[:9], request.tokens[9], False)[1:]
        for slot in range(BLOCK - 1):
            assert_slot(proposal.token_ids[0, slot], proposal.logprobs[0, slot], logits[slot], torch.arange(VOCAB))


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (Bomb, "nothing that runs code"),
        ({"embedding": [1.0] * 9}, r"mask_embedding must be \(8,\), got \(9,\)"),
        (torch.full((HIDDEN,), float("nan")), "mask_embedding must be finite"),
        ({"mask_token_id": 3, "embedding": torch.zeros(HIDDEN)}, "must stand for mask_token_id 49 of config.json, got one for 3"),
        ({"weights": 1}, "must hold the embedding of the mask"),
        (None, "must hold the embedding of the mask"),
        (torch.zeros(1 << 19), "2098.* bytes are more than one vector has"),
        (b"not a file of torch", "must hold the embedding of the mask"),
    ],
    ids=["code", "shape", "nan", "token", "no vector", "nothing", "long", "bytes"],
)  # fmt: skip
def test_a_mask_file_that_is_none_is_refused_in_one_sentence_and_runs_nothing(tmp_path, held, message):
    folder = write(tmp_path / "release", *released.parallel_head_files())
    path = folder / "mask_embedding.pt"
    if isinstance(held, bytes):
        path.write_bytes(held)
    else:
        torch.save(Bomb(tmp_path / "ran") if held is Bomb else held, path)
    with pytest.raises(DrafterMismatchError, match=message):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_mask_vector_of_a_network_without_masks_is_refused(tmp_path):
    folder = write(tmp_path, *released.eagle3_files())
    torch.save(torch.zeros(HIDDEN), folder / "mask_embedding.pt")
    with pytest.raises(DrafterMismatchError, match="a learned mask vector cannot be served"):
        load(folder)


def test_unknown_layouts_and_eagle1_are_refused(tmp_path):
    values, tensors = released.eagle3_files()
    old = {k: v for k, v in tensors.items() if "hidden_norm" not in k}
    with pytest.raises(DrafterMismatchError, match="EAGLE-1 or EAGLE-2"):
        load(write(tmp_path / "old", values, old))
    with pytest.raises(DrafterMismatchError, match="layout of SpecBlock, EAGLE-3, DFlash or JetSpec"):
        load(write(tmp_path / "none", values, {"x": torch.zeros(1)}))


def test_pickled_weights_are_refused_with_the_way_to_convert_them(tmp_path):
    values, tensors = released.eagle3_files()
    folder = write(tmp_path, values, tensors)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DrafterMismatchError, match=r"must hold model.safetensors or"):
        load(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(DrafterMismatchError, match=r"must be safetensors, got pytorch_model.bin.*save_file"):
        load(folder)


def test_damaged_and_missing_files_are_refused(tmp_path):
    values, tensors = released.eagle3_files()
    folder = write(tmp_path / "a", values, tensors)
    (folder / "model.safetensors").write_bytes(b"123456789")
    with pytest.raises(DrafterMismatchError, match="readable safetensors"):
        load(folder)
    folder = write(tmp_path / "b", values, tensors, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DrafterMismatchError, match=r"missing .*00002-of-00002"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x.safetensors"}}')
    with pytest.raises(DrafterMismatchError, match=r"missing .*\.\./x"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(DrafterMismatchError, match="weight_map"):
        load(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(DrafterMismatchError, match=r"must hold|JSON object"):
        load(folder)


def test_a_release_without_its_target_is_to_be_imported_first(tmp_path):
    folder = write(tmp_path, *released.eagle3_files())
    with pytest.raises(DrafterMismatchError, match="paceline import-drafter"):
        read_drafter_files(folder)


def test_taps_are_read_from_every_way_in_which_releases_write_them(tmp_path):
    values, tensors = released.parallel_head_files()
    assert wanted_tap_layers(write(tmp_path, values, tensors)) == TAPS
    for config, taps in (
        ({"block_size": 8, "num_hidden_layers": 5, "num_target_layers": 36}, (1, 9, 17, 25, 33)),
        ({"block_size": 8, "num_hidden_layers": 1, "num_target_layers": 36}, (18,)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}}, (1, 46, 90)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, (1, 17, 32)),
        ({"draft_vocab_size": 8}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert wanted_tap_layers(tmp_path) == taps


def test_windows_that_are_switched_off_are_no_obstacle(tmp_path):
    values, tensors = released.eagle3_files()
    load(write(tmp_path / "e", {**values, "sliding_window": 4096, "use_sliding_window": False}, tensors))
    values, tensors = released.parallel_head_files()
    load(write(tmp_path / "d", {**values, "sliding_window": 4096}, tensors))


def test_eagle3_may_fuse_more_than_three_layers(tmp_path):
    values, tensors = released.eagle3_files()
    tensors["fc.weight"] = torch.randn(HIDDEN, 5 * HIDDEN)
    with pytest.raises(DrafterMismatchError, match=r"fuses 5 target layers.*--taps"):
        load(write(tmp_path, values, tensors))
    values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5, 7, 9]}
    target = make_target(tap_layers=(1, 3, 5, 7, 9), feature_size=5 * HIDDEN)
    assert load(write(tmp_path, values, tensors), target).config.feature_size == 5 * HIDDEN
