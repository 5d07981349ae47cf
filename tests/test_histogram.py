"""Claims of Histogram and HttpMeters of paceline/contracts.py."""

import numpy as np
import pytest

from paceline.contracts import TIME_BOUNDS_S, Histogram, HttpMeters, combine_meters, decode, encode


def test_bounds_grow_by_at_most_two_and_cover_what_is_served():
    ratios = np.array(TIME_BOUNDS_S[1:]) / np.array(TIME_BOUNDS_S[:-1])
    assert (ratios > 1).all() and (ratios <= 2.0 + 1e-9).all()
    assert TIME_BOUNDS_S[0] == 1e-4 and TIME_BOUNDS_S[-1] == 1000.0


def test_a_time_on_a_bound_belongs_to_the_cell_below_it_as_prometheus_has_it():
    h = Histogram()
    h.observe(0.1)
    h.observe(np.nextafter(0.1, 1.0))
    assert h.counts[TIME_BOUNDS_S.index(0.1)] == 1 and h.counts[TIME_BOUNDS_S.index(0.1) + 1] == 1


def test_weights_count_and_negative_times_are_none():
    h = Histogram()
    h.observe(0.5, 3)
    h.observe(-4.0)
    h.observe(10_000.0)
    assert sum(h.counts) == 5 and h.sum_s == pytest.approx(10_001.5)
    assert h.counts[0] == 1 and h.counts[-1] == 1


def test_quantiles_are_right_within_a_cell():
    rng = np.random.default_rng(0)
    times = rng.lognormal(-3.0, 1.0, 5000)
    h = Histogram()
    for t in times:
        h.observe(float(t))
    for q in (0.01, 0.5, 0.9, 0.99):
        exact, found = float(np.quantile(times, q)), h.quantile(q)
        cell = next(i for i, bound in enumerate(TIME_BOUNDS_S) if bound >= exact)
        assert found is not None and TIME_BOUNDS_S[cell - 1] <= found <= TIME_BOUNDS_S[cell]
        assert found == pytest.approx(exact, rel=0.1)
    assert Histogram().quantile(0.5) is None
    beyond = Histogram()
    beyond.observe(5000.0)
    assert beyond.quantile(0.5) == TIME_BOUNDS_S[-1]


def test_meters_are_summed_over_processes_and_differ_over_time():
    a, b = HttpMeters(), HttpMeters()
    a.times(True).first_token.observe(0.2)
    a.count("/v1/completions", 200, False)
    before = decode(encode(a), HttpMeters)
    a.count("/v1/completions", 503, False)
    a.count("/v1/completions", 200, True)
    b.times(False).first_token.observe(0.4)
    b.count("/tokenize", 200, False)
    both = combine_meters([a, b])
    assert both.responses == {"/v1/completions": {200: 2, 503: 1}, "/tokenize": {200: 1}}
    assert sum(both.streamed.first_token.counts) == sum(both.at_once.first_token.counts) == 1
    assert both.broken == {"/v1/completions": 1}
    since = combine_meters([a], before)
    assert since.responses["/v1/completions"] == {200: 1, 503: 1} and sum(since.streamed.first_token.counts) == 0
    assert a.responses == {"/v1/completions": {200: 2, 503: 1}}, "summing changes nothing"
