"""Requests that share a prefix, and a drafter that keeps what it proposed."""

from __future__ import annotations

import torch

from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.specblock.drafter import SpecBlockDrafter
from paceline.serving.specblock.model import SpecBlockModel
from tests.helpers.drafters import specblock_for
from tests.helpers.engines import Run, finish, target

SYSTEM = tuple(3 + (11 * k + k * k) % 60 for k in range(24))


def specblock_state(seed: int) -> SpecBlockModel:
    return specblock_for(target(), seed, is_perturbed=True)


class RecordingDrafter(SpecBlockDrafter):
    """A SpecBlock drafter that keeps what it proposed at each (text, anchor) and counts the rows it was handed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(specblock_state(seed), target().embed_weight)
        self.proposals: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.num_rows = 0

    def ingest(self, inputs):
        self.num_rows += inputs.new_positions.numel()
        super().ingest(inputs)

    def propose(self, inputs):
        self.num_rows += inputs.new_positions.numel()
        proposal = super().propose(inputs)
        for b, history in enumerate(inputs.histories):
            self.proposals[tuple(history)] = (proposal.token_ids[b].clone(), proposal.logprobs[b].clone())
        return proposal


def serve(engine: Engine, prompts, *, num_tokens: int = 10, together: bool = False, prefix: str = "r", **fields):
    """Runs of the prompts, one after the other or all at once."""
    runs = []
    for i, prompt in enumerate(prompts):
        runs.append(Run(engine, f"{prefix}{i}", prompt, max_tokens=num_tokens, **fields))
        if not together:
            finish(engine)
    finish(engine)
    return runs


PROMPTS = [(*SYSTEM, 5 + i, 9, 30 - i) for i in range(4)]


def submit(engine: Engine, request_id: str, prompt=SYSTEM, **fields) -> list:
    events: list = []
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.submit(GenerationRequest(request_id=request_id, prompt_token_ids=prompt, params=params, **fields), events.append)  # fmt: skip
    finish(engine)
    return events


def assert_same_proposals(got: RecordingDrafter, want: RecordingDrafter) -> None:
    assert set(got.proposals) <= set(want.proposals) and got.proposals
    for history, (ids, logprobs) in got.proposals.items():
        assert torch.equal(ids[..., 0], want.proposals[history][0][..., 0])
        torch.testing.assert_close(logprobs, want.proposals[history][1], atol=1e-4, rtol=1e-4)
