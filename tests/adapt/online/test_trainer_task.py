"""The training task runs under its lease and hands back its result, in this process and in a Ray worker."""

import subprocess
import sys
import time

import pytest
import torch

from paceline.adapt.online.task import device_clock, launch_training, run_leased_job, task_options
from paceline.config import TrainerResources
from paceline.contracts import ArmSpec, TrainJob

JOB = TrainJob(
    job_id="j", bucket="b", arm=ArmSpec(name="a", parameters="full", num_rows=10), base_version="0" * 12,
    first_version="0" * 12, shard_ids=[], rehearsal_shard_ids=[], seed=0, time_limit_s=10.0,
)  # fmt: skip


class Lease:
    """Picklable; keeps what happened to it."""

    clock = None

    def __init__(self):
        self.events = []

    def __enter__(self):
        assert self.clock() > 0.0, "the lease tells what the worker takes from its first beat"
        self.events.append("enter")
        return self

    def __exit__(self, *exc):
        self.events.append("exit")

    def should_stop(self):
        return False

    def finish(self, result):
        self.events.append(result)


def places(tmp_path):
    return {name: str(tmp_path / name) for name in ("trace_root", "registry_root", "learner_root", "target")}


def test_the_result_goes_to_the_lease_after_it_is_no_longer_renewed(tmp_path):
    lease = Lease()
    result = run_leased_job(JOB, lease=lease, **places(tmp_path))
    assert lease.events == ["enter", "exit", result] and result.status == "failed"


def test_no_lease_is_needed(tmp_path):
    assert run_leased_job(JOB, **places(tmp_path)).job_id == "j"


def test_the_default_asks_for_next_to_nothing():
    asked = task_options(TrainerResources())
    assert (asked["num_cpus"], asked["num_gpus"], asked["resources"]) == (0.1, 0.0, {})


@pytest.fixture(scope="module")
def train_node():
    """A node like a cluster's train node; its GPU is a number in Ray's books."""
    import ray

    from paceline.infra.app import lean_nodes

    with lean_nodes():
        ray.init(
            address="local", num_cpus=2, num_gpus=1, resources={"train_slot": 1}, include_dashboard=False,
            object_store_memory=80 * 2**20, log_to_driver=False,
        )  # fmt: skip
    yield ray
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.slow
def test_a_ray_worker_carries_out_the_order(train_node, tmp_path):
    wanted = TrainerResources(niceness=0)  # other tests keep the cores busy
    result = train_node.get(launch_training(JOB, threads=1, resources=wanted, **places(tmp_path)), timeout=280)
    assert result.status == "failed" and "config.json" in result.reason
    assert result.train_s > 0.5, "torch's imports took as much of the core"
    again = train_node.get(launch_training(JOB, threads=1, resources=wanted, **places(tmp_path)), timeout=280)
    assert 0 < again.train_s < 0.3 * result.train_s, "the process that has imported everything took this one, too"


@pytest.mark.ray
@pytest.mark.slow
def test_ray_gives_the_task_what_the_configuration_asks_for(train_node):
    def assigned():
        import os

        return train_node.get_runtime_context().get_assigned_resources(), os.environ["OMP_NUM_THREADS"]

    asked = task_options(TrainerResources(num_cpus=1, num_gpus=1, resources={"train_slot": 1}), threads=2)
    given, threads = train_node.get(train_node.remote(assigned).options(**asked).remote(), timeout=280)
    assert given == {"CPU": 1.0, "GPU": 1.0, "train_slot": 1.0} and threads == "2"


@pytest.mark.ray
@pytest.mark.slow
def test_a_task_waits_where_no_node_has_what_it_asks_for(train_node):
    def start(**resources):
        asked = task_options(TrainerResources(resources=resources))
        return train_node.remote(max_retries=0)(lambda: "ran").options(**asked).remote()

    waiting = [start(train_slot=2), start(other_slot=1)]
    assert train_node.get(start(train_slot=1), timeout=280) == "ran"
    assert train_node.wait(waiting, num_returns=1, timeout=1.0) == ([], waiting)
    for ref in waiting:
        train_node.cancel(ref, force=True)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_torch_does_not_see_ends_the_job_with_the_fix(train_node, tmp_path):
    wanted = TrainerResources(num_gpus=1, resources={"train_slot": 1}, niceness=0)
    options = {**places(tmp_path), "target": "bundled"}
    result = train_node.get(launch_training(JOB, resources=wanted, **options), timeout=280)
    assert result.status == "failed" and "trainer_resources.num_gpus 0" in result.reason


def test_a_process_that_waits_for_its_core_is_not_charged_for_waiting():
    clock = device_clock("cpu", 1)
    began = clock()
    time.sleep(0.3)
    assert clock() - began < 0.2
    while clock() - began < 0.2:
        pass


def test_a_gpu_is_charged_from_its_opening_for_what_its_process_does():
    spent, is_open = 7.0, False
    clock = device_clock("cuda", 2, spent=lambda: spent, is_open=lambda: is_open)
    assert clock() == 0.0
    spent = 19.0  # imports
    assert clock() == 0.0
    is_open = True
    assert clock() == 0.0
    spent = 21.5
    assert clock() == 2.5
    clock = device_clock("cuda", 1, is_open=lambda: True)
    clock()
    time.sleep(0.3)
    assert clock() < 0.2, "nor is it charged for waiting"
    while clock() < 0.2:
        pass
    if not torch.cuda.is_initialized():
        assert device_clock("cuda", 1)() == 0.0


def test_a_controller_that_orders_jobs_and_lists_versions_loads_no_torch() -> None:
    code = (
        "import sys, paceline.infra.controller.actor, paceline.adapt.online.task, paceline.adapt.data.trace_store, "
        "paceline.adapt.versions.registry; print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split()[-1] == "False"


def test_a_trainer_loads_no_model_of_transformers() -> None:
    code = (
        "import sys, paceline.adapt.online.trainer, paceline.paths as p; "
        "from paceline.adapt.families.target_handle import load_target_handle as load; load(p.resolve_model('bundled')); "
        "print({'transformers.modeling_utils', 'torch._dynamo', 'scipy.optimize'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split()[-1] == "set()"
