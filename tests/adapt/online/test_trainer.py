"""A training order ends in an accepted, rejected, failed or stopped result, and only an accepted version is registered."""

import time

import msgspec
import numpy as np
import pytest
import torch

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.families.target_handle import load_target_handle
from paceline.adapt.online import trainer
from paceline.adapt.online.trainer import ShadowConfig, run_training_job
from paceline.adapt.online.update import update_drafter
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.clock import ManualClock
from paceline.contracts import ArmSpec, TrainJob
from paceline.serving.eagle3.model import EagleConfig, EagleModel
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel
from tests.helpers.training import EMBED, FEATURES, TARGET, VOCAB, learnable_trace

CONFIG = SpecBlockConfig(
    hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=VOCAB,
    feature_size=FEATURES, embed_size=EMBED,
)  # fmt: skip


def base_state(seed=0):
    torch.manual_seed(seed)
    return SpecBlockModel(CONFIG).state_dict()


FIELDS = {
    "drafter_type": "specblock", "config": CONFIG.to_dict(), "target_version": TARGET.version,
}  # fmt: skip


@pytest.fixture
def place(tmp_path):
    """Store with two shards of 'math' and one of 'code', registry with a first drafter, and an order."""
    store, registry = TraceStore(tmp_path / "traces"), DrafterRegistry(tmp_path / "registry")
    shards = [store.write_shard([learnable_trace(f"m{k}-{i}") for i in range(16)], "math") for k in range(2)]
    other = store.write_shard([learnable_trace(f"c{i}", bucket="code") for i in range(8)], "code")
    first = registry.put(base_state(), **FIELDS).version
    job = TrainJob(
        job_id="j1", bucket="math", arm=ArmSpec(name="full-1k", parameters="full", num_rows=1000, epochs=6),
        base_version=first, first_version=first, shard_ids=shards, rehearsal_shard_ids=[other], seed=3,
        time_limit_s=120.0,
    )  # fmt: skip
    return store, registry, job


TRAINED = {}


def quick_update(model, *args, **kwargs):
    """The real update, computed once: tests of what follows it need not train again."""
    if not TRAINED:
        TRAINED["result"] = update_drafter(model, *args, **kwargs)
        TRAINED["state"] = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(TRAINED["state"])
    return TRAINED["result"]


def run(place, job=None, target=TARGET, **options):
    store, registry, default = place
    return run_training_job(job or default, store, registry, target, **options)


def changed(job, **fields):
    return msgspec.structs.replace(job, **fields)


def test_a_useful_update_is_accepted_and_registered(place):
    _, registry, job = place
    steps, beats = [], []
    result = run(
        place, progress=lambda done, total, info: steps.append((done, total)), heartbeat=lambda: beats.append(1)
    )
    assert result.status == "accepted", result.reason
    manifest = registry.get_manifest(result.version)
    assert (manifest.parent, manifest.arm, manifest.bucket) == (job.base_version, "full-1k", "math")
    assert (
        manifest.num_train_rows > 1000 and manifest.metrics["acceptance_length"] == result.candidate.acceptance_length
    )
    assert result.candidate.gain_lower > 0 and result.candidate.version == result.version
    assert result.incumbent.version == result.first.version == job.base_version
    assert result.train_s > 0 and result.shadow_s > 0 and beats
    assert steps[-1][0] == steps[-1][1] == len(steps)
    registry.load_state(result.version, target_version=TARGET.version)


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


def test_repeating_an_order_gives_the_same_version(place):
    job = changed(place[2], arm=ArmSpec(name="full-1k", parameters="full", num_rows=1000, epochs=3))
    shadow = ShadowConfig(min_gain=-1.0)
    assert run(place, job, shadow=shadow).version == run(place, job, shadow=shadow).version is not None


def test_a_later_job_is_judged_against_its_base_and_scored_against_the_first(place):
    first = run(place)
    arm = ArmSpec(name="small", parameters="full", num_rows=100, epochs=1)
    job = changed(place[2], job_id="j2", base_version=first.version, seed=4, arm=arm)
    result = run(place, job)
    assert result.status in ("accepted", "rejected")
    assert result.incumbent.version == first.version and result.first.version == job.first_version
    assert result.first.acceptance_length < result.incumbent.acceptance_length


def test_an_update_that_does_not_help_is_rejected_and_not_registered(place):
    registry = place[1]
    result = run(place, shadow=ShadowConfig(min_gain=100.0), update=quick_update)
    assert result.status == "rejected" and result.version is None and "not above 100" in result.reason
    assert result.candidate is not None and len(registry.list()) == 1


