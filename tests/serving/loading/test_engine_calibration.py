"""What the engine measures before its first request is what rounds will cost."""

from __future__ import annotations

import pytest
import torch

from paceline.config import EngineConfig, TreeConfig
from paceline.kernels.cpu.library import ISA_VARIABLE
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.calibration import EngineProbe
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.trees.policy import TreePolicy
from tests.helpers.fakes import tiny_target
from tests.helpers.scripted_drafters import RandomDrafter
from tests.helpers.static_kernels import STATIC_KERNELS


class Machine:
    """A target whose forwards take as long as their padded attention says, by its own clock."""

    def __init__(self, pair_s: float, uneven_s: float = 0.0) -> None:
        self.pair_s, self.uneven_s, self.now, self.sizes = pair_s, uneven_s, 0.0, []

    def timer(self) -> float:
        return self.now

    def forward(self, batch, kv):
        sizes = batch.cu_rows.diff()
        self.sizes.append(sizes.tolist())
        assert batch.ancestors.shape == (int(sizes.sum()), int(sizes.max()))
        width, rows = int(sizes.max()), int(sizes.sum())
        keys = int(batch.context_lens.max()) + width
        num_padded = width * len(sizes) - rows
        self.now += 2e-3 + 4e-5 * rows + self.pair_s * num_padded * keys + self.uneven_s * (num_padded > 0)
        return torch.zeros(())


def make_probe(machine, num_scratch=200, kernels=None):
    target = tiny_target()
    target.kernels = kernels or target.kernels
    kv = target.new_kv_pool(8, 16, num_scratch)
    return EngineProbe(target, kv, timer=machine.timer, forward=machine.forward)


@pytest.mark.parametrize(("uneven_s", "pair_s"), [(0.0, 0.0), (3e-4, 0.0), (0.0, 2e-7), (3e-4, 2e-7)])
def test_padding_is_measured_by_uneven_rounds_against_even_ones(uneven_s, pair_s):
    machine = Machine(pair_s, uneven_s)
    got = make_probe(machine).padding_s(8, 200)
    assert got == pytest.approx((uneven_s, pair_s), rel=1e-6, abs=1e-12)
    assert all(len(s) == 8 and sum(s) == 72 for s in machine.sizes)
    assert {max(s) for s in machine.sizes} == {9, 10, 17}


def test_padding_is_not_measured_for_one_request_or_without_room():
    machine = Machine(1e-6)
    probe = make_probe(machine)
    assert probe.padding_s(1, 200) == probe.padding_s(8, 31) == (0.0, 0.0) and not machine.sizes
    assert probe.padding_s(2, 200) == pytest.approx((0.0, 1e-6), rel=1e-6, abs=1e-12)
    assert probe.padding_s(8, 40) == pytest.approx((0.0, 1e-6), rel=1e-6, abs=1e-12)
    assert sum(machine.sizes[-1]) == 40


def test_a_forward_has_the_rows_and_requests_asked_for():
    machine = Machine(0.0)
    probe = make_probe(machine)
    assert probe.verify(12, 5) == pytest.approx(2e-3 + 12 * 4e-5)
    assert probe.verify(40, 4, 25) > 0
    assert [sum(s) for s in machine.sizes] == [12, 40] and [len(s) for s in machine.sizes] == [5, 4]
    assert machine.sizes[1][0] == 25 and max(machine.sizes[1][1:]) <= 6


def test_only_forwards_that_pad_are_charged_for_padding(monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "none")
    for kernels, wanted in ((None, 2e-7), (STATIC_KERNELS, 0.0)):
        policy = TreePolicy(TreeConfig())
        make_probe(Machine(2e-7), kernels=kernels).calibrate_verify(policy, 8)
        assert policy.budget.costs.pair_s == pytest.approx(wanted, rel=1e-6)


def test_rounds_tell_the_policy_the_longest_context():
    target = tiny_target()
    config = EngineConfig(kv_bytes=2**22, tree=TreeConfig(policy="bastion"))
    engine = Engine(target, DrafterSlots(RandomDrafter(target.vocab_size), "v0"), config)
    seen, budget = [], engine.policy.budget
    observe, budget.observe = budget.observe, lambda round_: (seen.append(round_), observe(round_))
    for name, length in (("a", 5), ("b", 30)):
        prompt = tuple(range(1, 1 + length))
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        engine.submit(GenerationRequest(request_id=name, prompt_token_ids=prompt, params=params), lambda _event: None)
    while engine.step():
        pass
    both = [s for s in seen if len(s.keys) == 2]
    assert both and all(30 <= s.longest_context < s.context_rows <= 2 * s.longest_context for s in both)
