"""A batch holds what its requests teach, however long their prompts are."""

import pytest
import torch

from paceline.adapt.families.row_batch import collate
from tests.helpers.training import learnable_trace


def long_trace(prompt_len, num_outputs):
    trace = learnable_trace("long", num_outputs=prompt_len + num_outputs - 4)
    ids = torch.tensor(trace.token_ids[prompt_len:], dtype=torch.int32)[:, None]
    trace.prompt_len, trace.topk_ids, trace.topk_logprobs = prompt_len, ids, torch.arange(float(num_outputs))[:, None]
    return trace


@pytest.mark.parametrize(
    ("prompt_len", "num_outputs", "first", "count"),
    [
        (10, 22, 0, 22),  # 31 rows: whole
        (10, 60, 0, 23),  # a short prompt stays whole
        (17, 60, 0, 16),
        (40, 12, 19, 12),  # all of the output
        (500, 12, 479, 12),
        (500, 60, 483, 16),  # half of the rows each
    ],
)
def test_what_is_too_long_loses_the_beginning_of_its_prompt_and_then_its_end(prompt_len, num_outputs, first, count):
    trace = long_trace(prompt_len, num_outputs)
    batch = collate([trace, learnable_trace("short", num_outputs=5)], max_rows=32)
    kept = slice(first, prompt_len + count)
    length = kept.stop - kept.start
    assert length <= 33 and batch.token_ids[0, :length].tolist() == trace.token_ids[kept]
    assert torch.equal(batch.features[0, : length - 1], trace.features[kept.start : kept.stop - 1])
    where = batch.is_output[0].nonzero()[:, 0]
    assert where.tolist() == list(range(prompt_len - first, length))
    assert torch.equal(batch.topk_ids[0, where], trace.topk_ids[:count].long())
    assert torch.equal(batch.topk_logprobs[0, where], trace.topk_logprobs[:count])
    assert int(batch.is_output[1].sum()) == 5
