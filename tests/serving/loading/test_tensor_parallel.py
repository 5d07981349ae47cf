"""A target split over two ranks gives what the whole target gives, forward by forward and through the engine."""

import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from paceline.config import EngineConfig, TreeConfig
from paceline.errors import ConfigError, RankError
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading import tensor_parallel
from paceline.serving.loading.target import read_target
from paceline.serving.loading.tensor_parallel import (
    LOST_RANK_EXIT,
    Leader,
    Order,
    Orders,
    check_split,
    drop_tables,
    follow,
    load_parallel,
)
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.target_model.graph_capture import CaptureJob, EagerGraphs, capture_all
from paceline.serving.target_model.kv_cache import PageAllocator
from tests.helpers.fakes import greedy_continuation, prefill, tiny_model, tiny_target, tiny_tokenizer
from tests.helpers.graph_engines import CONTEXT, StaticOracle, generate, make_engine
from tests.helpers.scripted_drafters import OracleDrafter
from tests.helpers.static_kernels import STATIC_KERNELS
from tests.helpers.trees import DevicePolicy

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # float32 sums in another order
NUM_TOKENS = 10
TREE = TreeConfig(max_draft_tokens=4, max_frontier=2, policy="fixed")
SMALL = {
    "max_running": 2, "capture_s": 600.0, "prefill_chunk_tokens": 64,
    "tree": TREE,
}  # fmt: skip
REFUSED = "PACELINE_TEST_REFUSED_CAPTURE"
"""Variable: a file; while it is there, the other rank refuses its next capture."""


def run_engine(target, drafter, prompts):
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


@pytest.mark.slow
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
        plain, _ = run_engine(whole, None, prompts)
        texts = {name: [*prompts[name], *plain[name]] for name in prompts}
        assert run_engine(split, None, prompts)[0] == plain
        drafted, num_rounds = run_engine(split, OracleDrafter(texts, num_slots=4), prompts)
        assert drafted == plain and num_rounds < NUM_TOKENS, "commits reached both ranks: accepted drafts stay right"
    finally:
        ranks.close()


def end_at_once(rank, settings):
    """Main of a rank that cannot start."""
    sys.exit(3)


@pytest.mark.slow
def test_a_rank_that_ends_before_it_joins_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_parallel, "_run_rank", end_at_once)
    with pytest.raises(RankError, match="rank 1 ended before all had joined, exit code 3"):
        load_parallel(tmp_path, size=2, device="cpu")


def follow_by_static_kernels(rank, settings):
    """Main of a rank whose kernels take padded rows, as those of a GPU do."""
    target, orders = tensor_parallel._load_rank(rank, settings)
    target.kernels = STATIC_KERNELS
    drop_tables(target)
    EagerGraphs.capture = refuse_once(EagerGraphs.capture, Path(os.environ[REFUSED]))
    follow(target, orders, rank)
    dist.destroy_process_group()


def refuse_once(capture, asked):
    """Captures of which one fails when a file asks for it."""

    def attempt(self, run):
        graph = capture(self, run)
        if asked.exists():
            asked.unlink()
            raise RuntimeError("this rank cannot")
        return graph

    return attempt


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """A small target over two ranks, the same one whole, and the file that asks for a refusal.

    Until the module ends: a process is a rank of one target at a time, so other splits come before.
    """
    folder = tmp_path_factory.mktemp("split")
    torch.manual_seed(0)
    tiny_model("qwen3", layers=3, context=CONTEXT).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "_run_rank", follow_by_static_kernels)
        patch.setenv(REFUSED, str(folder / "refused"))
        target, ranks = load_parallel(folder, size=2, device="cpu")
    target.kernels = STATIC_KERNELS
    yield target, read_target(folder, device="cpu", fast_path=False), folder / "refused"
    ranks.close()


def test_graphs_are_captured_and_replayed_by_every_rank(split, monkeypatch):
    target, whole, _ = split
    sent, orders = [], target.leader._orders
    put = orders.put
    monkeypatch.setattr(orders, "put", lambda order, sizes: (sent.append(order), put(order, sizes)))
    rng = torch.Generator().manual_seed(1)
    prompts = [(torch.randint(3, 64, (n,), generator=rng).tolist(), 0.0) for n in (9, 17, 4)]
    texts = [[*p, *greedy_continuation(whole, list(p), NUM_TOKENS + 8)] for p, _ in prompts]
    policy = DevicePolicy(TREE, vocab_size=target.vocab_size)
    engine = make_engine(
        target, DrafterSlots(StaticOracle(texts, target.vocab_size), "oracle"), EagerGraphs(), policy, **SMALL
    )
    sent.clear()
    tokens = generate(engine, prompts)
    rounds = engine.stats()["num_rounds"]
    assert generate(make_engine(whole, DrafterSlots(), **SMALL), prompts) == tokens
    assert rounds <= 14, "drafts were accepted: commits reached both ranks"
    assert sent.count(Order.REPLAY) >= 2 * rounds, "the forward and the commit of every round"
    assert sent.count(Order.COMMIT) == 0, "no round ran eagerly"


def test_what_another_rank_cannot_capture_runs_eagerly_everywhere(split, caplog):
    target, whole, refused = split
    refused.touch()
    engine = make_engine(target, DrafterSlots(), EagerGraphs(), **SMALL)
    (error,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert re.fullmatch(r"graph .* could not be captured; .* runs eagerly: rank 1: this rank cannot", error)
    prompts = [([5, 9, 21], 0.0), ([3, 3, 7, 40], 0.7)]
    assert generate(engine, prompts) == generate(make_engine(whole, DrafterSlots(), **SMALL), prompts)


def test_a_failure_within_a_step_of_all_ranks_is_none_of_the_graph_alone():
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    leader = Leader(Orders(server), 2)

    def fail(num_sent):
        for _ in range(num_sent):
            leader.send_pool(1, 4, 0)
        raise RuntimeError("out of memory")

    def job(num_sent):
        return CaptureJob(family="f", name="n", rank=0, run=lambda backend: backend.capture(lambda: fail(num_sent)))

    assert capture_all([job(0)], leader.share(EagerGraphs()), budget_s=9.0) == 0
    with pytest.raises(RankError, match="out of memory; start the service again"):
        capture_all([job(1)], leader.share(EagerGraphs()), budget_s=9.0)


def test_a_process_ends_with_another_rank_of_its_target(tmp_path):
    """On a device it would wait for ever in a collective."""
    tiny_model("qwen3").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    code = (
        "import sys, time\n"
        "from paceline.serving.loading.tensor_parallel import load_parallel\n"
        "if __name__ == '__main__':\n"
        "    target, ranks = load_parallel(sys.argv[1], size=2, device='cpu')\n"
        "    print(ranks._processes[0].pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    main = tmp_path / "main.py"
    main.write_text(code)
    with subprocess.Popen([sys.executable, str(main), str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        os.kill(int(process.stdout.readline()), signal.SIGKILL)
        assert process.wait(60) == LOST_RANK_EXIT


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


def test_a_transformers_without_meshes_is_named(monkeypatch):
    """5.17 and earlier."""
    monkeypatch.delattr("transformers.distributed.utils.initialize_distributed_mesh")
    with pytest.raises(ConfigError, match=r"must be 1 with transformers \d.*, got 2; install 5.18 or later"):
        tensor_parallel.split_model(tiny_model("qwen3"), 2, torch.device("cpu"))


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
