"""A canary in the engine: its share of requests, the same tokens, counted errors; tenants on traces."""

from paceline.contracts import is_canary
from paceline.errors import EngineStoppedError
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.engines import PROMPT, VOCAB, Run, Sinks, finish, make_engine
from tests.helpers.scripted_drafters import RandomDrafter


def with_canary(percent: int, sinks: Sinks | None = None):
    slots = DrafterSlots(RandomDrafter(VOCAB), "v1", spawn=lambda: RandomDrafter(VOCAB))
    engine = make_engine(slots, sinks=sinks, max_running=4)
    assert slots.stage("v2", RandomDrafter(VOCAB))
    slots.set_canary("v2", percent)
    return engine


def test_canary_and_live_requests_share_rounds_and_emit_the_targets_tokens():
    plain = make_engine()
    wanted = Run(plain, "plain")
    finish(plain)
    sinks = Sinks()
    engine = with_canary(50, sinks)
    runs = {f"r{k}": Run(engine, f"r{k}") for k in range(12)}
    finish(engine)
    assert all(run.tokens == wanted.tokens for run in runs.values())
    served = {r["request_id"]: r["drafter_version"] for r in sinks.rows}
    assert served == {i: "v2" if is_canary(i, "v2", 50) else "v1" for i in runs}
    assert set(served.values()) == {"v1", "v2"}
    assert {run.last.stats.drafter_version for run in runs.values()} == {"v1", "v2"}


def test_a_request_keeps_the_canary_after_it_was_called_off():
    engine = with_canary(90)
    own = next(f"r{k}" for k in range(100) if is_canary(f"r{k}", "v2", 90))
    run = Run(engine, own)
    engine.step()
    engine.slots.set_canary("", 0)
    finish(engine)
    assert run.last.stats.drafter_version == "v2" and run.last.finish_reason == "length"
    assert not any(engine.slots.num_pins().values())


def test_failed_requests_are_counted_by_the_version_they_were_pinned_to():
    engine = with_canary(90)
    ids = [f"r{k}" for k in range(4)]
    for i in ids:
        Run(engine, i)
    engine.step()
    engine.fail_all("the device is gone")
    want: dict[str, int] = {}
    for i in ids:
        version = "v2" if is_canary(i, "v2", 90) else "v1"
        want[version] = want.get(version, 0) + 1
    assert engine.output.num_errors == want


def test_an_engine_whose_state_is_broken_tells_everybody_also_those_that_were_about_to_leave(monkeypatch):
    engine = with_canary(90)
    runs = [Run(engine, f"r{k}") for k in range(3)]
    engine.step()
    engine.abort("r1")
    waiting = engine.call_between_rounds(lambda: None)
    monkeypatch.setattr(engine.scheduler, "remove", lambda *_: 1 / 0)
    engine.fail_all("the device is gone")
    assert {run.last.finish_reason for run in runs} == {"error"}
    assert isinstance(waiting.exception(timeout=0), EngineStoppedError)


def test_a_trace_names_its_tenant_and_the_layers_that_its_features_are_of():
    sinks = Sinks()
    engine = make_engine(sinks=sinks)
    for i, tenant in (("a", "acme"), ("b", "")):
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        request = GenerationRequest(request_id=i, prompt_token_ids=tuple(PROMPT), params=params, tenant=tenant)
        engine.submit(request, lambda event: None)
    finish(engine)
    assert {t.request_id: t.extra for t in sinks.traces} == {"a": {"tenant": "acme"}, "b": {}}
    assert {t.tap_layers for t in sinks.traces} == {engine.target.tap_layers}
