"""A burst ends in a result with its reason, only an accepted version is registered, and the next burst goes on from it."""

import math
import shutil
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.families.target_handle import load_target_handle
from paceline.adapt.online import trainer
from paceline.adapt.online.learner import AVERAGED_STEPS
from paceline.adapt.online.learner_store import LearnerKey, LearnerStore
from paceline.adapt.online.trainer import ShadowConfig, run_training_job
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bootstrap import LOG_NOTHING, TILTS
from paceline.contracts import ArmSpec, TrainJob
from paceline.serving.eagle3.model import EagleConfig, EagleModel
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel
from tests.helpers.training import EMBED, FEATURES, TARGET, VOCAB, learnable_trace

CONFIG = SpecBlockConfig(
    hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=VOCAB,
    feature_size=FEATURES, embed_size=EMBED,
)  # fmt: skip


ARM = ArmSpec(name="full", parameters="full", num_rows=8000, learning_rate=2e-3, rehearsal_share=0.25)


def base_state(seed=0):
    torch.manual_seed(seed)
    return SpecBlockModel(CONFIG).state_dict()


FIELDS = {
    "drafter_type": "specblock", "config": CONFIG.to_dict(), "target_version": TARGET.version,
}  # fmt: skip


NUM_REQUESTS = 180
"""Of the class that the order is about."""
SURE = 130
"""Looks by which a learner is surely better; it is at the 87th."""


