"""Claims of a peer report: what is counted, compared and set in relation are the answers of the same requests."""

import json

import pytest

from paceline.bench.peers.arms import PeerArm, TokenCounter, Turn
from paceline.bench.peers.catalog import Peer
from paceline.bench.peers.process import PeerProcess
from paceline.bench.peers.report import cell_row, has_failed, mean_ratios
from paceline.bench.serve.cell import Answer
from paceline.bench.serve.client import StreamRequest, StreamResult
from tests.helpers.fakes import EOS_ID, tiny_tokenizer

TOKENIZER = tiny_tokenizer(300)
COUNTER = TokenCounter(TOKENIZER)
CELL = {"workload": "code", "temperature": 0.0, "concurrency": 1}


def answer(text, *, usage=None, seconds=1.0, problem=None, ids=(), prompt="ab", prompt_tokens=2) -> Answer:
    request = StreamRequest(prompt=prompt, bucket="code", max_tokens=8, temperature=0.0, seed=0)
    result = StreamResult(
        request=request, began_s=10.0, ended_s=10.0 + seconds, ttft_s=seconds / 2, text=text, usage_tokens=usage,
        usage_prompt_tokens=prompt_tokens, problem=problem, token_ids=list(ids), finish_reason="stop",
    )  # fmt: skip
    return Answer(result=result, due_s=10.0)


def arm(name, tmp_path, *turns: Turn) -> PeerArm:
    server = PeerProcess(Peer(name=name, command=("none",)), {"threads": "1"}, tmp_path)
    return PeerArm(server=server, timeout_s=1.0, turns={(0, g): turn for g, turn in enumerate(turns)})


def row(tmp_path, **turns):
    arms = [arm(name, tmp_path, *found) for name, found in turns.items()]
    return cell_row(CELL, 0, 9, arms, next(iter(turns)), COUNTER)


def test_tokens_are_those_of_the_usage_and_without_one_those_of_the_text(tmp_path):
    turns = [Turn(answers=(answer("abc", usage=4), answer("ab", usage=2)), seconds=2.0), Turn(answers=(answer("abcd"),), seconds=1.0)]  # fmt: skip
    found = row(tmp_path, own=turns)["arms"]["own"]
    assert found["group_tokens"] == [6, 4] and found["token_count"] == "tokenizer"
    assert found["tokens_per_s"]["value"] == pytest.approx(10 / 3, abs=0.01)
    assert found["usage_confirmed"] == 1 and found["prompts_confirmed"] == 1  # "abc" and the end token make 4
    wrong = row(tmp_path, own=[Turn(answers=(answer("abc", usage=7, prompt_tokens=3),), seconds=1.0)])["arms"]["own"]
    assert (wrong["usage_confirmed"], wrong["prompts_confirmed"], wrong["token_count"]) == (0, 0, "usage")


def test_what_a_refused_client_waited_is_in_its_times(tmp_path):
    late = answer("abcd", usage=4)
    late.due_s, late.num_refused = 8.0, 3
    found = row(tmp_path, own=[Turn(answers=(late,), seconds=3.0)])["arms"]["own"]
    assert found["ttft_ms"]["p50"] == 2500.0 and found["num_refusals"] == 3
    assert found["request_tokens_per_s"]["value"] == pytest.approx(4 / 3, abs=0.01)


def test_lost_answers_count_time_but_no_tokens_and_have_an_example(tmp_path):
    turn = Turn(answers=(answer("abcd", usage=4), answer("ab", usage=2, problem="http_500: oops")), seconds=4.0)
    found = row(tmp_path, own=[turn])["arms"]["own"]
    assert (found["num_whole"], found["num_requests"], found["num_tokens"]) == (1, 2, 4)
    assert found["problems"] == {"http_500": 1} and found["examples"] == {"http_500": "http_500: oops"}
    assert found["tokens_per_s"]["value"] == 1.0 and found["request_tokens_per_s"]["value"] == 4.0


