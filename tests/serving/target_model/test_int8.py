"""Claims of --dtype int8: the 8-bit form is a target of its own, served exactly, and its weights are in memory once."""

import pytest
import torch

from paceline.adapt.families.target_handle import load_target_handle
from paceline.bench.common.engine_run import build_engine, encode, load_named_drafter, load_target
from paceline.bench.common.lossless import LosslessChecker
from paceline.config import TREE_POLICIES, EngineConfig, TreeConfig
from paceline.errors import ConfigError
from paceline.kernels.cpu.library import ISA_VARIABLE, choose_isa
from paceline.paths import resolve_model
from paceline.serving.loading.families import fits_version
from paceline.serving.loading.target import read_target
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.target_model.int8 import Int8Linear, round_to_int8
from paceline.serving.target_model.kv_cache import PageAllocator
from paceline.serving.target_model.model import TargetModel
from tests.helpers.fakes import plain_logits, prefill, tiny_model, tiny_target, tiny_tokenizer
from tests.helpers.lossless import run_until_idle

needs_native = pytest.mark.skipif(choose_isa() is None, reason="needs the compiled forward")


def make_int8(kind="qwen3", dtype=torch.bfloat16, **shape) -> TargetModel:
    return TargetModel.from_model(tiny_model(kind, dtype=dtype, **shape), tiny_tokenizer(), is_int8=True)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_forward_and_modules_are_the_8_bit_form(kind, dtype):
    """Sizes that fill no panel; what is left is rounding to bfloat16."""
    shape = {"width": 48, "heads": 3, "kv_heads": 1, "head_dim": 16}
    target = make_int8(kind, dtype, **shape)
    exact = tiny_model(kind, dtype=dtype, **shape).float()
    round_to_int8(exact)
    errors = []
    for seed in range(8):
        tokens = torch.randint(3, 64, (20,), generator=torch.Generator().manual_seed(seed))
        expected = exact(tokens[None], use_cache=False).logits[0]
        got = prefill(target, target.new_kv_pool(8, 4, 0), PageAllocator(8, 4), "a", tokens.tolist()).logits
        modules = plain_logits(target, tokens.tolist())
        errors.append(torch.stack([(x - expected).norm() / expected.norm() for x in (got, modules)]))
    forward_error, module_error = torch.stack(errors).mean(0).tolist()
    assert forward_error < 2e-2
    assert module_error < (1e-5 if dtype == torch.float32 else 5e-2), "modules round every step to bfloat16"


@needs_native
def test_linear_weights_are_kept_once_and_in_8_bits():
    target, plain = make_int8(), tiny_target(dtype=torch.bfloat16)
    linears = [m for m in plain.model.modules() if isinstance(m, torch.nn.Linear)]
    assert sum(isinstance(m, Int8Linear) for m in target.model.modules()) == len(linears) == 6 * 7 + 1
    left = sum(p.numel() for p in target.model.parameters())
    assert left == target.num_weights - sum(m.weight.numel() for m in linears)
    assert target.num_weights == plain.num_weights and torch.equal(target.head_weight, plain.head_weight)


@needs_native
def test_it_is_a_target_of_its_own_that_takes_its_checkpoints_drafters(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    version = read_target(tmp_path).version
    target, handle = read_target(tmp_path, dtype="int8"), load_target_handle(tmp_path, dtype="int8")
    assert target.version == handle.version == f"{version}-int8" != version
    assert fits_version(version, target.version) and fits_version(target.version, target.version)
    assert not fits_version(target.version, version) and not fits_version("other", target.version)


@pytest.mark.parametrize(
    ("kind", "isa", "device", "rule"),
    [
        ("qwen3", "none", "cpu", "dtype must not be int8 without the compiled forward"),
        ("qwen3_moe", "", "cpu", "dtype must be int8 only for a dense Llama or Qwen3 on the CPU"),
        ("qwen3", "", "cuda", "dtype must not be int8 on cuda"),
    ],
)
def test_where_there_is_no_8_bit_forward_the_error_says_what_to_do(kind, isa, device, rule, tmp_path, monkeypatch):
    if not isa and choose_isa() is None:
        pytest.skip("needs the compiled forward")
    monkeypatch.setenv(ISA_VARIABLE, isa)
    tiny_model(kind).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{rule}.*choose"):
        read_target(tmp_path, dtype="int8", device=device)


@pytest.fixture(scope="module")
def bundled_int8() -> TargetModel:
    return load_target("bundled", "int8", drafters=["specblock"])


def answers(target: TargetModel, drafter: str, policy: str) -> dict[tuple[int, ...], list[int]]:
    tree = TreeConfig(max_draft_tokens=8, policy=policy)
    engine = build_engine(
        target, load_named_drafter(drafter, target), EngineConfig(max_running=3, kv_bytes=2**26, tree=tree)
    )
    found: dict[tuple[int, ...], list[int]] = {}
    params = SamplingParams(max_tokens=40, temperature=0.0)
    for i, text in enumerate(("def add(a, b):", "Q: What is 7 times 8?\nA:", '{"name": "mocha", "size":', "The")):
        ids = tuple(encode(target, text))
        request = GenerationRequest(request_id=str(i), prompt_token_ids=ids, params=params)
        engine.submit(request, lambda e, ids=ids: found.setdefault(ids, []).extend(e.token_ids))
    run_until_idle(engine)
    return found


@needs_native
@pytest.mark.parametrize("policy", TREE_POLICIES)
def test_greedy_text_is_that_of_plain_decoding_under_every_tree_policy(policy, bundled_int8):
    plain = answers(bundled_int8, "none", "adaptive")
    assert answers(bundled_int8, "specblock", policy) == plain and sum(map(len, plain.values())) > 100


@needs_native
def test_the_lossless_check_knows_the_8_bit_form(bundled_int8):
    found = list(answers(bundled_int8, "none", "adaptive").items())
    ours = LosslessChecker(resolve_model("bundled"), is_int8=True).check(found)
    theirs = LosslessChecker(resolve_model("bundled")).check(found)
    assert ours.mismatches == 0 and ours.largest_gap < theirs.largest_gap
