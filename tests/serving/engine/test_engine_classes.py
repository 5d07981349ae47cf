"""Classes with drafter versions of their own in one engine: the target's tokens, whatever serves whom and when."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group, TrafficClasses, is_canary
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.kv_size import pool_row_bytes
from tests.helpers.engines import PROMPT, VOCAB, FeatureDrafter, RowDrafter, Run, Sinks, finish, greedy, make_engine
from tests.helpers.fakes import tiny_target
from tests.helpers.scripted_drafters import RandomDrafter

OTHER = tuple(range(30, 50))
WORDS = (*PROMPT, *OTHER)


class PromptSinks(Sinks):
    """Sinks that take vectors too."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors: list[np.ndarray] = []

    def record_prompt(self, space, vector, tenant):
        self.vectors.append(vector.copy())


def portfolio(make=RowDrafter, num_class_slots: int = 2) -> DrafterSlots:
    return DrafterSlots(make(), "v1", spawn=make, num_class_slots=num_class_slots)


def load(slots: DrafterSlots, version: str) -> bool:
    return slots.load(version, lambda: {"weights": torch.tensor(int(version[1:]))})


def tell_classes(engine: Engine, *prompts: tuple[int, ...]) -> None:
    """Make each prompt the centroid of '~class-1', '~class-2', ..."""
    sinks = PromptSinks()
    other = make_engine(sinks=sinks)
    for i, prompt in enumerate(prompts):
        Run(other, f"r{i}", prompt, max_tokens=1)
        finish(other)
    assert engine.classes is not None
    engine.classes.install(
        TrafficClasses(
            rev=1, space=engine.classes.space, names=[f"~class-{i + 1}" for i in range(len(prompts))],
            centroids=[v.tolist() for v in sinks.vectors], radii=[1e-3] * len(prompts),
        )
    )  # fmt: skip


def test_requests_of_several_versions_share_rounds_and_emit_the_targets_tokens():
    sinks, slots = Sinks(), portfolio(lambda: RandomDrafter(VOCAB), 3)
    engine = make_engine(slots, sinks=sinks, max_running=8)
    slots.route({"math": "v2", "code": "v3", "law": "v9"})
    for version in ("v2", "v3"):
        assert slots.load(version, lambda: RandomDrafter(VOCAB))
    buckets = ["math", "code", "law", None, "chat", "math", "code"]
    runs = [Run(engine, f"r{i}", bucket=b, max_tokens=24) for i, b in enumerate(buckets)]
    runs.append(Run(engine, "sampled", bucket="math", max_tokens=24, temperature=0.8, seed=3))
    finish(engine)
    assert all(run.tokens == greedy() for run in runs[:-1])
    plain = make_engine()
    wanted = Run(plain, "sampled", max_tokens=24, temperature=0.8, seed=3)
    finish(plain)
    assert runs[-1].tokens == wanted.tokens
    assert [r.last.stats.drafter_version for r in runs] == ["v2", "v3", "v1", "v1", "v1", "v2", "v3", "v2"]
    assert {r["batch_size"] for r in sinks.rows} >= {8}, "they ran together"
    assert not any(slots.num_pins().values())


@pytest.mark.parametrize("packs_prompts", [False, True])
@pytest.mark.parametrize("make", [RowDrafter, FeatureDrafter])
def test_a_request_without_a_name_drafts_with_its_class_version_from_the_first_round_on(make, packs_prompts):
    slots = portfolio(make)
    engine = make_engine(
        slots, sinks=PromptSinks(), packs_prompts=packs_prompts, prefill_chunk_tokens=3, min_prefill_tokens=1
    )
    slots.route({"~class-1": "v2"})
    assert slots.load("v2", make)
    tell_classes(engine, PROMPT)
    runs = [Run(engine, "a"), Run(engine, "b", OTHER), Run(engine, "c"), Run(engine, "d", group=Group.PLAIN)]
    finish(engine)
    assert [{e.stats.drafter_version for e in r.events} for r in runs] == [{"v2"}, {"v1"}, {"v2"}, {""}]
    assert [r.tokens for r in runs] == [greedy(p, 12) for p in (PROMPT, OTHER, PROMPT, PROMPT)]
    assert not any(slots.num_pins().values())


def test_a_class_that_is_told_uses_the_cached_rows_that_its_version_has_drafted():
    slots = portfolio()
    engine = make_engine(slots, sinks=PromptSinks())
    slots.route({"~class-1": "v2", "named": "v2"})
    load(slots, "v2")
    tell_classes(engine, WORDS)
    Run(engine, "named", WORDS, bucket="named")
    finish(engine)
    drafter = next(slots.drafter(n) for n, v in slots.versions().items() if v == "v2")
    before = drafter.num_new
    run = Run(engine, "unnamed", WORDS)
    finish(engine)
    assert run.last.stats.drafter_version == "v2" and run.last.stats.num_cached_tokens > 0
    assert drafter.num_new - before < before, "what was drafted for the first one is not drafted again"


def test_the_prompt_that_tells_a_class_takes_its_request_into_the_canary_of_that_class():
    slots = portfolio(lambda: RandomDrafter(VOCAB))
    engine = make_engine(slots, sinks=PromptSinks())
    slots.stage("v2", RandomDrafter(VOCAB))
    slots.set_canary("v2", 50, "~class-1")
    tell_classes(engine, PROMPT)
    runs = {f"r{k}": Run(engine, f"r{k}", PROMPT if k % 2 else OTHER) for k in range(12)}
    finish(engine)
    served = {i: r.last.stats.drafter_version for i, r in runs.items()}
    assert served == {i: "v2" if k % 2 and is_canary(i, "v2", 50) else "v1" for k, i in enumerate(runs)}
    assert set(served.values()) == {"v1", "v2"}