def test_equal_tokens_are_those_before_the_first_difference(tmp_path):
    ids = TOKENIZER("abcd", add_special_tokens=False)["input_ids"]
    base = [Turn(answers=(answer("abcd", usage=5, ids=[*ids, EOS_ID]), answer("abcd", usage=4)), seconds=1.0)]
    other = [Turn(answers=(answer("abcd", usage=4, ids=ids), answer("abxd", usage=4)), seconds=0.5)]
    found = row(tmp_path, base=base, other=other)
    assert found["equal"] == {"other": {"num_compared": 2, "num_equal": 1, "token_share": 0.75}}  # 4 of 4, 2 of 4
    assert found["ratios"]["other"]["value"] == pytest.approx((8 / 0.5) / (9 / 1), rel=1e-3)
    warm = cell_row({**CELL, "temperature": 0.8}, 0, 9, [arm("base", tmp_path, *base)], "base", COUNTER)
    assert "equal" not in warm and warm["ratios"] == {}


def test_ratios_are_over_groups_in_which_both_answered(tmp_path):
    base = [Turn(answers=(answer("abcd", usage=4),), seconds=1.0), Turn(answers=(answer("ab", usage=2),), seconds=100.0)]  # fmt: skip
    other = [Turn(answers=(answer("abcd", usage=4),), seconds=2.0), Turn(answers=(), seconds=0.0)]
    found = row(tmp_path, base=base, other=other)
    assert found["ratios"]["other"] == {"value": 0.5, "interval": None}
    assert row(tmp_path, base=base, other=[Turn(answers=(), seconds=0.0)])["ratios"]["other"] is None


def test_answers_without_a_token_have_no_ratio_over_them_and_can_be_written(tmp_path):
    silent, spoken = (Turn(answers=(answer(text, usage=len(text)),), seconds=1.0) for text in ("", "ab"))
    found = row(tmp_path, base=[silent, silent], quiet=[silent, silent], other=[spoken, spoken])
    assert found["ratios"] == {"quiet": None, "other": None}
    json.dumps(found, allow_nan=False)
    assert row(tmp_path, base=[spoken, spoken], quiet=[silent, silent])["ratios"]["quiet"]["value"] == 0
    assert mean_ratios([found], "base") == []


def test_rounds_of_all_turns_make_one_acceptance_length(tmp_path):
    turns = [Turn(answers=(answer("ab", usage=2),), seconds=1.0, num_rounds=2, num_accepted_tokens=4), Turn(answers=(answer("ab", usage=2),), seconds=1.0)]  # fmt: skip
    assert row(tmp_path, own=turns)["arms"]["own"]["acceptance_length"]["value"] == 3.0


def test_only_what_concerns_paceline_fails_the_command(tmp_path):
    servers = [{"name": "paceline", "is_own": True, "problem": None}, {"name": "vllm", "is_own": False, "problem": "gone"}]  # fmt: skip
    lost = Turn(answers=(answer("a", problem="timeout: x"),), seconds=1.0)
    whole = Turn(answers=(answer("a", usage=1),), seconds=1.0)
    good = {"servers": servers, "cells": [row(tmp_path, paceline=[whole], vllm=[lost])]}
    assert not has_failed(good)
    assert has_failed({**good, "cells": []})
    assert has_failed({**good, "cells": [row(tmp_path, vllm=[whole], paceline=[lost])]})
    assert has_failed({**good, "servers": [{**servers[0], "problem": "gone"}]})


def test_means_over_workloads_are_geometric_and_leave_out_lost_groups(tmp_path):
    def turns(seconds):
        return [Turn(answers=(answer("abcd", usage=4),), seconds=s) for s in seconds]

    code = row(tmp_path, base=turns([1.0, 1.0]), other=turns([2.0, 2.0]))
    chat = {**row(tmp_path, base=turns([4.0, 4.0]), other=turns([0.5, 0.5])), "workload": "chat"}
    lost = {**row(tmp_path, base=turns([1.0, 1.0]), other=turns([1.0])), "workload": "tools"}
    (found,) = mean_ratios([code, chat, lost], "base")
    assert found == {
        "temperature": 0.0, "concurrency": 1, "arm": "other", "num_workloads": 2, "value": 2.0, "interval": [2.0, 2.0],
    }  # fmt: skip
    assert mean_ratios([lost], "base") == []
