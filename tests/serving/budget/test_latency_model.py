"""The latency model keeps its prior's shape and follows the machine's speed."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.serving.budget.cost_model import CostModel
from paceline.serving.budget.roofline import Roofline, TargetShape
from tests.helpers.fakes import tiny_target

QWEN3_8B = TargetShape(
    num_layers=36, hidden_size=4096, query_size=4096, kv_size=1024, mlp_size=12288, vocab_size=151936
)


def test_bytes_and_operations_of_one_row_are_those_of_its_weights():
    # 36 x (4096 x (4096 + 1024) x 2 + 3 x 4096 x 12288) + 4096 x 151936 weights are read
    weights = 36 * (4096 * 5120 * 2 + 3 * 4096 * 12288) + 4096 * 151936
    assert 7.5e9 < weights < 7.6e9
    assert float(QWEN3_8B.bytes(1, 0)) == pytest.approx(2 * weights, rel=1e-3)
    assert float(QWEN3_8B.flops(1, 0)) == pytest.approx(2 * weights, rel=1e-3)
    # one cached row: a key and a value of 1024 numbers in 36 layers
    assert float(QWEN3_8B.bytes(1, 1000) - QWEN3_8B.bytes(1, 0)) == 1000 * 36 * 2 * 1024 * 2
    assert float(QWEN3_8B.flops(3, 1000) - QWEN3_8B.flops(3, 0)) == 3 * 1000 * 36 * 4 * 4096


def test_the_shape_of_a_target_counts_its_weights():
    target = tiny_target()
    shape = TargetShape.of(target.config, 4)
    layers = sum(p.numel() for n, p in target.model.named_parameters() if ".layers." in n and "norm" not in n)
    moved = float(shape.bytes(1, 0)) / 4 - shape.num_layers * (2 * shape.kv_size + 4 * 32 + 2 * shape.mlp_size)
    assert moved == layers + shape.vocab_size * 32 + shape.vocab_size


def test_a_roofline_is_flat_while_bytes_bind_and_rises_when_operations_do():
    h100 = Roofline(shape=QWEN3_8B, bytes_per_s=3.35e12, flops_per_s=9.9e14)
    times = h100.seconds(np.array([1, 64, 2048]), 0)
    assert times[0] == pytest.approx(15.1e9 / 3.35e12, rel=0.01) and times[1] < 1.1 * times[0]
    assert times[2] == pytest.approx(float(QWEN3_8B.flops(2048, 0)) / 9.9e14) and times[2] > 5 * times[0]


@pytest.mark.parametrize("is_declared", [False, True])
def test_the_scale_converges_to_a_machine_that_has_changed(is_declared):
    machine = Roofline(shape=QWEN3_8B, bytes_per_s=1e12, flops_per_s=1e14)
    if is_declared:
        model = CostModel(roofline=machine)
    else:
        model = CostModel(shape=QWEN3_8B)
        model.calibrate(lambda n, b: float(machine.seconds(n, 0)), max_rows=513, max_requests=4)
    rng = np.random.default_rng(0)
    for factor in (1.0, 2.5, 0.4):
        for _ in range(400):
            rows, context = int(rng.integers(1, 200)), int(rng.choice([0, 700, 9000]))
            model.observe(rows, context, factor * float(machine.seconds(rows, context)) * rng.uniform(0.9, 1.1))
        for rows, context in ((1, 0), (33, 700), (150, 9000)):
            got = model.seconds(rows, context) / float(machine.seconds(rows, context))
            assert got == pytest.approx(factor, rel=0.06)
        assert model.speed == pytest.approx(factor, rel=0.1)


def test_the_prior_keeps_its_steps_whatever_is_observed():
    def stairs(rows, num_requests=1):
        return 1e-3 * (1 + (rows > 9) * 4)

    model = CostModel()
    model.calibrate(stairs, max_rows=65)
    for _ in range(200):
        model.observe(3, 10, 3e-3)
    assert model.seconds(13, 10) / model.seconds(9, 10) == pytest.approx(5.0)
    assert model.seconds(3, 10) == pytest.approx(3e-3, rel=0.01)
    assert model.predict(np.array([1, 9, 13]), 10) == pytest.approx([model.seconds(n, 10) for n in (1, 9, 13)])
    assert model.prior(9) == pytest.approx(1e-3)


def test_one_hiccup_moves_the_scale_little_and_an_unknown_machine_is_scaled_at_once():
    model = CostModel()
    model.observe(5, 10, 0.25)
    assert model.seconds(5, 10) == pytest.approx(0.25)
    model.observe(5, 10, 1e3)
    assert model.seconds(5, 10) < 0.25 * (1 + 3 * 0.05 + 1e-6)
    model.observe(5, 10, 0.0)
    assert model.seconds(5, 5000) == pytest.approx(model.seconds(5, 10)), "an unseen context takes the newest scale"


@pytest.mark.parametrize("is_calibrated", [False, True])
def test_kept_times_equal_the_prior_at_the_contexts_they_stand_for(is_calibrated):
    machine = Roofline(shape=QWEN3_8B, bytes_per_s=1e12, flops_per_s=1e14)
    model = CostModel(shape=QWEN3_8B, roofline=machine)
    if is_calibrated:
        model.calibrate(lambda n, b: float(machine.seconds(n, 0)) * (1 + 0.01 * b), max_rows=513, max_requests=8)
    for num_requests, context in ((1, 0), (1, 13), (8, 96), (3, 7 * 1024)):  # each a step of its doubling
        rows = np.arange(num_requests, 60 * num_requests)
        wanted = model.prior(rows, context, num_requests)
        assert model.predict(rows, context, num_requests) == pytest.approx(wanted)
        assert [model.seconds(int(n), context, num_requests) for n in rows] == pytest.approx(wanted.tolist())
        assert [model.seconds(float(n), context, num_requests) for n in rows] == pytest.approx(wanted.tolist())
    # Between steps, and beyond the rows that are kept: the prior itself, or that of the step below.
    beyond = np.array([1, 70, 5000])
    assert model.predict(beyond, 1000) == pytest.approx(model.prior(beyond, 1000))
    assert model.seconds(30, 1000) == pytest.approx(model.prior(30, 960))


def test_times_kept_before_a_calibration_are_dropped_by_it():
    model = CostModel()
    before = model.seconds(5, 10)
    model.calibrate(lambda n, b: 7 * before, max_rows=65)
    assert model.seconds(5, 10) == pytest.approx(7 * before)
    assert model.predict(np.array([5]), 10) == pytest.approx([7 * before])


def test_as_many_contexts_as_there_are_keep_a_bounded_number_of_times():
    model = CostModel()
    for num_requests in (1, 2, 3, 64, 7, 256):
        for context in range(0, 400_000, 997):
            assert model.seconds(5, context, num_requests) == pytest.approx(model.prior(5, 0, num_requests))
            assert sum(len(times) for times, _ in model._tables.values()) <= 65 * 1024
