"""SGLang as a replica, against its HTTP side as tests/helpers/sglang_server.py has it: rows reach Redis, versions reach the engine."""

import contextlib
import hashlib
import time

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.contracts import ASKED_GROUP, DesiredState, FeedbackBatch, Group, decode
from paceline.errors import ConfigError, DrafterMismatchError, EngineAwayError
from paceline.infra.engines.one_drafter import Staged
from paceline.infra.engines.sglang import SglangEngine, SglangReplica, SglangServer, facts_of
from paceline.infra.engines.sglang_rows import label_of, weight_version
from paceline.infra.state.desired import commit_desired, ensure_first_version, read_reports
from paceline.infra.state.redis_clients import patient_client
from paceline.machine import ManualClock, SystemClock
from tests.helpers.sglang_server import VOCABULARY, SglangDouble

PUBLICATION = [
    "/update_weight_version", "/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update", "/continue_generation",
    "/weights_checker", "/update_weight_version",
]  # fmt: skip


class Sink:
    """A publisher that keeps rows."""

    def __init__(self) -> None:
        self.rows = []

    def record_rounds(self, rows) -> None:
        self.rows.append(rows)

    def counters(self) -> dict:
        return {"produced": len(self.rows)}


@pytest.fixture
def double(tmp_path, drafters):
    with SglangDouble(drafters.served, drafters.target, tmp_path / "records") as server:
        yield server


def engine_of(double, **kwargs) -> SglangEngine:
    server = SglangServer(double.url, double.key)
    return SglangEngine(
        server, server.get("/server_info"), Sink(), max_stale_tokens=64, **{"clock": SystemClock(), **kwargs}
    )


@pytest.fixture
def engine(double):
    found = engine_of(double)
    double.calls.clear()
    return found


def exported(folder, drafters, change=lambda tensors: None) -> Staged:
    """A version's folder whose tensors are not the first one's."""
    folder.mkdir()
    tensors = {n: t.clone() for n, t in load_file(drafters.served / "model.safetensors").items()}
    tensors["lm_head.weight"] = torch.roll(tensors["lm_head.weight"], 5, 0)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return Staged(folder / "model.safetensors", hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())


def holds(double, staged) -> bool:
    wanted = {n: t for n, t in load_file(staged.file).items() if n not in VOCABULARY}
    return wanted.keys() == double.weights.keys() and all(torch.equal(t, double.weights[n]) for n, t in wanted.items())


# ---- facts
def test_facts_say_what_it_can(double):
    facts = facts_of(double.info, double.url, 10.0)
    assert (facts.kind, facts.engine_version, facts.draft_shape, facts.max_draft_tokens) == (
        "sglang",
        "0.5.23",
        "chain",
        5,
    )
    assert (facts.group_unit, facts.window_s, facts.timing, facts.has_features) == ("time", 10.0, "request", False)


@pytest.mark.parametrize(("change", "option"), [
    ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm"),
    ({"speculative_draft_model_path": "ORG/MODEL"}, "--speculative-draft-model-path"),
    ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk 1"),
    ({"speculative_adaptive": True}, "no --speculative-adaptive"),
    ({"dp_size": 2}, "--dp-size 1"),
    ({"enable_metrics": False}, "--enable-metrics"),
    ({"export_metrics_to_file": False}, "--export-metrics-to-file-dir .* and --export-metrics-to-file"),
    ({"export_metrics_to_file_dir": "/nowhere"}, "--export-metrics-to-file-dir"),
])  # fmt: skip
def test_what_it_must_be_started_with_is_said(double, change, option):
    with pytest.raises(ConfigError, match=f"must be started with {option}"):
        facts_of({**double.info, **change}, double.url, 10.0)


# ---- weights
def test_a_version_is_loaded_while_no_step_runs_and_is_read_back(double, engine, drafters, tmp_path):
    staged = exported(tmp_path / "v", drafters)
    assert engine.publish(staged, "vvvv", Group.ADAPTIVE) > 0
    assert double.calls == PUBLICATION
    assert holds(double, staged) and not double.is_paused
    assert label_of(double.weight_version) == ("adaptive", "vvvv")


