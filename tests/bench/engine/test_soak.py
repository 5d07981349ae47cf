"""`paceline bench soak`: the traffic is as mixed as it says, what does not balance is found, the verdict follows."""

import json

import pytest
from typer.testing import CliRunner

from paceline.bench.engine.arms import new_engine
from paceline.bench.engine.soak import MIN_JUDGED_S, SoakDriver, SoakTraffic, memory_trend, soak_verdict
from paceline.cli.main import app
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.errors import PacelineError
from tests.helpers.fakes import tiny_target
from tests.helpers.scripted_drafters import RandomDrafter

RUN = CliRunner()
TEXTS = {"a": [tuple(range(3, 3 + n)) for n in range(4, 12)], "b": [(7, 8, 9)]}


def _traffic(seed=0, max_tokens=16):
    return SoakTraffic(TEXTS, context_tokens=96, max_tokens=max_tokens, seed=seed)


def _driver(num_tokens=112):
    target = tiny_target(vocab=64, layers=2, width=16, context=96)
    config = EngineConfig(max_running=4, max_waiting=8, page_tokens=4, prefill_chunk_tokens=32, tree=TreeConfig(max_draft_tokens=4))  # fmt: skip
    engine = new_engine(target, RandomDrafter(64), version="r", num_tokens=num_tokens, config=config)
    return engine, SoakDriver(engine, _traffic(max_tokens=60), 8)


def test_traffic_is_a_function_of_its_seed():
    first = [_traffic().next() for _ in range(1)] + [t.next() for t in [_traffic()] for _ in range(20)]
    again = [_traffic().next() for _ in range(1)] + [t.next() for t in [_traffic()] for _ in range(20)]
    assert first == again


def test_traffic_mixes_lengths_temperatures_groups_prefixes_and_aborts():
    traffic = _traffic()
    items = [traffic.next() for _ in range(400)]
    prompts = [i.request.prompt_token_ids for i in items]
    assert min(map(len, prompts)) <= 4 and max(map(len, prompts)) > 60 and all(len(p) + 16 < 96 for p in prompts)
    heads = [p[:24] for p in prompts if len(p) >= 24]
    assert len(heads) - len(set(heads)) > 100, "many prompts begin alike"
    assert {i.request.params.temperature for i in items} == {0.0, 0.5, 1.0}
    assert {i.request.group for i in items} == {Group.ADAPTIVE, Group.PLAIN}
    assert 20 <= sum(i.abort_after_rounds is not None for i in items) <= 60
    assert {traffic.wanted(8) for _ in range(200)} == set(range(9))


def test_a_real_engine_ends_every_request_and_gives_every_page_back():
    engine, driver = _driver()
    for _ in range(700):
        driver.round()
    assert driver.drain() == []
    assert set(driver.ends) == {"abort", "length", "stop"} and driver.num_ended > 60 and driver.num_in_flight == 0
    assert engine.stats()["num_preemptions"] > 0


def test_a_lost_page_is_found():
    engine, driver = _driver()
    for _ in range(30):
        driver.round()
    while not engine.allocator.ensure("thief", 1):  # requests may hold every page just now
        driver.round()
    assert any("check_integrity" in p or "not free" in p for p in driver.drain())


def test_memory_is_judged_by_its_slope_over_the_second_half():
    rising = [{"at_s": float(i), "rss_bytes": 2**30 + i * 2**20} for i in range(400)]
    settled = [{"at_s": float(i), "rss_bytes": 2**30 + min(i, 150) * 2**20} for i in range(400)]
    assert memory_trend(rising)["slope_mib_per_h"] == pytest.approx(3600, rel=1e-3)
    assert memory_trend(settled)["slope_mib_per_h"] == 0 and memory_trend(settled)["interval"] == [0, 0]
    long = {"limit": 32, "seconds": MIN_JUDGED_S}
    assert soak_verdict(memory_trend(rising), [], **long) == "leaks"
    assert soak_verdict(memory_trend(settled), [], **long) == "clean"
    assert soak_verdict(memory_trend(settled), ["1 requests never ended"], **long) == "failed"
    assert soak_verdict(memory_trend(settled), [], limit=32, seconds=MIN_JUDGED_S - 1) == "too short"
    assert soak_verdict({"interval": [-50.0, 50.0]}, [], **long) == "unclear"
    assert soak_verdict(memory_trend(rising[:5]), [], **long) == "too short"


def test_the_command_runs_the_bundled_model(tmp_path):
    path = tmp_path / "soak.json"
    result = RUN.invoke(app, ["bench", "soak", "--minutes", "0.04", "--concurrency", "4", "--max-tokens", "8", "--sample", "0.05", "--threads", "1", "--json", str(path)])  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["is_complete"] and document["problems"] == [] and document["verdict"] == "too short"
    totals = document["totals"]
    assert totals["num_requests"] == sum(totals["ends"].values()) > 0 and totals["num_rounds"] > 0
    assert document["samples"][-1]["num_in_flight"] == 0 and document["samples"][-1]["rss_bytes"] > 2**20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "minutes must be > 0"),
        (["--concurrency", "0"], "concurrency must be >= 1"),
        (["--kv-share", "0"], "kv-share must be in"),
        (["--max-tokens", "5000", "--minutes", "0.01"], "max-tokens must leave"),
        (["--model", "/absent"], "model must be"),
    ],
)
def test_bad_options_are_answered_in_one_sentence(arguments, message):
    result = RUN.invoke(app, ["bench", "soak", *arguments])
    assert isinstance(result.exception, PacelineError), result.output
    assert message in str(result.exception) and "\n" not in str(result.exception)
