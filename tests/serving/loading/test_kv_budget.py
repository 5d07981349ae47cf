"""The KV budget: chosen from free memory, never more than useful, refused when a request could not fit."""

from __future__ import annotations

import logging

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import EngineConfig, ServiceConfig
from paceline.errors import ConfigError
from paceline.records import build
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.kv_size import (
    CUDA_SHARE,
    MIN_KV_BYTES,
    RAM_SHARE,
    auto_kv_bytes,
    free_device_bytes,
    settle_kv_bytes,
)
from paceline.serving.target_model.device import available_ram_bytes
from tests.helpers.fakes import tiny_target

CPU = torch.device("cpu")
GIB = 2**30


@given(free=st.integers(0, 2**40), share=st.floats(0.01, 1), useful=st.integers(1, 2**44))
def test_the_choice_is_a_share_of_what_is_free_capped_by_what_is_useful(free, share, useful):
    chosen = auto_kv_bytes(free, share=share, useful_bytes=useful)
    assert chosen >= MIN_KV_BYTES
    assert chosen == MIN_KV_BYTES or (chosen <= useful and chosen <= free * share)
    assert chosen >= min(useful, int(free * share))


def test_a_small_model_gets_what_all_its_requests_can_fill():
    config = EngineConfig(max_running=4, page_tokens=16)
    settled = settle_kv_bytes(config, row_bytes=64 * 1024, context_tokens=1000, device=CPU)
    assert settled.kv_bytes == 4 * 1008 * 64 * 1024, "whole pages of every request"
    assert config.kv_bytes is None, "configurations are not changed"


def test_a_large_model_gets_a_share_of_the_ram_divided_among_replicas():
    before = available_ram_bytes()
    one, four = (
        settle_kv_bytes(EngineConfig(), row_bytes=2**20, context_tokens=2**20, device=CPU, num_sharing=n).kv_bytes
        for n in (1, 4)
    )
    after = available_ram_bytes()
    low, high = 0.8 * min(before, after), 1.2 * max(before, after)  # other processes come and go
    assert low * RAM_SHARE <= one <= high * RAM_SHARE
    assert low * RAM_SHARE / 4 <= four <= high * RAM_SHARE / 4


def test_the_demo_model_keeps_at_least_what_it_had():
    engine = Engine(tiny_target(), DrafterSlots(), EngineConfig())
    assert engine.config.kv_bytes == MIN_KV_BYTES == 64 * 2**20
    assert engine.max_context_tokens == 512


def test_the_choice_is_one_log_line(caplog):
    with caplog.at_level(logging.INFO, "paceline.serving.loading.kv_size"):
        settle_kv_bytes(EngineConfig(), row_bytes=2048, context_tokens=512, device=CPU)
        settle_kv_bytes(EngineConfig(kv_bytes=2**20), row_bytes=2048, context_tokens=4096, device=CPU)
    auto, given_ = (r.getMessage() for r in caplog.records)
    assert auto.startswith("kv pool mb=64 tokens=32768 ") and "chosen: at most 25% of" in auto and "cpu" in auto
    assert "as configured; too small for the model's context of 4096 tokens" in given_ and "tokens=512" in given_


def test_explicit_bytes_are_taken_as_they_are():
    assert (
        settle_kv_bytes(EngineConfig(kv_bytes=12345678), row_bytes=768, context_tokens=512, device=CPU).kv_bytes
        == 12345678
    )


def test_too_few_bytes_for_one_request_of_the_wanted_context_are_refused_with_what_to_do():
    config = EngineConfig(kv_bytes=100 * 1024, max_context_tokens=200, page_tokens=16)
    with pytest.raises(
        ConfigError, match=r"at least 212992 for one request of engine.max_context_tokens=200.*at most 96"
    ) as e:
        settle_kv_bytes(config, row_bytes=1024, context_tokens=512, device=CPU)
    assert str(e.value).count(". ") == 0, "one sentence"
    for fits in (
        EngineConfig(kv_bytes=212992, max_context_tokens=200),
        EngineConfig(kv_bytes=100 * 1024, max_context_tokens=96),
    ):
        settle_kv_bytes(fits, row_bytes=1024, context_tokens=512, device=CPU)


def test_less_than_two_pages_are_refused():
    with pytest.raises(ConfigError, match="at least 2 pages of 16384 bytes, got 20000"):
        settle_kv_bytes(EngineConfig(kv_bytes=20000), row_bytes=1024, context_tokens=512, device=CPU)


@pytest.mark.parametrize("value", [0, -1])
def test_senseless_bytes_are_refused_by_the_configuration(value):
    with pytest.raises(ConfigError, match=r"engine\.kv_bytes must be >= 1"):
        build(ServiceConfig, {"engine": {"kv_bytes": value}})
    assert build(ServiceConfig, {"engine": {"kv_bytes": None}}).engine.kv_bytes is None


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({"memory.max": "3000", "memory.current": "1000"}, 2000),
        ({"memory.max": "1000", "memory.current": "3000"}, 0),
        ({"memory/memory.limit_in_bytes": "500", "memory/memory.usage_in_bytes": "100"}, 400),
        (
            {
                "memory.max": "3000",
                "memory.current": "2900",
                "memory.stat": "anon 900\nfile 2000\ninactive_file 1500\nactive_file 400\nslab 3",
            },
            2000,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "500",
                "memory/memory.usage_in_bytes": "450",
                "memory/memory.stat": "inactive_file 1\nactive_file 1\ntotal_inactive_file 200\ntotal_active_file 50",
            },
            300,
        ),
        ({"memory.max": "3000", "memory.current": "1000", "memory.stat": "inactive_file ?\n"}, 2000),
    ],
)
def test_a_containers_limit_counts(tmp_path, files, want):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert available_ram_bytes(tmp_path) == want


def test_no_limit_is_the_machines_memory(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert 0 < available_ram_bytes(tmp_path) <= psutil.virtual_memory().total


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_gives_a_share_of_its_free_memory():
    device = torch.device("cuda")
    free = free_device_bytes(device)
    settled = settle_kv_bytes(EngineConfig(), row_bytes=2**20, context_tokens=2**20, device=device)
    assert settled.kv_bytes == pytest.approx(CUDA_SHARE * free, rel=0.05)