def test_a_randomly_initialised_candidate_is_rejected(place):
    """Whatever training ends in, the replay walk and the gate see that it drafts worse than what serves."""
    trained = run(place, update=quick_update)

    def scramble(model, *args, **kwargs):
        model.load_state_dict(base_state(seed=9))
        return TRAINED["result"]

    result = run(place, changed(place[2], job_id="j2", base_version=trained.version), update=scramble)
    assert result.status == "rejected" and result.version is None
    assert result.candidate.acceptance_length < result.incumbent.acceptance_length
    assert result.candidate.gain_lower < 0 and "not above 0" in result.reason
    assert len(place[1].list()) == 2


def test_poisoned_weights_never_reach_the_registry(place):
    def poison(model, *args, **kwargs):
        with torch.no_grad():
            model.lm_head.weight[0, 0] = float("nan")
        return 1, 1.0

    result = run(place, update=poison)
    assert result.status == "failed" and "finite" in result.reason and len(place[1].list()) == 1


def test_a_stop_request_ends_the_update_and_the_scoring(place):
    calls = []

    def stop_at(count):
        calls.clear()
        return lambda: calls.append(1) or len(calls) > count

    for count in (0, 3):
        result = run(place, should_stop=stop_at(count))
        assert (result.status, result.reason, result.version) == ("stopped", "stopped on request", None)
    result = run(place, should_stop=stop_at(2), update=lambda *a, **k: (1, 1.0))
    assert result.status == "stopped" and len(place[1].list()) == 1


def test_the_time_limit_holds(place):
    began = time.perf_counter()
    result = run(place, changed(place[2], time_limit_s=0.01))
    assert result.status == "stopped" and "time limit of 0.01 s" in result.reason
    assert time.perf_counter() - began < 10


def test_a_job_that_its_time_limit_ends_during_scoring_books_the_scoring_too(place, monkeypatch):
    clock = ManualClock(100.0)
    score = trainer.shadow_scores

    def slow_update(*args, **kwargs):
        clock.advance(0.25)
        return quick_update(*args, **kwargs)

    def slow_scores(*args, should_stop, **options):
        def look():
            clock.advance(0.0625)
            return should_stop()

        return score(*args, should_stop=look, **options)

    monkeypatch.setattr(trainer, "shadow_scores", slow_scores)
    result = run(place, changed(place[2], time_limit_s=0.5), clock=clock.now, update=slow_update)
    assert result.status == "stopped" and "time limit of 0.5 s" in result.reason
    assert result.train_s == 0.25
    assert result.shadow_s == 5 * 0.0625, "the look that finds 0.5625 s ends it"
    assert result.train_s + result.shadow_s == clock.now() - 100.0


def test_a_short_time_limit_shortens_the_update_instead_of_losing_it(place, monkeypatch):
    monkeypatch.setattr(trainer, "TRAIN_SHARE", 1e-5)
    steps = []
    result = run(place, progress=lambda done, total, info: steps.append((done, total)))
    assert result.status in ("accepted", "rejected") and steps[-1][0] < steps[-1][1]


@pytest.mark.parametrize("fields, reason", [
    ({"base_version": "0" * 12}, "not in the registry"),
    ({"base_version": "../../x"}, "hexadecimal"),
    ({"shard_ids": []}, "too little data"),
    ({"shard_ids": ["0000000000000001_5_t_aa_math"]}, "too little data"),
    ({"arm": ArmSpec(name="x", parameters="lora", num_rows=100)}, "arm.parameters"),
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


def test_a_full_disk_fails(place, tmp_path):
    store, _, job = place
    result = run((store, FullDisk(tmp_path / "registry"), job), update=quick_update)
    assert result.status == "failed" and "no space left" in result.reason


def test_a_deleted_first_drafter_is_left_out(place):
    result = run(place, changed(place[2], first_version="f" * 12), update=quick_update)
    assert result.status == "accepted" and result.first is None


def test_thread_count_is_restored(place):
    before = torch.get_num_threads()
    run(place, changed(place[2], shard_ids=[]), threads=1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("parameters", ["calibration", "head"])
def test_smaller_arms_run_to_a_verdict(place, parameters):
    arm = ArmSpec(name=parameters, parameters=parameters, num_rows=500)
    result = run(place, changed(place[2], arm=arm))
    assert result.status in ("accepted", "rejected") and np.isfinite(result.candidate.gain_mean)
