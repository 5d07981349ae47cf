"""Acceptance from a server's Prometheus page: differences of counters, summed over engines; otherwise 'not offered'."""

import pytest

from paceline.bench.serve.server_metrics import NOT_OFFERED, acceptance_between, parse_page


def _vllm(engines):
    lines = []
    for name, at in (("drafts", 0), ("draft_tokens", 1), ("accepted_tokens", 2)):
        lines.append(f"# TYPE vllm:spec_decode_num_{name} counter")
        lines += [
            f'vllm:spec_decode_num_{name}_total{{engine="{e}",model_name="m"}} {float(v[at])}'
            for e, v in enumerate(engines)
        ]
    lines.append("# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter")
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{e}",model_name="m",position="{p}"}} {float(n)}'
        for e, v in enumerate(engines)
        for p, n in enumerate(v[3])
    ]
    return parse_page("\n".join(lines) + "\n")


def test_vllm_counters_give_the_acceptance_of_the_load_alone():
    before = _vllm([(100, 300, 90, (50, 30, 10)), (10, 30, 3, (2, 1, 0))])
    after = _vllm([(140, 420, 150, (80, 50, 20)), (20, 60, 13, (10, 3, 0))])
    found = acceptance_between(before, after)
    assert found["num_rounds"] == 50 and found["num_draft_tokens"] == 150 and found["num_accepted_tokens"] == 70
    assert found["acceptance_length"]["value"] == pytest.approx(1 + 70 / 50)
    assert found["acceptance_rate"] == pytest.approx(70 / 150, abs=1e-4)
    assert found["accepted_share_per_depth"] == [pytest.approx(38 / 50), pytest.approx(22 / 50), pytest.approx(10 / 50)]


def test_a_restart_between_the_readings_begins_at_zero():
    found = acceptance_between(_vllm([(1000, 3000, 900, ())]), _vllm([(10, 30, 5, ())]))
    assert found["num_rounds"] == 10 and found["acceptance_length"]["value"] == 1.5


def test_sglang_gauge_is_marked_as_the_servers_own_mean():
    page = parse_page(
        "# TYPE sglang:spec_accept_length gauge\n"
        'sglang:spec_accept_length{tp_rank="0",dp_rank="0"} 2.5\nsglang:spec_accept_length{tp_rank="0",dp_rank="1"} 3.5\n'
    )
    found = acceptance_between(page, page)
    assert found["acceptance_length"] == {"value": 3.0, "interval": None} and "not this load's" in found["source"]


def test_paceline_counters_give_tokens_per_engine_round():
    text = "# TYPE paceline_rounds counter\npaceline_rounds_total {}\n# TYPE paceline_emitted_tokens counter\npaceline_emitted_tokens_total {}\n"
    found = acceptance_between(parse_page(text.format(10, 20)), parse_page(text.format(30, 90)))
    assert found["tokens_per_engine_round"] == 3.5 and found["acceptance_length"] is None


@pytest.mark.parametrize("text", ["", "<html>404</html>", "up 1\n", "broken{a= 3\n"])
def test_a_page_that_says_nothing_is_not_offered(text):
    assert acceptance_between(parse_page(text), parse_page(text)) == {"source": NOT_OFFERED}
    assert acceptance_between(None, parse_page(text)) == {"source": NOT_OFFERED}


def test_idle_vllm_without_rounds_is_not_offered():
    page = _vllm([(7, 21, 3, (3,))])
    assert acceptance_between(page, page) == {"source": NOT_OFFERED}
