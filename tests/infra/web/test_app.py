"""What a service refuses before it starts anything: ports, paths and GPUs that cannot be had."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from paceline.config import ServiceConfig, TrainerResources
from paceline.errors import ConfigError
from paceline.infra.app import check_gpus, claim_port, run_service
from paceline.infra.web.metrics import render_metrics
from tests.helpers.service_load import tiny_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServiceConfig:
    return tiny_config(tmp_path_factory.mktemp("service"), "tiny")


def test_a_taken_port_is_refused_with_the_fix() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another"):
            claim_port("127.0.0.1", port)
    assert claim_port("127.0.0.1", 0) > 0


@pytest.mark.parametrize("change", [{"model": "/nowhere"}, {"drafter": "/nowhere"}])
def test_a_wrong_path_is_refused_before_anything_starts(config: ServiceConfig, change: dict) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        run_service(replace(config, **change))


def test_a_gpu_for_training_that_the_replicas_need_is_refused(config: ServiceConfig) -> None:
    trains_on_gpu = replace(config, trainer_resources=TrainerResources(num_gpus=1))
    check_gpus(trains_on_gpu, 1)
    check_gpus(replace(config, device="cuda"), 0)  # the replicas' own need is Ray Serve's to report
    for refused, num_gpus in ((trains_on_gpu, 0), (replace(trains_on_gpu, device="cuda"), 1)):
        with pytest.raises(ConfigError, match="use 0 to train on the CPU"):
            check_gpus(refused, num_gpus)


def test_metrics_without_feedback() -> None:
    body, content_type = render_metrics({"engine": {"num_tokens": 7}})
    assert b"paceline_emitted_tokens_total 7.0" in body
    assert content_type.startswith("text/plain")