@functools.cache
def small_target():
    return tiny_target(vocab=VOCAB, layers=2, width=16, context=64)


@pytest.mark.slow
def test_pages_balance_and_tokens_stay_while_assignments_change_under_load():
    """Thousands of random orders: classes get, change and lose versions, versions fail, the live one changes, pages run
    out; every drafter checks at every proposal that its KV is of the text and of its own weights."""
    rng, target, slots = np.random.default_rng(5), small_target(), portfolio(num_class_slots=2)
    row_bytes, _ = pool_row_bytes(target, slots, has_traces=False)
    config = EngineConfig(
        page_tokens=4, kv_bytes=18 * 4 * row_bytes, max_running=6, max_waiting=24, prefill_chunk_tokens=16,
        min_prefill_tokens=4, tree=TreeConfig(max_draft_tokens=2, policy="fixed"),
    )  # fmt: skip
    engine = Engine(target, slots, config, rng=np.random.default_rng(0))
    plain = Engine(target, DrafterSlots(), config, rng=np.random.default_rng(0))
    texts = [tuple(int(t) for t in rng.integers(3, VOCAB, n)) for n in (3, 9, 14, 22)]
    texts += [(*texts[3][:17], 5, 6), (*texts[2][:9], 7)]
    wanted = [Run(plain, f"p{i}", t, max_tokens=12) for i, t in enumerate(texts)]
    while plain.step():
        pass
    assert engine.classes is not None
    vectors: list[np.ndarray] = []
    engine.classes._sink = type(
        "Sink", (), {"record_prompt": lambda self, space, v, tenant: vectors.append(v.copy())}
    )()
    for i in (0, 1):
        Run(engine, f"tell{i}", texts[i], max_tokens=1)
        while engine.step():
            pass
    engine.classes.install(
        TrafficClasses(
            rev=1, space=engine.classes.space, names=["~class-1", "~class-2"],
            centroids=[v.tolist() for v in vectors[:2]], radii=[1e-3] * 2,
        )
    )  # fmt: skip
    buckets = ("math", "code", "law", "~class-1", "~class-2")
    runs: list[tuple[int, Run]] = []
    number, served, num_loaded, num_swaps, num_failed = 1, set(), 0, 0, 0
    for i in range(4000):
        what = rng.random()
        if what < 0.25 and len(engine.output.by_id) < 20:
            k = int(rng.integers(len(texts)))
            name = ("math", "code", "law", None, None)[int(rng.integers(5))]
            group = (Group.ADAPTIVE, Group.ADAPTIVE, Group.ADAPTIVE, Group.STATIC)[int(rng.integers(4))]
            runs.append((k, Run(engine, str(i), texts[k], max_tokens=12, bucket=name, group=group)))
        elif what < 0.90:
            engine.step()
        elif what < 0.94:
            number += rng.random() < 0.3
            chosen = [b for b in buckets if rng.random() < 0.7]
            slots.route({b: f"v{int(rng.integers(max(1, number - 4), number + 1))}" for b in chosen})
        elif what < 0.98:
            num_loaded += any(load(slots, version) for version in slots.missing())
        elif what < 0.99:
            number += 1
            if slots.stage(f"v{number}", {"weights": torch.tensor(number)}):
                engine.call_between_rounds(slots.publish)
                num_swaps += 1
        elif what < 0.995:
            engine.abort(str(i - int(rng.integers(60))))
        else:
            names = [n for n in slots.versions() if n != slots.live_slot]
            before = slots.num_failures
            if names:
                slots.mark_failed(names[int(rng.integers(len(names)))], "test")
            num_failed += slots.num_failures - before
        if i % 3 == 0:
            engine.check_integrity()
    while engine.step():
        pass
    engine.check_integrity()
    for k, run in runs:
        assert run.last.finish_reason in ("length", "abort")
        tokens = run.tokens
        assert tokens == wanted[k].tokens[: len(tokens)] and (len(tokens) == 12 or run.last.finish_reason == "abort")
        served.add((run.last.stats.bucket, run.last.stats.drafter_version))
    assert engine.is_idle and not any(slots.num_pins().values())
    assert num_loaded > 20 and num_swaps > 5 and engine.stats()["num_preemptions"] > 0
    for bucket in buckets:
        assert len({v for b, v in served if b == bucket}) > 3, f"{bucket} was served by too few versions"
    assert 0 < slots.num_failures == num_failed, "a drafter met rows of another text or of other weights"


def test_what_is_a_tenants_own_is_in_no_class_and_in_no_trace_of_others():
    sinks = PromptSinks()
    engine = make_engine(portfolio(), sinks=sinks, max_buckets=4)
    tell_classes(engine, PROMPT)
    runs = {
        "a": Run(engine, "a", tenant="acme", is_own=True),
        "b": Run(engine, "b", tenant="acme", is_own=True, bucket="law"),
        "c": Run(engine, "c", tenant="bolt", is_own=True, bucket="law"),
        "d": Run(engine, "d", tenant="bolt", is_own=True, bucket="code"),
        "e": Run(engine, "e", tenant="corp"),
    }
    finish(engine)
    found = {i: r.last.stats.bucket for i, r in runs.items()}
    assert found == {"a": "default@acme", "b": "law@acme", "c": "law@bolt", "d": "other", "e": "~class-1"}
    assert {t.request_id: t.bucket for t in sinks.traces} == {i: b for i, b in found.items() if i != "d"}
    assert len(sinks.vectors) == 1, "its prompts make no class either"
