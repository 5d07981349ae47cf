"""The training loop's optimizer is torch's, without its imports."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.adapt.families.training import AdamW

BETAS = (0.9, 0.95)


def _parameters(shapes, generator):
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


shapes = st.lists(st.sampled_from([(), (1,), (7,), (3, 5), (33, 2)]), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    first=shapes, second=shapes, seed=st.integers(0, 10**6), steps=st.integers(1, 6), decay=st.sampled_from([0.0, 0.1])
)
def test_it_changes_weights_bit_by_bit_as_torch_s_and_either_goes_on_from_the_other_s_state(
    first, second, seed, steps, decay
):
    generator = torch.Generator().manual_seed(seed)
    ours = [_parameters(own, generator) for own in (first, second)]
    theirs = copy.deepcopy(ours)

    def groups(of):
        return [{"params": of[0]}, {"params": of[1], "weight_decay": 0.0}]

    def new():
        return (
            AdamW(groups(ours), betas=BETAS, weight_decay=decay),
            torch.optim.AdamW(groups(theirs), betas=BETAS, weight_decay=decay, fused=True),
        )

    pair = new()
    for k in range(steps):
        if k == steps // 2 and k:  # each goes on from what the other knows
            own, known = pair[0].state_dict(), pair[1].state_dict()
            pair = new()
            pair[0].load_state_dict(known)
            pair[1].load_state_dict({**pair[1].state_dict(), "state": own["state"]})
        flat = [p for group in ours for p in group]
        for p, q in zip(flat, (p for group in theirs for p in group), strict=True):
            is_used = torch.rand((), generator=generator) < 0.8  # some learn nothing in a step
            p.grad = torch.randn(p.shape, generator=generator) if is_used else None
            q.grad = None if p.grad is None else p.grad.clone()
        for optimizer in pair:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (k + 1)
            optimizer.step()
        assert _same(flat, [p for group in theirs for p in group])
        pair[0].zero_grad()
        assert all(p.grad is None for p in flat)


def test_a_state_of_other_parameters_is_refused():
    optimizer = AdamW([{"params": _parameters([(3,)], torch.Generator())}], betas=BETAS, weight_decay=0.0)
    state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    for wrong in ({1: state}, {0: state | {"exp_avg": torch.zeros(4)}}):
        with pytest.raises(ValueError, match="must"):
            optimizer.load_state_dict({"state": wrong})
    with pytest.raises(KeyError):
        optimizer.load_state_dict({"state": {0: {"step": torch.tensor(1.0)}}})
    optimizer.load_state_dict({"state": {0: state}})