def test_another_group_is_another_label_and_no_load(double, engine):
    assert engine.publish(None, "vvvv", Group.STATIC) == 0.0
    assert double.calls == ["/update_weight_version"]
    assert label_of(double.weight_version) == ("static", "vvvv")


def test_each_rank_gets_its_entry(tmp_path, drafters):
    with SglangDouble(drafters.served, drafters.target, tmp_path / "records", tp_size=2) as double:
        staged = exported(tmp_path / "v", drafters)
        engine_of(double).publish(staged, "vvvv", "adaptive")
        assert holds(double, staged)


@pytest.mark.parametrize(("change", "reason"), [
    (lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1].clone()}), "tensor lm_head.weight must be"),
    (lambda t: t.update({"more.weight": torch.zeros(1)}), "tensor more.weight must be None"),
    (lambda t: t["lm_head.weight"].view(-1)[3:4].fill_(torch.inf), "must be finite"),
])  # fmt: skip
def test_a_version_that_does_not_fit_is_refused_before_anything_is_touched(
    double, engine, drafters, tmp_path, change, reason
):
    staged = exported(tmp_path / "v", drafters, change)
    with pytest.raises(DrafterMismatchError, match=reason):
        engine.check(staged.file.parent)
    with pytest.raises(DrafterMismatchError, match=reason):
        engine.publish(staged, "vvvv", "adaptive")
    assert double.calls == []


def test_a_file_that_changed_since_it_was_staged_is_refused(double, engine, drafters, tmp_path):
    staged = exported(tmp_path / "v", drafters)
    with pytest.raises(DrafterMismatchError, match="must have sha256"):
        engine.publish(staged._replace(sha256="0" * 64), "vvvv", "adaptive")
    assert double.calls == []


def test_another_draft_vocabulary_is_refused(tmp_path, drafters):
    """SGLang reads it at its start, so such rows would be drafted as other tokens."""
    with_vocabulary, other = tmp_path / "served", tmp_path / "other"
    for folder, first in ((with_vocabulary, 0), (other, 1)):
        folder.mkdir()
        tensors = load_file(drafters.served / "model.safetensors")
        save_file({**tensors, "d2t": torch.arange(first, first + 8)}, folder / "model.safetensors")
    with SglangDouble(with_vocabulary, drafters.target, tmp_path / "records") as double:
        engine = engine_of(double)
        engine.check(with_vocabulary)
        with pytest.raises(DrafterMismatchError, match="tensor d2t must be that of"):
            engine.check(other)


def test_a_refused_load_brings_back_what_was_there_and_goes_on(double, engine, drafters, tmp_path):
    before = exported(tmp_path / "before", drafters)
    engine.publish(before, "bbbb", "adaptive")
    double.calls.clear()
    double.refuses["/update_weights_from_tensor"] = "CUDA out of memory"
    with pytest.raises(DrafterMismatchError, match="refused /update_weights_from_tensor: CUDA out of memory"):
        engine.publish(exported(tmp_path / "v", drafters, lambda t: t["lm_head.weight"].mul_(2)), "vvvv", "adaptive")
    assert double.calls.count("/update_weights_from_tensor") == 2
    assert double.calls[-2:] == ["/end_weight_update", "/continue_generation"]
    assert holds(double, before) and not double.is_paused
    assert label_of(double.weight_version) == ("adaptive", "bbbb")


def test_weights_that_it_passes_over_are_found_out(double, engine, drafters, tmp_path):
    engine.publish(exported(tmp_path / "before", drafters, lambda t: t["lm_head.weight"].mul_(2)), "bbbb", "adaptive")
    double.is_deaf = True
    passed_over = exported(tmp_path / "v", drafters)
    for _ in range(2):
        with pytest.raises(DrafterMismatchError, match="its checksum is that of the drafter before it"):
            engine.publish(passed_over, "vvvv", "adaptive")
        assert not double.is_paused
        assert engine.look().label == label_of(double.weight_version) == ("", ""), "later tokens are nobody's evidence"
    double.is_deaf = False
    engine.publish(passed_over, "vvvv", "adaptive")
    assert holds(double, passed_over)


