"""Training and held-out requests never mix, the newest come first, and unreadable data is counted, not fatal."""

import numpy as np
import pytest
import torch

from paceline.adapt.data.split import (
    HELD_OUT_SHARE,
    MAX_HELD_OUT,
    MIN_HELD_OUT,
    count_rows,
    load_train_data,
    split_hash,
    split_held_out,
)
from paceline.errors import TraceError
from paceline.serving.sampling.request import RequestTrace


def make_trace(request_id, num_outputs=10, bucket="b", target="t"):
    total = 2 + num_outputs
    return RequestTrace(
        request_id=request_id, bucket=bucket, temperature=0.0, prompt_len=2, token_ids=list(range(total)),
        features=torch.zeros(total - 1, 2), topk_ids=torch.zeros(num_outputs, 1, dtype=torch.int32),
        topk_logprobs=torch.zeros(num_outputs, 1), target_version=target,
    )  # fmt: skip


class Store(dict):
    def read_shard(self, shard_id):
        if shard_id not in self:
            raise TraceError(f"{shard_id} is gone")
        return self[shard_id]


def load(store, shards, rehearsal=(), num_rows=100, share=0.0, seed=0):
    return load_train_data(
        store, shards, rehearsal, "t", num_rows=num_rows, rehearsal_share=share, rng=np.random.default_rng(seed)
    )


def ids(traces):
    return [t.request_id for t in traces]


def test_split_is_a_partition_that_depends_on_the_request_id_only():
    traces = [make_trace(f"r{i}") for i in range(200)]
    train, held = split_held_out(traces)
    assert sorted(ids(train) + ids(held)) == sorted(ids(traces))
    assert all(split_hash(t.request_id) < HELD_OUT_SHARE for t in held) and 30 < len(held) < 70
    assert set(ids(split_held_out(traces[:150])[1])) <= set(ids(held))


@pytest.mark.parametrize("num", range(1, 12))
def test_few_requests_still_give_held_out_ones_up_to_half(num):
    train, held = split_held_out([make_trace(f"x{i}") for i in range(num)])
    by_hash = sum(split_hash(f"x{i}") < HELD_OUT_SHARE for i in range(num))
    assert len(held) == max(by_hash, min(MIN_HELD_OUT, num // 2)) and len(train) + len(held) == num


def test_requests_without_a_round_are_never_held_out():
    assert split_held_out([make_trace(f"r{i}", num_outputs=1) for i in range(50)])[1] == []


def test_the_newest_requests_train_and_order_is_kept():
    store = Store({f"s{k}": [make_trace(f"s{k}r{i}") for i in range(40)] for k in range(3)})
    data = load(store, ["s0", "s1", "s2"], num_rows=100)
    assert count_rows(data.fresh) == 100
    assert all(i.startswith("s2") for i in ids(data.fresh)) and ids(data.fresh) == sorted(
        ids(data.fresh), key=lambda i: int(i[3:])
    )
    assert not set(ids(data.fresh)) & set(ids(data.held_out)) and len(data.held_out) <= MAX_HELD_OUT


def test_rehearsal_has_its_share_and_no_held_out_request():
    store = Store({"s": [make_trace(f"r{i}") for i in range(80)]})
    store.update({f"o{k}": [make_trace(f"o{k}r{i}", bucket="other") for i in range(40)] for k in range(4)})
    data = load(store, ["s"], [f"o{k}" for k in range(4)], num_rows=200, share=1 / 3)
    assert abs(count_rows(data.rehearsal) / data.num_rows - 1 / 3) < 0.03
    assert all(split_hash(i) >= HELD_OUT_SHARE and i.startswith("o") for i in ids(data.rehearsal))


def test_rehearsal_draw_depends_on_the_seed_only():
    store = Store({"s": [make_trace(f"r{i}") for i in range(80)], "o": [make_trace(f"o{i}") for i in range(80)]})
    a, b, c = (ids(load(store, ["s"], ["o"], share=0.2, seed=s).rehearsal) for s in (1, 1, 2))
    assert a == b != c


def test_missing_shards_and_unusable_traces_are_counted_and_left_out():
    poisoned = make_trace("poisoned")
    poisoned.features[3, 1] = float("nan")
    store = Store({"s": [make_trace(f"r{i}") for i in range(30)] + [poisoned, make_trace("foreign", target="u")]})
    data = load(store, ["gone", "s"], num_rows=1000)
    assert data.num_unreadable == 3
    assert not {"poisoned", "foreign"} & set(ids(data.fresh) + ids(data.held_out))


def test_a_request_seen_twice_counts_once():
    store = Store({"a": [make_trace("r")] * 2, "b": [make_trace("r"), make_trace("q")]})
    data = load(store, ["a", "b"], num_rows=1000)
    assert sorted(ids(data.fresh) + ids(data.held_out)) == ["q", "r"]


def test_nothing_to_read_gives_nothing():
    data = load(Store(), [], [])
    assert data.num_rows == 0 and data.held_out == []
