"""Catching up: a drafter gets every backlog row once, in order, and no request that has none in the call."""

from types import SimpleNamespace

import pytest
import torch

from paceline.serving.engine.decode import MAX_BACKLOG_ROWS, catch_up


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
@pytest.mark.parametrize("seed", range(4))
def test_every_backlog_row_is_ingested_once_and_in_order_by_calls_without_bystanders(chunk_rows, seed):
    g = torch.Generator().manual_seed(seed)
    contexts = torch.randint(1, 90, (6,), generator=g).tolist()
    requests = [request(i, n, int(torch.randint(0, n, (), generator=g))) for i, n in enumerate(contexts)]
    requests.append(request(6, 80, 80 - MAX_BACKLOG_ROWS - 1))
    begun = [r.drafted_len for r in requests]
    table = torch.arange(7 * 100).view(7, 100)
    drafter, temperatures = RecordingDrafter(), torch.arange(7.0)
    num_rows = catch_up(drafter, requests, table, temperatures, None, chunk_rows)
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
        assert taken[r.request_id] == list(range(start, r.context_len - 1))
        assert r.drafted_len == max(start, r.context_len - 1)
    assert num_rows == sum(map(len, taken.values()))


def test_short_backlogs_are_left_to_the_drafting_pass():
    drafter, own = RecordingDrafter(), [request(0, 60, 60 - MAX_BACKLOG_ROWS)]
    assert catch_up(drafter, own, torch.arange(100)[None], torch.zeros(1), None, 256) == 0
    assert drafter.calls == [] and own[0].drafted_len == 60 - MAX_BACKLOG_ROWS