@pytest.fixture(scope="module")
def ordered(tmp_path_factory):
    """Folder of a store with three shards of 'math' and one of 'code' and of a registry with a first drafter; an order."""
    folder = tmp_path_factory.mktemp("ordered")
    store, registry = TraceStore(folder / "traces"), DrafterRegistry(folder / "registry")
    names = [[f"m{k}-{i}" for i in range(NUM_REQUESTS // 3)] for k in range(3)]
    shards = [store.write_shard([learnable_trace(name) for name in own], "math") for own in names]
    other = store.write_shard([learnable_trace(f"c{i}", bucket="code") for i in range(8)], "code")
    first = registry.put(base_state(), **FIELDS).version
    return folder, TrainJob(
        job_id="j1", bucket="math", arm=ARM,
        base_version=first, first_version=first, shard_ids=shards, rehearsal_shard_ids=[other], seed=3,
        time_limit_s=120.0,
    )  # fmt: skip


def copied(folder, to):
    """(store, registry, states of learners) in a copy of a folder."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    return TraceStore(to / "traces"), DrafterRegistry(to / "registry"), LearnerStore(to / "learners")


@pytest.fixture
def place(ordered, tmp_path):
    """Store, registry and order of a test of its own."""
    return *copied(ordered[0], tmp_path)[:2], ordered[1]


def run(place, job=None, target=TARGET, **options):
    store, registry, default = place
    return run_training_job(job or default, store, registry, target, **options)


def changed(job, **fields):
    return msgspec.structs.replace(job, **fields)


@pytest.fixture
def learners(tmp_path):
    return LearnerStore(tmp_path / "learners")


def key_of(job, base=None):
    return LearnerKey(job.bucket, "specblock", base or job.base_version, TARGET.version, job.arm.parameters)


def stop_at(count):
    """True from the look number `count` on."""
    looks = iter(range(10**9))
    return lambda: next(looks) >= count


def accepted_burst(ordered, folder, job, looks):
    """(folder behind a burst that was stopped when its learner was surely better, order, result)."""
    store, registry, learners = copied(ordered[0], folder)
    result = run((store, registry, job), should_stop=stop_at(looks), learners=learners)
    assert result.status == "accepted", result.reason
    return folder, job, result


@pytest.fixture(scope="module")
def begun(ordered, tmp_path_factory):
    return accepted_burst(ordered, tmp_path_factory.mktemp("begun"), ordered[1], SURE)


@pytest.fixture(scope="module")
def begun_delta(ordered, tmp_path_factory):
    job = changed(ordered[1], arm=LORA)
    return accepted_burst(ordered, tmp_path_factory.mktemp("delta"), job, 260)


LEAN = """
import sys, msgspec, paceline
from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.online.learner_store import LearnerStore
from paceline.adapt.online.trainer import run_training_job
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.contracts import TrainJob
from tests.helpers.training import TARGET

folder, looks = sys.argv[1], iter(range(60))
result = run_training_job(
    msgspec.json.decode(sys.argv[2], type=TrainJob), TraceStore(f"{folder}/traces"), DrafterRegistry(f"{folder}/registry"),
    TARGET, should_stop=lambda: next(looks, None) is None, learners=LearnerStore(f"{folder}/learners"),
)
assert result.status == "learning", result
assert 0 < result.start_s < result.train_s, "what came before the first row is told apart"
print(*(name for name in ("torch._dynamo", "sympy", "scipy", "transformers.modeling_utils") if name in sys.modules))
"""


def test_a_burst_imports_nothing_that_it_does_not_need(place, tmp_path):
    """Such imports would be as dear as the burst."""
    command = [sys.executable, "-c", LEAN, str(tmp_path), msgspec.json.encode(place[2]).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_a_learner_that_is_surely_better_becomes_a_version(place, learners):
    _, registry, job = place
    done = []
    result = run(place, progress=lambda at, total, info: done.append((at, total)), learners=learners)
    assert result.status == "accepted", result.reason
    manifest = registry.get_manifest(result.version)
    assert (manifest.parent, manifest.arm, manifest.bucket) == (job.base_version, "full", "math")
    assert manifest.metrics["num_fresh_rows"] == result.num_rows == 40 * len(done) and result.num_rows_before == 0
    assert manifest.num_train_rows > result.num_rows
    assert manifest.metrics["acceptance_length"] == result.candidate.acceptance_length
    assert result.candidate.gain_mean > 0 and result.candidate.version == result.version
    assert result.incumbent.version == result.first.version == job.base_version
    (elsewhere,) = result.elsewhere.values()
    assert [s.version for s in elsewhere] == [result.version, job.base_version]
    assert elsewhere[0].num_requests > 0 and "surely better" in result.reason
    assert result.train_s > 0 and result.shadow_s > 0 and done[-1][0] == done[-1][1] == NUM_REQUESTS, (
        "what was paid for is read"
    )
    registry.load_state(result.version, target_version=TARGET.version)


@pytest.mark.slow
def test_the_learner_goes_on_from_its_version_without_reading_anything_twice(begun, tmp_path):
    folder, ordered, first = begun
    store, registry, learners = copied(folder, tmp_path)
    job = changed(ordered, base_version=first.version, job_id="j2")
    tensors, record = learners.load(key_of(job))
    assert record["evidence"]["test"]["num_requests"] == 0 and record["num_rows"] == 0 and record["step"] > 0
    read = set(tensors["seen"].tolist())
    assert learners.load(key_of(ordered)) is None, "a class that goes back to the old base begins with no evidence"
    second = run((store, registry, job), learners=learners)
    assert second.incumbent.version == first.version and second.first.version == job.first_version
    assert second.first.acceptance_length < second.incumbent.acceptance_length
    after = learners.load(key_of(job, second.version))[0]["seen"].tolist() if second.version else None
    after = after or learners.load(key_of(job))[0]["seen"].tolist()
    assert read < set(after) and len(after) == len(set(after))
    assert len(after) <= NUM_REQUESTS + 8  # requests of the class and of the other one


def test_a_new_learner_knows_what_the_version_that_it_begins_at_has_read(begun, tmp_path):
    folder, ordered, made = begun
    store, registry, learners = copied(folder, tmp_path)
    num_rehearsed = sum(new.num_requests for new, _ in made.elsewhere.values())
    store.write_shard([learnable_trace(f"c-{i}", bucket="code") for i in range(16)], "code")
    other = [s.shard_id for s in store.list_shards("code")]
    job = changed(ordered, base_version=made.version, bucket="code", shard_ids=other, rehearsal_shard_ids=[])
    result = run((store, registry, job), learners=learners)
    assert num_rehearsed >= 2 and result.status == "learning"
    assert result.num_rows == 40 * (24 - num_rehearsed), "what was rehearsed is not new"
    assert result.candidate.num_requests == 24 - num_rehearsed - AVERAGED_STEPS
    assert "has not read" in run((store, registry, job), learners=learners).reason


def test_a_class_that_got_the_name_of_another_goes_on_with_none_of_its_learning(place, learners):
    job = changed(place[2], min_gain=0.2)
    first = run(place, job, should_stop=stop_at(30), learners=learners)
    other = run(place, changed(job, job_id="j2", text_began=1e9), should_stop=stop_at(30), learners=learners)
    assert first.status == other.status == "learning" and other.num_rows == first.num_rows > 0
    assert (first.num_rows_before, other.num_rows_before) == (0, 0)
    again = run(place, changed(job, job_id="j3", text_began=1e9), should_stop=stop_at(110), learners=learners)
    assert again.num_rows_before == other.num_rows


@pytest.mark.parametrize("limit", [110, 130])
@pytest.mark.slow
def test_a_burst_whose_time_is_up_keeps_what_it_learned_and_the_next_one_goes_on(place, learners, limit):
    job = changed(place[2], min_gain=0.2)
    first = run(place, job, should_stop=stop_at(limit), learners=learners)
    assert first.status == "learning" and "keeps its state" in first.reason and first.version is None
    assert first.num_rows > 0 and first.candidate.num_requests >= 8
    second = run(place, changed(job, job_id="j2"), learners=learners)
    assert second.num_rows_before == first.num_rows and second.status == "accepted", second.reason


def test_a_burst_whose_time_is_up_before_it_scores_tells_what_it_learned(place, learners):
    """What it learned is stored, and what it left unread is not taken for read."""
    first = run(place, should_stop=stop_at(10), learners=learners)
    assert first.status == "learning" and 0 < first.num_requests < AVERAGED_STEPS and first.candidate is None
    record = learners.load(key_of(place[2]))[1]
    assert record["num_rows"] == first.num_rows == 40 * first.num_requests
    second = run(place, changed(place[2], job_id="j2"), should_stop=stop_at(30), learners=learners)
    assert second.num_rows_before == first.num_rows


def test_a_burst_that_is_killed_loses_no_more_than_it_had_not_saved(place, learners, monkeypatch):
    monkeypatch.setattr("paceline.adapt.online.burst.SAVE_S", 0.0)
    monkeypatch.setattr("paceline.adapt.online.burst.SAVE_SHARE", math.inf)

    class Killed(BaseException):
        pass

    def kill(done, total, info):
        if done == 28:
            raise Killed

    job = changed(place[2], min_gain=5.0)
    saves = []
    save = LearnerStore.save
    monkeypatch.setattr(LearnerStore, "save", lambda self, *a: (len(saves) < 3 and save(self, *a), saves.append(1)))
    with pytest.raises(Killed):
        run(place, job, learners=learners, progress=kill)
    record = learners.load(key_of(job))[1]
    assert record["evidence"]["test"]["num_requests"] == 24 - AVERAGED_STEPS and record["num_rows"] == 24 * 40
    monkeypatch.undo()
    again = run(place, job, should_stop=stop_at(300), learners=learners)
    assert again.num_rows_before == 24 * 40 and again.num_rows > 0


@pytest.mark.slow
def test_an_order_for_an_eagle_drafter_ends_with_a_better_one(place):
    _, registry, job = place
    torch.manual_seed(0)
    model = EagleModel(EagleConfig(
        hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=VOCAB,
        feature_size=FEATURES, embed_size=EMBED,
    ))  # fmt: skip
    info = {"drafter_type": "eagle3", "config": model.config.to_dict(), "target_version": TARGET.version}
    first = registry.put(model.state_dict(), **info).version
    result = run(place, changed(job, base_version=first))
    assert result.status == "accepted", result.reason
    assert result.first.version == job.first_version, "the first drafter is of another family and scored all the same"
    manifest = registry.get_manifest(result.version)
    assert (manifest.drafter_type, manifest.parent, manifest.config) == ("eagle3", first, model.config.to_dict())


def test_a_gate_for_chains_scores_chains_and_knows_how_far_a_drafter_drafts(place, begun):
    tree, chain = begun[2], run(place, shadow=ShadowConfig(chain=2), should_stop=stop_at(SURE))
    assert chain.status == "accepted", chain.reason
    assert 1 <= chain.incumbent.acceptance_length < tree.incumbent.acceptance_length
    assert chain.candidate.acceptance_length <= 3, "two draft tokens and the bonus token"
    far = run(place, shadow=ShadowConfig(chain=20))
    assert far.status == "failed" and "chain must be at most" in far.reason


def test_a_burst_of_a_few_requests_is_learned_and_says_nothing_yet(place, learners):
    store, _, job = place
    few = store.write_shard([learnable_trace(f"few{i}") for i in range(5)], "math")
    result = run(place, changed(job, shard_ids=[few]), learners=learners)
    assert (result.status, result.num_rows, result.candidate) == ("learning", 200, None)
    assert "none was scored yet" in result.reason
    more = run(place, changed(job, job_id="j2"), should_stop=stop_at(SURE), learners=learners)
    assert more.num_rows_before == 200 and more.candidate is not None


def test_repeating_an_order_without_a_state_gives_the_same_version(place, begun):
    assert run(place, should_stop=stop_at(SURE)).version == begun[2].version


def test_a_state_of_another_drafter_is_left_alone_and_a_damaged_one_begins_anew(place, learners):
    job = place[2]
    learners.save(key_of(job), {"seen": torch.zeros(0, dtype=torch.int64)}, {"step": 3})
    learners.save(key_of(job, "f" * 12), {"seen": torch.zeros(0, dtype=torch.int64)}, {"step": 4})
    result = run(place, should_stop=stop_at(SURE), learners=learners)
    assert result.status == "accepted" and result.num_rows_before == 0
    assert learners.load(key_of(job, "f" * 12))[1]["step"] == 4


def test_a_learner_that_surely_gains_too_little_is_rejected_and_begins_again(place, learners):
    job = changed(place[2], min_gain=3.0)
    result = run(place, job, learners=learners)
    assert result.status == "rejected" and result.version is None and "less than a swap costs" in result.reason
    assert result.candidate is not None and len(place[1].list()) == 1
    tensors, record = learners.load(key_of(job))
    assert record["step"] == 0 and record["evidence"]["test"]["more"] == [LOG_NOTHING] * len(TILTS)
    assert len(tensors["seen"]) >= result.num_rows // 40


def test_poisoned_weights_never_reach_the_registry(place, learners, monkeypatch):
    learn = trainer.Learner.learn

    def poison(self, *args, **kwargs):
        report = learn(self, *args, **kwargs)
        with torch.no_grad():
            self.model.lm_head.weight[0, 0] = float("nan")
        return report

    monkeypatch.setattr(trainer.Learner, "learn", poison)
    result = run(place, learners=learners)
    assert result.status == "failed" and len(place[1].list()) == 1
    tensors, record = learners.load(key_of(place[2]))
    assert all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point()), (
        "the next burst begins anew"
    )
    assert record["step"] == 0 and len(tensors["seen"]) > 0, "and is not given the same text again"


def test_a_burst_that_is_stopped_before_it_scores_is_stopped(place):
    for count in (0, 3):
        result = run(place, should_stop=stop_at(count))
        assert (result.status, result.reason, result.version) == ("stopped", "stopped on request", None)
    result = run(place, changed(place[2], time_limit_s=1e-6))
    assert result.status == "stopped" and "used up" in result.reason and result.train_s > 0


def test_all_of_a_bursts_time_is_booked(place):
    times = iter(range(10**9))
    result = run(place, changed(place[2], min_gain=0.2, time_limit_s=150.0), clock=lambda: float(next(times)))
    assert result.status == "learning" and result.train_s + result.shadow_s >= 150.0
    assert result.train_s > 0 and result.shadow_s > 0


@pytest.mark.parametrize("fields, reason", [
    ({"base_version": "0" * 12}, "not in the registry"),
    ({"base_version": "../../x"}, "hexadecimal"),
    ({"shard_ids": []}, "has not read"),
    ({"shard_ids": ["0000000000000001_5_t_aa_math"]}, "has not read"),
    ({"arm": ArmSpec(name="x", parameters="heads", num_rows=100)}, "arm.parameters"),
    ({"arm": ArmSpec(name="x", parameters="lora", num_rows=100)}, "arm.rank"),
    ({"arm": ArmSpec(name="x", parameters="full", num_rows=100, learning_rate=1e-2)}, "learning_rate"),
])  # fmt: skip
def test_orders_that_cannot_be_carried_out_fail_with_a_reason(place, fields, reason):
    result = run(place, changed(place[2], **fields))
    assert result.status == "failed" and reason in result.reason and result.version is None


def test_a_drafter_of_another_target_is_refused(place):
    registry = place[1]
    other = registry.put(base_state(1), **{**FIELDS, "target_version": "target-2"}).version
    result = run(place, changed(place[2], base_version=other))
    assert result.status == "failed" and "trained for target target-2" in result.reason


def test_a_missing_target_folder_fails(place, tmp_path):
    result = run(place, target=tmp_path / "none")
    assert result.status == "failed" and "config.json" in result.reason


def test_the_target_is_read_as_its_drafter_taps_it_and_in_its_number_type(place, tmp_path, monkeypatch):
    registry, read = place[1], []
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text("{}")

    def load(folder, **options):
        read.append((options["tap_layers"], options["dtype"]))
        return load_target_handle(folder, **options)

    monkeypatch.setattr(trainer, "load_target_handle", load)
    tapped = {**FIELDS, "config": {**FIELDS["config"], "tap_layers": [0, 2, 3]}, "target_version": "target-1-int8"}
    for version in (registry.put(base_state(1), **tapped).version, place[2].base_version):
        assert run(place, changed(place[2], base_version=version), target=tmp_path / "none").status == "failed"
    assert read == [([0, 2, 3], "int8"), (None, "auto")]


class FullDisk(DrafterRegistry):
    def put(self, *args, **kwargs):
        raise OSError("no space left on device")


def test_text_whose_features_are_of_another_drafters_layers_is_not_learned(place):
    store, registry, job = place
    wide = [learnable_trace(f"w{i}") for i in range(3)]
    for trace in wide:
        trace.features = torch.cat((trace.features, trace.features), 1)
    shards = [store.write_shard(wide, "math"), *job.shard_ids[:1]]
    result = run_training_job(msgspec.structs.replace(job, shard_ids=shards), store, registry, TARGET)
    assert result.num_requests == NUM_REQUESTS // 3
    result = run_training_job(msgspec.structs.replace(job, shard_ids=shards[:1]), store, registry, TARGET)
    assert result.status == "failed" and "3 shards or traces unusable" in result.reason


def test_a_full_disk_fails(place, tmp_path):
    store, _, job = place
    result = run((store, FullDisk(tmp_path / "registry"), job), should_stop=stop_at(SURE))
    assert result.status == "failed" and "no space left" in result.reason


def test_a_disk_without_room_for_the_learner_does_not_take_the_version_back(place, learners, monkeypatch):
    save = learners.save

    def refuse_next_base(key, *state):
        if key.base_version != place[2].base_version:
            raise OSError("no space left on device")
        save(key, *state)

    monkeypatch.setattr(learners, "save", refuse_next_base)
    result = run(place, should_stop=stop_at(SURE), learners=learners)
    assert result.status == "accepted" and place[1].get_manifest(result.version).parent == place[2].base_version
    assert learners.load(key_of(place[2])) is None, "what made it sure is used up"


def test_a_first_drafter_that_cannot_be_scored_is_left_out(place, monkeypatch):
    other = place[1].put(base_state(5), **FIELDS).version

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trainer, "load_version", fail)
    result = run(place, changed(place[2], first_version=other), should_stop=stop_at(SURE))
    assert result.status == "accepted" and result.first is None


def test_a_deleted_first_drafter_is_left_out(place):
    result = run(place, changed(place[2], first_version="f" * 12), should_stop=stop_at(SURE))
    assert result.status == "accepted" and result.first is None


def test_thread_count_is_restored(place):
    before = torch.get_num_threads()
    run(place, changed(place[2], shard_ids=[]), threads=1)
    assert torch.get_num_threads() == before


LORA = ArmSpec(name="lora", parameters="lora", num_rows=8000, learning_rate=5e-3, rehearsal_share=0.25, rank=8)


def test_a_learner_of_a_delta_registers_factors_that_add_to_the_base_and_goes_on_with_them(begun_delta, tmp_path):
    folder, job, result = begun_delta
    store, registry, learners = copied(folder, tmp_path)
    manifest, base = registry.get_manifest(result.version), registry.get_manifest(job.base_version)
    assert (manifest.parent, manifest.delta_of, manifest.arm) == (job.base_version, job.base_version, "lora")
    assert manifest.num_bytes < base.num_bytes
    factors, whole = registry.load_own(result.version), registry.load_state(result.version)
    before, after = registry.load_state(job.base_version), whole
    changes = {name for name in before if not torch.equal(before[name], after[name])}
    assert changes == {name.removesuffix(".down") + ".weight" for name in factors if name.endswith(".down")}
    assert torch.linalg.matrix_rank(after["layers.1.down_proj.weight"] - before["layers.1.down_proj.weight"]) <= 8
    read = learners.load(key_of(job, result.version))[0]
    assert all(torch.equal(read[f"mean/{name}"], factors[name]) for name in factors)
    job = changed(job, base_version=result.version, job_id="j2")
    again = run((store, registry, job), should_stop=stop_at(400), learners=learners)
    assert again.incumbent.version == result.version and again.status == "accepted", again.reason
    assert registry.get_manifest(again.version).delta_of == manifest.delta_of, "deltas do not pile up"


def test_whole_weights_can_be_learned_from_a_delta(ordered, begun_delta, tmp_path):
    folder, _, made = begun_delta
    store, registry, learners = copied(folder, tmp_path)
    job = changed(ordered[1], base_version=made.version, job_id="j2")
    again = run((store, registry, job), should_stop=stop_at(260), learners=learners)
    assert again.incumbent.version == made.version and again.candidate.acceptance_length > 0, again.reason
    assert again.status == "accepted" and registry.get_manifest(again.version).delta_of is None


@pytest.mark.parametrize("parameters", ["calibration", "head"])
def test_smaller_arms_run_to_a_verdict(place, parameters):
    arm = ArmSpec(name=parameters, parameters=parameters, num_rows=1200)
    result = run(place, changed(place[2], arm=arm))
    assert result.status in ("accepted", "rejected", "learning") and np.isfinite(result.candidate.gain_mean)
