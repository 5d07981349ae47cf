"""Figures of a load: only the steady window counts, tokens are those that the server names, acceptance is pooled."""

import pytest

from paceline.bench.serve.cell import Answer, CellRun, Load
from paceline.bench.serve.client import ServerFeatures, StreamRequest, StreamResult
from paceline.bench.serve.server_metrics import NOT_OFFERED
from paceline.bench.serve.stats import CHUNKS, NAMED, USAGE, acceptance, steady_window, summarize, token_arrivals

NONE = {"source": NOT_OFFERED}
FEATURES = {
    NAMED: ServerFeatures(model="m", has_token_ids=True, has_usage=True),
    USAGE: ServerFeatures(model="m", has_token_ids=False, has_usage=True),
    CHUNKS: ServerFeatures(model="m", has_token_ids=False, has_usage=False),
}


def _answer(sent, times, tokens=1, *, kind=NAMED, problem=None, stats=None, bucket="b", due=None):
    """Chunks at `times` with `tokens` tokens each."""
    result = StreamResult(
        request=StreamRequest(prompt="p", bucket=bucket, max_tokens=9, temperature=0.0, seed=0), began_s=sent, problem=problem,
        ttft_s=times[0] - sent if times else None, ended_s=times[-1] if times else sent,
        arrivals=[(t, tokens if kind == NAMED else 1) for t in times],
        token_ids=[1] * (tokens * len(times)) if kind == NAMED else [],
        usage_tokens=None if kind == CHUNKS else tokens * len(times), server_stats=stats,
    )  # fmt: skip
    return Answer(result=result, due_s=sent if due is None else due)


def _steady(tokens=1, kind=NAMED):
    """Two clients: a first pair that ramps up, a pair at full load with a chunk every 0.1 s, a drain."""
    first = [_answer(0.0, [1.0, 1.1], tokens, kind=kind), _answer(0.0, [2.0, 2.1], tokens, kind=kind)]
    full = [_answer(2.1, [2.2 + 0.1 * i for i in range(70)], tokens, kind=kind) for _ in range(2)]
    drain = [_answer(10.0, [30.0, 50.0], tokens, kind=kind)]
    return CellRun(began_s=0.0, answers=[*first, *full, *drain], supply_ended_s=10.0, max_in_flight=2)


def test_ramp_up_and_drain_are_left_out_and_told():
    out = summarize(_steady(), Load(concurrency=2), FEATURES[NAMED], NONE)
    assert out["window"] == {"seconds": 8.0, "excluded_ramp_up_s": 2.0, "excluded_drain_s": 40.0}
    assert out["num_tokens"] == 4 + 140 + 2
    # 142 tokens lie in the window of 8 s; over the whole run of 50 s it would be 2.9
    assert out["output_tokens_per_s"]["value"] == pytest.approx(142 / 8, abs=0.01)
    assert out["user_tokens_per_s"]["value"] == pytest.approx(10.0, abs=0.01)
    assert out["gap_ms"]["p50"] == pytest.approx(100) and out["gap_ms"]["max"] == pytest.approx(100)
    assert out["ttft_ms"]["num_values"] == 3  # the two of the full part, and the one sent at the window's very end
    assert out["ttft_ms"]["p50"] == pytest.approx(100)


@pytest.mark.parametrize("kind", [NAMED, USAGE])
def test_chunks_are_not_tokens_where_the_server_counts(kind):
    out = summarize(_steady(3, kind), Load(concurrency=2), FEATURES[kind], NONE)
    assert out["token_count"] == kind and out["num_tokens"] == 3 * 146
    assert out["output_tokens_per_s"]["value"] == pytest.approx(3 * 142 / 8, abs=0.01)
    assert out["user_tokens_per_s"]["value"] == pytest.approx(30.0, abs=0.02)


def test_without_any_count_the_figure_is_called_an_estimate():
    out = summarize(_steady(3, CHUNKS), Load(concurrency=2), FEATURES[CHUNKS], NONE)
    assert out["token_count"] == CHUNKS and out["num_tokens"] == 146 and out["token_count_means"].startswith("ESTIMATE")


def test_usage_is_spread_over_chunks_and_a_broken_answer_counts_its_chunks():
    assert token_arrivals(_answer(0, [1, 2], 5, kind=USAGE), USAGE) == [(1, 5.0), (2, 5.0)]
    broken = _answer(0, [1, 2], 5, kind=CHUNKS, problem="no_done: x")
    assert token_arrivals(broken, USAGE) == [(1, 1.0), (2, 1.0)]


def test_a_load_that_never_was_full_has_no_rates():
    run = CellRun(began_s=0.0, answers=[_answer(0, [1, 2]), _answer(0, [3, 4])], supply_ended_s=0.5)
    out = summarize(run, Load(concurrency=2), FEATURES[NAMED], NONE)
    assert out["window"] is None and out["output_tokens_per_s"] is None and out["ttft_ms"]["p50"] is None
    assert summarize(CellRun(began_s=0.0), Load(concurrency=2), FEATURES[NAMED], NONE)["num_requests"] == 0


def test_open_loop_leaves_out_its_first_tenth_and_counts_from_the_arrival():
    answers = [_answer(i + 0.5, [i + 1.0, i + 1.1], due=float(i)) for i in range(20)]
    run = CellRun(began_s=0.0, answers=answers, supply_ended_s=19.0)
    assert steady_window(run, Load(rate_per_s=1.0)) == (2.0, 19.0)
    out = summarize(run, Load(rate_per_s=1.0), FEATURES[NAMED], NONE)
    assert out["ttft_ms"]["p50"] == pytest.approx(1000)  # from the arrival, not from the late sending


def test_problems_are_counted_by_kind_and_refusals_are_no_errors():
    answers = [_answer(0, [1, 2]), _answer(0, [], problem="refused: full"), _answer(0, [1], problem="timeout: ReadTimeout"), _answer(0, [], problem="timeout: x")]  # fmt: skip
    answers[1].num_refused = 8
    out = summarize(CellRun(began_s=0.0, answers=answers, supply_ended_s=1.5), Load(concurrency=1), FEATURES[NAMED], NONE)  # fmt: skip
    assert out["problems"] == {"refused": 1, "timeout": 2} and out["num_errors"] == 2 and out["num_whole"] == 1
    assert out["num_refusals"] == 8 and out["examples"]["timeout"] == "timeout: ReadTimeout"


def test_acceptance_is_pooled_over_rounds_and_split_by_bucket():
    answers = [
        _answer(0, [1], stats={"num_rounds": 3, "num_draft_tokens": 12, "num_accepted_tokens": 9}, bucket="easy"),
        _answer(0, [1], stats={"num_rounds": 100, "num_draft_tokens": 0, "num_accepted_tokens": 0}, bucket="hard"),
    ]
    found = acceptance(answers, NONE)
    assert found["source"] == "answers" and found["acceptance_length"]["value"] == pytest.approx(112 / 103, abs=1e-4)
    assert found["acceptance_rate"] == 0.75
    assert found["by_bucket"]["easy"]["value"] == 4.0 and found["by_bucket"]["hard"]["value"] == 1.0


def test_without_the_answers_account_the_metrics_speak():
    assert acceptance([_answer(0, [1])], {"source": "vllm counters"}) == {"source": "vllm counters"}