def test_an_agent_that_starts_after_a_failed_exchange_does_not_take_it_for_the_first_drafter(double, engine, drafters, tmp_path):  # fmt: skip
    engine.publish(exported(tmp_path / "before", drafters), "bbbb", "adaptive")
    double.is_deaf = True
    with pytest.raises(DrafterMismatchError):
        engine.publish(exported(tmp_path / "v", drafters, lambda t: t["lm_head.weight"].mul_(2)), "vvvv", "adaptive")
    later = engine_of(double)
    assert later.look().label == ("", "")
    double.is_deaf = False
    assert later.publish(later._first, drafters.first, "adaptive") > 0
    assert holds(double, later._first)


def test_a_version_must_hash_as_it_did_the_last_time(double, engine, drafters, tmp_path):
    a, b = exported(tmp_path / "a", drafters), exported(tmp_path / "b", drafters, lambda t: t["lm_head.weight"].mul_(2))
    engine.publish(a, "aaaa", "adaptive")
    engine.publish(b, "bbbb", "adaptive")
    double.weights["lm_head.weight"] = torch.zeros_like(double.weights["lm_head.weight"])
    double.is_deaf = True
    with pytest.raises(DrafterMismatchError, match=r"and was .* before"):
        engine.publish(a, "aaaa", "adaptive")


def test_an_exchange_that_was_left_open_is_ended(double, drafters):
    double.is_paused, double.session = True, "draft"
    engine_of(double)
    assert (double.is_paused, double.session) == (False, None)


@pytest.mark.parametrize("num_calls", range(9))
def test_whoever_starts_after_one_that_was_killed_in_an_exchange_lets_it_go_on(
    double, engine, drafters, tmp_path, num_calls
):
    left = [num_calls]

    def until_killed(path, body, post=engine._server.post):
        if not left[0]:
            raise SystemExit
        left[0] -= 1
        return post(path, body)

    staged = exported(tmp_path / "v", drafters)
    engine._server.post = until_killed
    with contextlib.suppress(SystemExit):
        engine.publish(staged, "vvvv", "adaptive")
    assert double.calls == PUBLICATION[:num_calls]
    later = engine_of(double)
    assert (double.is_paused, double.session) == (False, None)
    is_whole = num_calls >= len(PUBLICATION)
    assert later.look().label == (("adaptive", "vvvv") if is_whole else ("", "")), "later tokens are nobody's evidence"


def test_an_exchange_whose_pause_is_not_answered_goes_on(double, engine, drafters, tmp_path):
    def unanswered(path, body, post=engine._server.post):
        answer = post(path, body)
        if path == "/pause_generation":
            raise EngineAwayError("the answer was lost")
        return answer

    engine._server.post = unanswered
    with pytest.raises(EngineAwayError):
        engine.publish(exported(tmp_path / "v", drafters), "vvvv", "adaptive")
    assert not double.is_paused


def test_an_exchange_whose_end_did_not_come_through_blames_no_later_version(double, engine, drafters, tmp_path):
    double.session = "draft"
    staged = exported(tmp_path / "v", drafters, lambda t: t["lm_head.weight"].mul_(2))
    assert engine.publish(staged, "vvvv", "adaptive") > 0
    assert holds(double, staged) and (double.is_paused, double.session) == (False, None)


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weight_version", "/continue_generation"])
def test_what_is_refused_but_a_load_is_no_fault_of_the_version(double, engine, drafters, tmp_path, path):
    double.refuses[path] = "not now"
    with (
        pytest.raises(EngineAwayError, match="not now") if path != "/continue_generation" else contextlib.nullcontext()
    ):
        engine.publish(exported(tmp_path / "v", drafters, lambda t: t["lm_head.weight"].mul_(2)), "vvvv", "adaptive")
    assert (double.is_paused, double.session) == (False, None)


def test_what_it_drafts_with_already_is_not_loaded_again(double, engine, drafters, tmp_path):
    staged = exported(tmp_path / "v", drafters, lambda t: t["lm_head.weight"].mul_(2))
    engine.publish(staged, "vvvv", "adaptive")
    double.calls.clear()
    assert engine.publish(staged, "vvvv", "static") == 0.0
    assert double.calls == ["/update_weight_version"]


