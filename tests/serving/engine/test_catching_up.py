"""Catching up: a drafter gets every backlog row once, in order, no request that has none in the call, and no round waits for
more rows than take as long as a chunk of a prompt."""

import functools
from types import SimpleNamespace

import pytest
import torch

from paceline.serving.engine.decode import MAX_BACKLOG_ROWS, catch_up, draft_inputs, is_behind
from tests.helpers.engines import FeatureDrafter, Run, greedy, make_engine


class RecordingDrafter:
    def __init__(self):
        self.calls = []

    def ingest(self, inputs):
        self.calls.append(inputs)


def request(index, context_len, drafted_len):
    tokens = [100 * index + i for i in range(context_len + 1)]
    return SimpleNamespace(
        request_id=f"r{index}", tokens=tokens, context_len=context_len, drafted_len=drafted_len,
        request=SimpleNamespace(tenant=""), delta=-1,
    )  # fmt: skip


@pytest.mark.parametrize("chunk_rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("max_rows", [32, 100, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_every_backlog_row_is_ingested_once_and_in_order_by_calls_without_bystanders(chunk_rows, max_rows, seed):
    g = torch.Generator().manual_seed(seed)
    contexts = torch.randint(1, 90, (6,), generator=g).tolist()
    requests = [request(i, n, int(torch.randint(0, n, (), generator=g))) for i, n in enumerate(contexts)]
    requests.append(request(6, 80, 80 - MAX_BACKLOG_ROWS - 1))
    begun = [r.drafted_len for r in requests]
    table = torch.arange(7 * 100).view(7, 100)
    drafter, temperatures = RecordingDrafter(), torch.arange(7.0)

    def ingest(behind, chosen, stops):
        rows = [behind[i] for i in chosen]
        own = [requests[i] for i in rows]
        drafter.ingest(draft_inputs(own, table[rows], temperatures[rows], None, stops))

    late, num_rows, num_rounds = [r for r in requests if is_behind(r)], 0, 0
    while any(map(is_behind, requests)):
        behind = [i for i, r in enumerate(requests) if is_behind(r)]
        num_taken = catch_up([requests[i] for i in behind], chunk_rows, max_rows, functools.partial(ingest, behind))
        assert 0 < num_taken <= max_rows
        num_rows, num_rounds = num_rows + num_taken, num_rounds + 1
        assert not is_behind(late[0]) or num_rounds * max_rows < 90, "the first comes first"
    taken = {r.request_id: [] for r in requests}
    for inputs in drafter.calls:
        counts = inputs.cu_new.diff()
        assert (counts > 0).all() and counts.sum() <= chunk_rows
        for i, name in enumerate(inputs.request_ids):
            rows = slice(int(inputs.cu_new[i]), int(inputs.cu_new[i + 1]))
            own = int(name[1:])
            taken[name] += inputs.new_positions[rows].tolist()
            assert inputs.new_slots[rows].tolist() == (inputs.new_positions[rows] + 100 * own).tolist()
            assert inputs.new_token_ids[rows].tolist() == (inputs.new_positions[rows] + 1 + 100 * own).tolist()
            assert inputs.temperatures[i] == own
    for r, start in zip(requests, begun, strict=True):
        done = r.drafted_len if r in late else start  # what a usual round leaves is the drafting pass's
        assert taken[r.request_id] == list(range(start, done)) and r.drafted_len == done and not is_behind(r)
    assert late and num_rows == sum(map(len, taken.values()))


def test_no_round_waits_for_more_backlog_than_takes_as_long_as_a_chunk_of_a_prompt():
    """A long prompt is caught up with from round to round; meanwhile it decodes plainly and the others draft."""
    drafter = FeatureDrafter()
    engine = make_engine(drafter, num_pages=100, prefill_chunk_tokens=40)
    engine.policy.budget.catch_up_rows = lambda num_prompt_rows, *_: num_prompt_rows
    short = Run(engine, "short", max_tokens=40)
    for _ in range(4):
        engine.step()
    prompt = tuple(3 + k * k % 60 for k in range(100))
    long, taken, drafted = Run(engine, "long", prompt, max_tokens=14), [], []
    while engine.step():
        num_rows = len(drafter.rows.get("long", ()))
        taken.append(num_rows - sum(taken) if num_rows else 0)
        drafted.append(len(drafter.rows.get("short", ())))
    at = next(i for i, n in enumerate(taken) if n)
    assert taken[at] == 40 < taken[at + 1] <= 40 + MAX_BACKLOG_ROWS + 1
    assert drafted[at - 1] < drafted[at] < drafted[at + 1], "the other drafts meanwhile"
    assert short.tokens == greedy(num_tokens=40) and long.tokens == greedy(prompt, 14)
