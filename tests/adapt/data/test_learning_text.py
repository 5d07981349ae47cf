"""No request is read twice, the newest come first, and unreadable data is counted, not fatal."""

import numpy as np
import torch

from paceline.adapt.data.learning_text import Features, load_learning_text, request_digest
from paceline.adapt.data.trace_store import count_rows
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


def load(store, shards, rehearsal=(), num_rows=100, share=0.0, seed=0, seen=(), **options):
    return load_learning_text(
        store,
        shards,
        rehearsal,
        "t",
        num_rows=num_rows,
        rehearsal_share=share,
        rng=np.random.default_rng(seed),
        seen=seen,
        **options,
    )


def ids(traces):
    return [t.request_id for t in traces]


def test_what_was_read_before_is_not_read_again_and_older_text_takes_its_place():
    store = Store({f"s{k}": [make_trace(f"s{k}r{i}") for i in range(10)] for k in range(3)})
    first = load(store, list(store), num_rows=100).fresh
    seen = {request_digest(t.request_id) for t in first}
    second = load(store, list(store), num_rows=150, seen=seen).fresh
    assert ids(first) == [f"s2r{i}" for i in range(10)]
    assert ids(second) == [f"s0r{i}" for i in range(5, 10)] + [f"s1r{i}" for i in range(10)]
    seen |= {request_digest(t.request_id) for t in second}
    assert ids(load(store, list(store), num_rows=1000, seen=seen).fresh) == [f"s0r{i}" for i in range(5)]


def test_features_of_other_layers_are_of_no_use_whatever_their_width():
    store = Store({name: [make_trace(name)] for name in ("own", "untold", "other", "wide")})
    for name, taps in (("own", (1, 2)), ("other", (0, 2)), ("wide", (1, 2, 3))):
        store[name][0].tap_layers = taps
    store["wide"][0].features = torch.zeros(11, 3)
    found = load(store, list(store), list(store), share=0.5, features=Features(2, (1, 2)))
    assert ids(found.fresh) == ["own", "untold"] and sorted(ids(found.rehearsal)) == ["own", "untold"]
    assert ids(load(store, list(store), features=Features(3)).fresh) == ["wide"]
    assert len(load(store, list(store)).fresh) == 4


def test_requests_without_a_round_are_left_out():
    store = Store({"s": [make_trace(f"r{i}", num_outputs=1 + i % 2) for i in range(10)]})
    assert ids(load(store, ["s"]).fresh) == [f"r{i}" for i in range(1, 10, 2)]


def test_digests_tell_requests_apart_and_fit_a_signed_integer():
    digests = {request_digest(f"r{i}") for i in range(10_000)}
    assert len(digests) == 10_000 and min(digests) >= 0 and max(digests) < 2**63


def test_the_newest_requests_train_and_order_is_kept():
    store = Store({f"s{k}": [make_trace(f"s{k}r{i}") for i in range(40)] for k in range(3)})
    data = load(store, ["s0", "s1", "s2"], num_rows=100)
    assert count_rows(data.fresh) == 100
    assert all(i.startswith("s2") for i in ids(data.fresh)) and ids(data.fresh) == sorted(
        ids(data.fresh), key=lambda i: int(i[3:])
    )


def test_rehearsal_is_enough_for_its_share_and_of_other_classes():
    store = Store({"s": [make_trace(f"r{i}") for i in range(80)]})
    store.update({f"o{k}": [make_trace(f"o{k}r{i}", bucket="other") for i in range(40)] for k in range(4)})
    data = load(store, ["s"], [f"o{k}" for k in range(4)], num_rows=200, share=1 / 3)
    assert count_rows(data.rehearsal) >= 100 and all(i.startswith("o") for i in ids(data.rehearsal))
    assert load(store, ["s"], ["o0"], num_rows=200, share=0.0).rehearsal == []


def test_rehearsal_draw_depends_on_the_seed_only():
    store = Store({"s": [make_trace(f"r{i}") for i in range(80)], "o": [make_trace(f"o{i}") for i in range(80)]})
    a, b, c = (ids(load(store, ["s"], ["o"], share=0.2, seed=s).rehearsal) for s in (1, 1, 2))
    assert a == b != c


def test_missing_shards_and_unusable_traces_are_counted_and_left_out():
    poisoned = make_trace("poisoned")
    poisoned.features[3, 1] = float("nan")
    overflown, masked = make_trace("overflown"), make_trace("masked")
    overflown.topk_logprobs[4, 0], masked.topk_logprobs[4, 0] = float("nan"), float("-inf")
    bad = [poisoned, overflown, make_trace("foreign", target="u")]
    store = Store({"s": [make_trace(f"r{i}") for i in range(30)] + [masked, *bad]})
    data = load(store, ["gone", "s"], num_rows=1000)
    assert data.num_unreadable == 4
    assert set(ids(data.fresh)) == {"masked", *(f"r{i}" for i in range(30))}


def test_a_request_seen_twice_counts_once():
    store = Store({"a": [make_trace("r")] * 2, "b": [make_trace("r"), make_trace("q")]})
    data = load(store, ["a", "b"], num_rows=1000)
    assert sorted(ids(data.fresh)) == ["q", "r"]


def test_nothing_to_read_gives_nothing():
    data = load(Store(), [], [])
    assert data.num_rows == 0 and data.fresh == []