def test_weights_that_cannot_be_read_are_no_fault_of_the_version(double, engine, drafters, tmp_path):
    staged = exported(tmp_path / "v", drafters, lambda t: t["lm_head.weight"].mul_(2))
    staged.file.unlink()
    with pytest.raises(FileNotFoundError):
        engine.publish(staged, "vvvv", "adaptive")
    assert double.calls == [] and not double.is_paused


def test_windows_go_on_where_records_cannot_be_read(double, engine, caplog):
    double.weight_version = weight_version("adaptive", "vvvv")
    double.records.rmdir()
    for _ in range(3):
        assert engine.look().label == ("adaptive", "vvvv")
    assert caplog.text.count("cannot be read") == 1
    double.records.mkdir()
    engine.look()
    double.finish("r1", [2, 0], bucket="code")
    assert engine.look().rows == pytest.approx({"code": 2.0}, abs=0.1)


def test_a_pause_that_nobody_left_open_stays(double, drafters):
    double.is_paused = True
    engine_of(double)
    assert double.is_paused


def test_it_is_read_what_an_earlier_agent_published(double, drafters, tmp_path):
    engine_of(double).publish(exported(tmp_path / "v", drafters), "vvvv", "static")
    assert engine_of(double).look().label == ("static", "vvvv")


# ---- errors
def test_errors_say_what_to_do(double, tmp_path, drafters):
    with pytest.raises(EngineAwayError, match="must answer /server_info"):
        SglangServer("http://127.0.0.1:9").get("/server_info")
    with pytest.raises(ConfigError, match=r"must be of a release with POST /no_such_route as 0\.5\.23"):
        SglangServer(double.url).post("/no_such_route", {})
    with pytest.raises(ConfigError, match=r"as 0\.5\.23 has it, got 422"):
        SglangServer(double.url).post("/pause_generation", {"mode": "slow"})
    with (
        SglangDouble(drafters.served, drafters.target, tmp_path / "other", key="secret") as closed,
        pytest.raises(ConfigError, match=r"--engine-key.*answered 401") as e,
    ):
        SglangServer(closed.url, "wrong").get("/server_info")
    assert "secret" not in str(e.value) and "wrong" not in str(e.value)


# ---- rows
def test_rows_of_ended_requests_are_published_with_their_labels(double, engine):
    double.weight_version = weight_version("adaptive", "vvvv")
    double.num_running = 4
    engine.look()
    double.finish("r1", [2, 0], bucket="code")
    double.finish(
        "r2", [1], bucket="not a label", versions=(weight_version("static", "w"), weight_version("adaptive", "vvvv"))
    )
    with next(double.records.iterdir()).open("a") as out:
        out.write('{"id": "odd", "spec_verify_ct": 3, "weight_version": "x"}\n')
    looked = engine.look()
    one, two = engine._publisher.rows
    assert (set(one.bucket), set(one.group), one.batch_size) == ({"code"}, {"adaptive"}, [4, 4])
    assert (set(two.bucket), set(two.group)) == ({"default"}, {ASKED_GROUP})
    assert looked.rows == pytest.approx({"code": 2.0, "default": 1.0}, abs=0.1)
    assert looked.label == ("adaptive", "vvvv")


def test_rounds_are_told_by_the_clock_of_the_service(double):
    clock = ManualClock(1000.0)
    engine = engine_of(double, clock=clock)
    double.weight_version = weight_version("adaptive", "vvvv")
    engine.look()
    double.finish("r", [2, 0], at=time.time() - 5.0)
    engine.look()
    (rows,) = engine._publisher.rows
    assert rows.ts == pytest.approx([994.5, 995.0], abs=0.3)


# ---- a replica
@contextlib.contextmanager
def running(double, redis_url, keys, drafters, **kwargs):
    values = {"window_s": 5.0, "max_stale_tokens": 64, **kwargs}
    replica = SglangReplica(
        double.url, key=None, redis_url=redis_url, service=keys.model, home=drafters.home, registry=drafters.registry,
        target=drafters.target, target_version=drafters.target_version, **values,
    ).start()  # fmt: skip
    try:
        yield replica
    finally:
        replica.close()


