"""Requests are padded apart where that saves arithmetic, and attention does not notice."""

import numpy as np
import pytest
import torch

from paceline.kernels.reference import tree_attention as tree_attention_ref
from paceline.kernels.reference.tree_attention import MAX_GROUPS, group_requests, plan_attention, tree_attention


def padded_pairs(groups, rows, keys):
    return sum(len(g) * max(rows[i] for i in g) * max(keys[i] for i in g) for g in groups)


@pytest.mark.parametrize("seed", range(8))
def test_every_request_is_in_one_group_and_no_split_costs_more_than_it_saves(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 65))
    rows, keys = rng.integers(1, 18, count).tolist(), rng.integers(1, 600, count).tolist()
    groups = group_requests(rows, keys, 2000)
    assert sorted(i for g in groups for i in g) == list(range(count)) and 1 <= len(groups) <= MAX_GROUPS
    saved = count * max(rows) * max(keys) - padded_pairs(groups, rows, keys)
    assert saved >= 2000 * (len(groups) - 1)


def test_one_wide_tree_and_one_long_context_are_padded_apart():
    rows, keys = [2] * 63 + [17], [120] * 63 + [137]
    assert sorted(group_requests(rows, keys)) == [list(range(63)), [63]]
    rows, keys = [1] * 40, [2000] + [100] * 39
    assert sorted(group_requests(rows, keys)) == [[0], list(range(1, 40))]
    assert group_requests([4] * 30, [200] * 30) == [list(range(30))]


@pytest.mark.parametrize("has_ancestors", [True, False])
def test_groups_change_no_output(monkeypatch, has_ancestors):
    torch.manual_seed(0)
    counts, contexts = [2, 9, 1, 2, 16, 3], [30, 5, 0, 41, 12, 33]
    cu_rows = torch.tensor([0, *np.cumsum(counts).tolist()])
    num_rows, width = int(cu_rows[-1]), max(counts)
    pool = torch.full((400, 2, 2, 8), torch.nan)
    rows = torch.randperm(400)
    out_rows, table = rows[:num_rows], torch.full((len(counts), 41), 2**40)
    at = num_rows
    for i, n in enumerate(contexts):
        table[i, :n] = rows[at : at + n]
        at += n
    pool[rows[:at]] = torch.randn(at, 2, 2, 8)
    local = torch.cat([torch.arange(n) for n in counts])
    ancestors = (torch.rand(num_rows, width) < 0.5) | (local[:, None] == torch.arange(width))
    layout = {
        "cu_rows": cu_rows, "context_lens": torch.tensor(contexts), "slot_table": table, "out_rows": out_rows,
        "ancestors": ancestors if has_ancestors else None, "num_groups": 2, "dtype": torch.float32,
    }  # fmt: skip
    query = torch.randn(num_rows, 4, 8)
    whole = plan_attention(**layout)
    monkeypatch.setattr(tree_attention_ref, "group_requests", lambda rows, keys: group_requests(rows, keys, 50))
    parted = plan_attention(**layout)
    assert whole.parts is None and parted.parts is not None and len(parted.parts) > 2
    torch.testing.assert_close(tree_attention(query, pool, parted, 0.3), tree_attention(query, pool, whole, 0.3))
