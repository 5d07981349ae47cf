"""Claims of serving/engine/classes.py: requests without a bucket get the class of their prompt, and nothing else changes."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from paceline.adapt.data.chat_templates import generate_questions
from paceline.adapt.data.code_templates import generate_code_document
from paceline.bandit.beliefs.classes import ClassBook
from paceline.bench.common.engine_run import encode, load_target
from paceline.bench.common.workloads import load_prompts
from paceline.config import EngineConfig
from paceline.contracts import TrafficClasses
from paceline.errors import RequestError
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.classes import NUM_DIMS, NUM_ROWS
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.engines import PROMPT, VOCAB, FeatureDrafter, Run, Sinks, finish, greedy, make_engine
from tests.helpers.scripted_drafters import RandomDrafter

OTHER = tuple(range(30, 60))


class PromptSinks(Sinks):
    """Sinks that take vectors too."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors: list[tuple[str, np.ndarray]] = []

    def record_prompt(self, space, vector, tenant):
        self.vectors.append((space, vector.copy()))


def vectors_of(*prompts, **config) -> list[np.ndarray]:
    """The vectors of prompts, one request after the other in one engine."""
    sinks = PromptSinks()
    engine = make_engine(sinks=sinks, **config)
    for i, prompt in enumerate(prompts):
        Run(engine, f"r{i}", prompt, max_tokens=1)
        finish(engine)
    return [vector for _, vector in sinks.vectors]


def classes_at(engine: Engine, *vectors, radius: float = 1e-3) -> TrafficClasses:
    assert engine.classes is not None
    return TrafficClasses(
        rev=1, space=engine.classes.space, names=[f"~class-{i + 1}" for i in range(len(vectors))],
        centroids=[v.tolist() for v in vectors], radii=[radius] * len(vectors),
    )  # fmt: skip


def test_a_prompt_tells_its_class_from_the_first_event_on_and_everywhere():
    own, other = vectors_of(PROMPT, OTHER)
    sinks = PromptSinks()
    engine = make_engine(RandomDrafter(VOCAB), sinks=sinks)
    before = Run(engine, "before")
    finish(engine)
    engine.classes.install(classes_at(engine, own, other))
    runs = [Run(engine, "a"), Run(engine, "b", OTHER), Run(engine, "c", OTHER[:9])]
    finish(engine)
    assert {e.stats.bucket for e in before.events} == {"default"}
    assert [{e.stats.bucket for e in r.events} for r in runs] == [{"~class-1"}, {"~class-2"}, {"default"}]
    for request_id, bucket in (("before", "default"), ("a", "~class-1"), ("b", "~class-2"), ("c", "default")):
        assert {r["bucket"] for r in sinks.rows if r["request_id"] == request_id} == {bucket}
        assert {t.bucket for t in sinks.traces if t.request_id == request_id} == {bucket}
    assert {key[1] for key, _ in engine.policy.budget.states()} <= {"default", "~class-1", "~class-2"}
    stats = engine.stats()
    assert (stats["num_classes"], stats["num_classed"], stats["num_unclassed"]) == (2, 2, 1)


def test_a_name_wins_and_its_prompt_is_not_looked_at():
    (own,) = vectors_of(PROMPT)
    sinks = PromptSinks()
    engine = make_engine(RandomDrafter(VOCAB), sinks=sinks, max_buckets=2)
    engine.classes.install(classes_at(engine, own))
    names = ["mine", "default", "late"]
    runs = [Run(engine, f"r{i}", bucket=name) for i, name in enumerate(names)]
    unnamed = Run(engine, "unnamed")
    finish(engine)
    assert [r.last.stats.bucket for r in runs] == ["mine", "default", "other"]
    assert unnamed.last.stats.bucket == "~class-1", "a flood of names takes no class's place"
    assert len(sinks.vectors) == 1 and engine.stats()["num_buckets"] == 2


def test_no_client_can_name_a_class():
    with pytest.raises(RequestError, match="bucket must not begin with '~'"):
        GenerationRequest(request_id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=1), bucket="~class-1")