def want(client, keys, **fields) -> DesiredState:
    return commit_desired(client, keys, lambda old: msgspec.structs.replace(old, gen=old.gen + 1, **fields))


def test_published_versions_reach_it_and_its_rows_reach_redis(double, shared_redis, keys, drafters, wait_until):
    with patient_client(shared_redis.url) as client:
        ensure_first_version(client, keys, drafters.first, 0, 0.0)
        with running(double, shared_redis.url, keys, drafters) as replica:
            wait_until(
                lambda: label_of(double.weight_version) == ("adaptive", drafters.first), what="the first version"
            )
            (report,) = read_reports(client, keys)
            assert (report.replica_id, report.engine) == (replica.replica_id, replica.facts)
            double.finish("r1", [3, 1], bucket="code")
            gen = want(client, keys, version=drafters.other).gen
            wait_until(lambda: label_of(double.weight_version) == ("adaptive", drafters.other), what="the next version")
            double.finish("r2", [0, 0], bucket="code")
            wait_until(lambda: read_reports(client, keys)[0].gen == gen, what="its report")
            (report,) = read_reports(client, keys)
            assert (report.version, report.failed_gen, len(report.swap_pause_ms)) == (drafters.other, None, 2)
            wait_until(lambda: sum(c.num_rounds for c in cells(client, keys)) == 4, what="the rows")
        found = cells(client, keys)
        rounds = {v: sum(c.num_rounds for c in found if c.version == v) for v in (drafters.first, drafters.other)}
        kept = {v: sum(c.num_accepted_tokens for c in found if c.version == v) for v in rounds}
        assert {(c.bucket, c.group) for c in found} == {("code", "adaptive")}
        assert (rounds, kept) == (dict.fromkeys(rounds, 2), {drafters.first: 4, drafters.other: 0})
        assert read_reports(client, keys) == []


def cells(client, keys) -> list:
    batches = [decode(fields[b"v"], FeedbackBatch) for _, fields in client.xrange(keys.feedback)]
    return [cell for batch in batches for cell in batch.cells]


def test_a_version_that_is_refused_is_reported_and_the_one_before_goes_on(
    double, shared_redis, keys, drafters, wait_until
):
    with patient_client(shared_redis.url) as client:
        ensure_first_version(client, keys, drafters.first, 0, 0.0)
        with running(double, shared_redis.url, keys, drafters):
            wait_until(lambda: label_of(double.weight_version)[1] == drafters.first, what="the first version")
            gen = want(client, keys, version=drafters.broken).gen
            wait_until(lambda: read_reports(client, keys)[0].failed_gen == gen, what="the refusal")
            assert "must be finite" in read_reports(client, keys)[0].failed_reason
            assert label_of(double.weight_version)[1] == drafters.first


def test_one_that_was_started_again_gets_its_version_again(double, shared_redis, keys, drafters, wait_until):
    with patient_client(shared_redis.url) as client:
        ensure_first_version(client, keys, drafters.other, 0, 0.0)
        with running(double, shared_redis.url, keys, drafters):
            wait_until(lambda: label_of(double.weight_version)[1] == drafters.other, what="the version")
            double.restart()
            wait_until(lambda: label_of(double.weight_version)[1] == drafters.other, what="the version again")
            assert not torch.equal(
                double.weights["lm_head.weight"], load_file(drafters.served / "model.safetensors")["lm_head.weight"]
            )


def test_one_that_went_away_while_its_agent_began_may_be_tried_again(double, shared_redis, keys, drafters, monkeypatch):
    def away(*_, **__):
        raise EngineAwayError("it ended meanwhile")

    with monkeypatch.context() as patched:
        patched.setattr("paceline.infra.engines.sglang.SglangEngine", away)
        with pytest.raises(EngineAwayError) as kept, running(double, shared_redis.url, keys, drafters):
            pass
    with running(double, shared_redis.url, keys, drafters) as replica:
        assert kept.value and replica.facts.kind == "sglang"


def test_another_target_is_refused(double, shared_redis, keys, drafters):
    double.info["model_path"] = "ORG/MODEL"
    with (
        pytest.raises(ConfigError, match="must be started with --model-path and the target of this service"),
        running(double, shared_redis.url, keys, drafters),
    ):
        pass
