"""A target split over two ranks gives what the whole target gives, forward by forward and through the engine."""

import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from paceline.config import EngineConfig, TreeConfig
from paceline.errors import ConfigError
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.target import read_target
from paceline.serving.loading.tensor_parallel import Order, Orders, check_split, drop_tables, load_parallel
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.target_model.kv_cache import PageAllocator
from tests.helpers.fakes import prefill, tiny_model, tiny_target, tiny_tokenizer
from tests.helpers.scripted_drafters import OracleDrafter

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # float32 sums in another order
NUM_TOKENS = 10


def generate(target, drafter, prompts):
    config = EngineConfig(
        max_running=4, kv_bytes=16 * 2**20, page_tokens=4, max_context_tokens=96,
        tree=TreeConfig(max_draft_tokens=4, policy="fixed"),
    )  # fmt: skip
    engine = Engine(target, DrafterSlots(drafter) if drafter is not None else DrafterSlots(), config)
    tokens = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        params = SamplingParams(temperature=0.8, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.submit(
            GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params),
            lambda e: tokens[e.request_id].extend(e.token_ids),
        )
    while not engine.is_idle:
        engine.step()
    return tokens, engine.stats()["num_rounds"]


def test_two_ranks_compute_what_one_does(tmp_path):
    torch.manual_seed(0)
    model = tiny_model("qwen3", layers=3)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    whole = read_target(tmp_path, device="cpu", fast_path=False)
    split, ranks = load_parallel(tmp_path, size=2, device="cpu")
    try:
        assert (split.num_heads, split.num_kv_heads) == (whole.num_heads // 2, whole.num_kv_heads // 2)
        assert split.kv_row_bytes == whole.kv_row_bytes // 2 and split.version == whole.version
        torch.testing.assert_close(split.embed_weight, whole.embed_weight)
        tokens = torch.randint(3, 64, (21,), generator=torch.Generator().manual_seed(0)).tolist()
        outputs = []
        for target in (whole, split):
            kv, pages = target.new_kv_pool(8, 4, 0), PageAllocator(8, 4)
            outputs.append([prefill(target, kv, pages, "a", tokens[i : i + 7], i) for i in range(0, 21, 7)])
        for expected, got in zip(*outputs, strict=True):
            torch.testing.assert_close(got.logits, expected.logits, **TOLERANCE)
            torch.testing.assert_close(got.features, expected.features, **TOLERANCE)
        prompts = {"a": tokens[:5], "b": tokens[5:18], "c": tokens[3:6]}
        plain, _ = generate(whole, None, prompts)
        texts = {name: [*prompts[name], *plain[name]] for name in prompts}
        assert generate(split, None, prompts)[0] == plain
        drafted, num_rounds = generate(split, OracleDrafter(texts, num_slots=4), prompts)
        assert drafted == plain and num_rounds < NUM_TOKENS, "commits reached both ranks: accepted drafts stay right"
    finally:
        ranks.close()


def test_a_rank_that_does_not_draft_gives_up_the_whole_tables_and_computes_the_same():
    target = tiny_target(layers=2)
    target.embed_weight, target.head_weight = (
        target.embed_weight.clone(),
        target.head_weight.clone(),
    )  # as of a split one
    tables = [weakref.ref(target.embed_weight), weakref.ref(target.head_weight)]
    logits = []
    for _ in range(2):
        kv, pages = target.new_kv_pool(4, 4, 0), PageAllocator(4, 4)
        logits.append(prefill(target, kv, pages, "a", [5, 6, 7], 0).logits)
        drop_tables(target)
    assert torch.equal(*logits) and [table() for table in tables] == [None, None]


def test_targets_that_cannot_be_split_are_refused():
    model = tiny_model("qwen3")
    check_split(model, 2)
    with pytest.raises(ConfigError, match="2 KV heads, got 4"):
        check_split(model, 4)
    with pytest.raises(ConfigError, match="4 attention heads, got 3"):
        check_split(model, 3)
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8))
    with pytest.raises(ConfigError, match="must be 1 for gpt2"):
        check_split(other, 2)


def test_orders_arrive_in_order_and_a_rank_without_orders_waits():
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    sent, taken = Orders(server), Orders(dist.TCPStore("127.0.0.1", server.port, 2, is_master=False))
    started, got = threading.Event(), []

    def wait():
        started.set()
        got.append(taken.take(wait_s=0.01))

    thread = threading.Thread(target=wait)
    thread.start()
    assert started.wait(5)
    thread.join(0.1)
    assert thread.is_alive() and not got, "several waits without an order"
    sent.put(Order.FORWARD, [3, 1, 7, -1, 2])
    thread.join(5)
    sent.put(Order.STOP, [])
    assert got == [(Order.FORWARD, [3, 1, 7, -1, 2])] and taken.take() == (Order.STOP, [])
