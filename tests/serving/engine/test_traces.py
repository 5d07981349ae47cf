"""Traces: rows of many requests are ranked together without a host read; each request gets its own, in order."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.serving.drafters.forward import choose_ranking
from paceline.serving.engine import traces as module
from paceline.serving.engine.running import TraceRows
from paceline.serving.engine.traces import TraceCollector
from tests.helpers.engines import FeatureDrafter, Run, Sinks, finish, make_engine
from tests.helpers.static_kernels import STATIC_KERNELS, NoHostReads


def collector(ranking=None, topk=4):
    errors = []
    made = TraceCollector(
        None, torch.zeros(2, 2), ranking or choose_ranking(STATIC_KERNELS), topk=topk, target_version="v",
        tap_layers=(0,), note_error=errors.append,
    )  # fmt: skip
    return made, errors


def request(is_traced=True):
    return SimpleNamespace(trace=TraceRows() if is_traced else None)


@pytest.mark.parametrize(("vocab", "max_parts"), [(50, 256), (50, 2), (40_000, 256)])
def test_each_request_gets_the_best_tokens_of_its_own_rows_in_order(vocab, max_parts, monkeypatch):
    monkeypatch.setattr(module, "_MAX_PARTS", max_parts)
    rng, (made, errors) = np.random.default_rng(0), collector()
    requests = [request(i % 3 != 1) for i in range(5)]
    expected = [[] for _ in requests]
    for _ in range(9):
        logits = torch.randn(12, vocab, generator=torch.Generator().manual_seed(int(rng.integers(1 << 30))))
        rows = [sorted(rng.choice(12, rng.integers(1, 4), replace=False).tolist()) for _ in requests]
        for own, kept in zip(rows, expected, strict=True):
            kept += [logits[row].log_softmax(-1).topk(4) for row in own]
        made.add(requests, rows, logits)
        logits.fill_(float("nan"))  # as the next round would: what is kept is a copy
    made._rank()
    assert not errors
    for r, kept in zip(requests, expected, strict=True):
        if r.trace is None:
            continue
        joined = r.trace.joined()
        assert joined[:, 0].tolist() == [top.indices.tolist() for top in kept]
        got = torch.from_numpy(joined[:, 1].copy().view(np.float32))
        torch.testing.assert_close(got, torch.stack([top.values for top in kept]))


def test_parts_are_joined_when_they_have_arrived(monkeypatch):
    """As on a device: what is ranked in a round, of several rounds together, is on the host by the next one."""
    made, errors = collector()
    (one,), expected, late, rank = [request(True)], [], [], module.best_tokens

    def queued(*args):
        best = rank(*args)
        late.append((best, best.clone()))
        return best.zero_()

    def arrive():
        for best, values in late:
            best.copy_(values)
        late.clear()

    for name, value in (("best_tokens", queued), ("_MAX_PARTS", 4), ("_MIN_ELEMENTS", 150)):
        monkeypatch.setattr(module, name, value)
    for seed in range(20):
        arrive()
        logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed))
        expected.append(logits[0].topk(4).indices.tolist())
        made.add([one], [[0]], logits)
    made._rank()
    arrive()
    assert not errors and one.trace.joined()[:, 0].tolist() == expected
    assert len(one.trace.parts) < 20


def test_a_round_of_many_traced_requests_is_ranked_at_once_and_waits_for_nothing():
    calls = []

    def ranking(logits, factors, count):
        calls.append(logits.shape)
        return choose_ranking(STATIC_KERNELS)(logits, factors, count)

    made, errors = collector(ranking)
    requests, logits = [request() for _ in range(64)], torch.randn(64, 4096)
    for _ in range(3):
        with NoHostReads(("tolist", "item", "cpu", "__int__", "__float__", "__bool__", "__index__", "nonzero")):
            made.add(requests, [[i] for i in range(64)], logits)
    assert calls == [(64, 4096)] * 3 and not errors
    assert all(len(r.trace.joined()) == 3 for r in requests)


@pytest.mark.parametrize("max_rows", [10, 20, 1000])
def test_a_request_that_is_too_long_to_learn_from_leaves_no_trace(max_rows, caplog):
    sinks = Sinks()
    probe = make_engine(FeatureDrafter(), sinks=sinks)
    row_bytes = probe.kv.features.shape[1] * probe.kv.features.element_size()
    engine = make_engine(FeatureDrafter(), sinks=sinks, trace_max_bytes=max_rows * row_bytes)
    runs = {n: Run(engine, f"r{n}", range(1, n + 1), max_tokens=6) for n in (4, 12, 30)}
    finish(engine)
    kept = {n for n, run in runs.items() if n + 6 - 1 <= max_rows}
    assert {t.request_id for t in sinks.traces} == {f"r{n}" for n in kept}
    assert all(len(run.tokens) == 6 for run in runs.values()), "its answer is whole"
    assert ("trace.max_bytes" in caplog.text) == (len(kept) < 3)