def test_the_text_is_the_same_with_and_without_classes():
    (own,) = vectors_of(PROMPT)
    for radius in (1e-3, 10.0):
        engine = make_engine(RandomDrafter(VOCAB), sinks=PromptSinks(), prefill_chunk_tokens=3, min_prefill_tokens=1)
        engine.classes.install(classes_at(engine, own, radius=radius))
        runs = [Run(engine, f"r{i}", max_tokens=24) for i in range(3)]
        finish(engine)
        assert all(r.tokens == greedy() for r in runs)


def test_a_vector_depends_on_the_prompt_alone():
    """Not on chunks, on cached pages, on who runs beside it or on what is generated."""
    long = tuple(3 + i % 50 for i in range(60))
    (whole,) = vectors_of(long)
    (chunked,) = vectors_of(long, prefill_chunk_tokens=7, min_prefill_tokens=1)
    first, cached = vectors_of(long, long)
    sinks = PromptSinks()
    engine = make_engine(sinks=sinks)
    Run(engine, "beside", OTHER, max_tokens=30, bucket="named")
    engine.step()
    Run(engine, "r", long, max_tokens=9)
    finish(engine)
    for vector in (chunked, first, cached, sinks.vectors[0][1]):
        assert np.allclose(vector, whole, atol=1e-5)
    assert whole.shape == (NUM_DIMS,) and 0.3 < np.linalg.norm(whole) < 1.5
    assert not np.allclose(vectors_of(long[: NUM_ROWS // 4])[0], whole, atol=1e-3)


def test_many_short_prompts_that_end_together_are_gathered_a_few_at_a_time():
    """128 rows a prompt, however short: a burst of them takes no more memory than a few."""
    engine = make_engine(sinks=(sinks := PromptSinks()), max_running=32)
    gathered: list[int] = []

    class Counted:
        """The pool's hidden states, with the number of rows that are gathered at once."""

        device = engine.classes._features.device

        def index_select(self, dim, index, pool=engine.classes._features):
            gathered.append(len(index))
            return pool.index_select(dim, index)

    engine.classes._features = Counted()
    prompts = [PROMPT[: 2 + i % 4] for i in range(20)]
    for i, prompt in enumerate(prompts):
        Run(engine, f"r{i}", prompt, max_tokens=1)
    finish(engine)
    assert sum(gathered) == 20 * NUM_ROWS and max(gathered) <= 8 * NUM_ROWS
    whole = vectors_of(*prompts[:4])
    nearest = [[np.allclose(v, w, atol=1e-4) for w in whole].index(True) for _, v in sinks.vectors]
    assert Counter(nearest) == dict.fromkeys(range(4), 5), nearest


def test_a_preempted_request_keeps_its_class_for_life():
    (own,) = vectors_of(PROMPT)
    sinks = PromptSinks()
    engine = make_engine(num_pages=9, sinks=sinks, tree=EngineConfig().tree, prefix_caching=False)
    engine.classes.install(classes_at(engine, own))
    runs = [Run(engine, f"r{i}", max_tokens=20) for i in range(3)]
    steps = 0
    while engine.step():
        steps += 1
        if steps == 12:
            engine.classes.install(TrafficClasses())  # what is known changes meanwhile
    assert engine.stats()["num_preemptions"] > 0
    started = [r for r in runs if {e.stats.bucket for e in r.events} == {"~class-1"}]
    assert started and all(len({e.stats.bucket for e in r.events}) == 1 for r in runs)
    assert len(sinks.vectors) == 3, "a prompt is told once"


def test_a_resumed_answer_is_sorted_by_its_prompt():
    (own,) = vectors_of(PROMPT)
    engine = make_engine(sinks=PromptSinks())
    engine.classes.install(classes_at(engine, own))
    events: list = []
    engine.submit(
        GenerationRequest(
            request_id="r", prompt_token_ids=PROMPT, resumed_token_ids=greedy()[:3],
            params=SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        ),
        events.append,
    )  # fmt: skip
    finish(engine)
    assert events[-1].stats.bucket == "~class-1"
    assert tuple(t for e in events for t in e.token_ids) == greedy()[3:12]


def test_what_opts_out_of_traces_is_sorted_but_never_told():
    (own,) = vectors_of(PROMPT)
    sinks = PromptSinks()
    engine = make_engine(sinks=sinks)
    engine.classes.install(classes_at(engine, own))
    run = Run(engine, is_traced=False)
    finish(engine)
    assert run.last.stats.bucket == "~class-1" and sinks.vectors == []


@pytest.mark.parametrize(
    "change",
    [{"space": "other"}, {"centroids": [[0.0] * 3]}, {"radii": []}, {"names": [], "centroids": [], "radii": []}],
)
def test_centroids_that_do_not_fit_mean_none(change):
    engine = make_engine(sinks=PromptSinks())
    (own,) = vectors_of(PROMPT)
    engine.classes.install(classes_at(engine, own, radius=10.0))
    fields = {f: getattr(classes_at(engine, own), f) for f in TrafficClasses.__struct_fields__}
    engine.classes.install(TrafficClasses(**{**fields, **change}))
    run = Run(engine)
    finish(engine)
    assert run.last.stats.bucket == "default" and engine.stats()["num_classes"] == 0


def test_classes_may_be_off_and_need_hidden_states():
    assert make_engine(sinks=PromptSinks(), max_classes=0).classes is None
    engine = make_engine(RandomDrafter(VOCAB))  # no taker of traces, and a drafter that wants no hidden states
    assert engine.classes is None
    run = Run(engine)
    finish(engine)
    assert run.last.stats.bucket == "default"
    assert make_engine(FeatureDrafter()).classes is not None


def test_neither_a_broken_sink_nor_a_failing_forward_of_classes_ends_a_request(monkeypatch):
    class Broken(PromptSinks):
        def record_prompt(self, space, vector, tenant):
            raise RuntimeError("full")

    engine = make_engine(sinks=Broken())
    run = Run(engine)
    finish(engine)
    assert run.tokens == greedy()[:12] and engine.stats()["num_callback_errors"] == 1
    engine.classes._projection = engine.classes._projection[1:]
    again = Run(engine, "again")
    finish(engine)
    assert again.tokens == greedy()[:12] and again.last.stats.bucket == "default"
    assert engine.stats()["num_callback_errors"] == 2


def test_hidden_states_that_are_not_numbers_have_no_class():
    engine = make_engine(sinks=(sinks := PromptSinks()))
    engine.classes.install(classes_at(engine, np.zeros(NUM_DIMS), radius=100.0))
    engine.classes._projection.fill_(torch.nan)
    run = Run(engine)
    finish(engine)
    assert run.last.stats.bucket == "default" and sinks.vectors == []


def _kinds(num: int, seed: int) -> dict[str, list[str]]:
    rng = random.Random(seed)
    code = [generate_code_document(rng) for _ in range(num)]
    return {
        "code": [f"<|user|>{question}\n<|assistant|>{answer[:400]}" for question, answer in code],
        "chat": [f"<|user|>{generate_questions(rng)[0]}\n<|assistant|>" for _ in range(num)],
        "tools": [p.text for p in load_prompts("tools", None, num, seed)],
    }


def test_three_kinds_of_unnamed_prompts_get_three_classes():
    """With the bundled target: code, questions of a chat and orders for tools, learnt from one half, told of the other."""
    target = load_target("bundled")
    sinks = PromptSinks()
    engine = Engine(
        target,
        DrafterSlots(),
        EngineConfig(kv_bytes=64 << 20, max_running=8),
        feedback=sinks,
        traces=sinks,
        prompts=sinks,
    )
    book, kinds, found = ClassBook(), _kinds(60, 5), {}
    order = [(kind, i) for i in range(60) for kind in kinds]
    for at, (kind, i) in enumerate(order):
        events: list = []
        prompt = tuple(encode(target, kinds[kind][i]))
        engine.submit(
            GenerationRequest(request_id=f"{kind}-{i}", prompt_token_ids=prompt, params=SamplingParams(max_tokens=1)),
            events.append,
        )
        finish(engine)
        space, vector = sinks.vectors.pop()
        book.observe(space, vector.tobytes(), NUM_DIMS, at / 10)
        if i < 40 and i % 10 == 9 and book.tidy(16, at / 10):
            engine.classes.install(book.published)
        if i >= 40:
            found.setdefault(kind, Counter())[events[-1].stats.bucket] += 1
    mostly = {kind: counts.most_common(1)[0] for kind, counts in found.items()}
    assert len({name for name, _ in mostly.values()}) == 3 and "default" not in dict(mostly.values()), found
    assert all(count >= 16 for _, count in mostly.values()), found
