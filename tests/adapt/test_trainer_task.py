"""The training task runs under its lease and hands back its result, in this process and in a Ray worker."""

import pytest

from paceline.adapt.trainer_task import launch_training, run_leased_job
from paceline.contracts import ArmSpec, TrainJob

JOB = TrainJob(
    job_id="j", bucket="b", arm=ArmSpec(name="a", parameters="full", num_rows=10), base_version="0" * 12,
    first_version="0" * 12, shard_ids=[], rehearsal_shard_ids=[], seed=0, time_limit_s=10.0,
)  # fmt: skip


class Lease:
    """Picklable; keeps what happened to it."""

    def __init__(self):
        self.events = []

    def __enter__(self):
        self.events.append("enter")
        return self

    def __exit__(self, *exc):
        self.events.append("exit")

    def should_stop(self):
        return False

    def finish(self, result):
        self.events.append(result)


def places(tmp_path):
    return {name: str(tmp_path / name) for name in ("trace_root", "registry_root", "target_dir")}


def test_the_result_goes_to_the_lease_after_it_is_no_longer_renewed(tmp_path):
    lease = Lease()
    result = run_leased_job(JOB, lease=lease, niceness=0, **places(tmp_path))
    assert lease.events == ["enter", "exit", result] and result.status == "failed"


def test_no_lease_is_needed(tmp_path):
    assert run_leased_job(JOB, niceness=0, **places(tmp_path)).job_id == "j"


@pytest.mark.ray
@pytest.mark.slow
def test_a_ray_worker_carries_out_the_order(tmp_path):
    import ray

    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    try:
        result = ray.get(launch_training(JOB, threads=1, **places(tmp_path)), timeout=120)
    finally:
        ray.shutdown()
    assert result.status == "failed" and "config.json" in result.reason
