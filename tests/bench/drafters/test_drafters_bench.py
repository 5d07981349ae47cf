"""`paceline bench drafters` measures every drafter under every policy, keeps it, and refuses what it cannot do."""

import json
from html.parser import HTMLParser

import jsonschema
import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.bench.drafters import arms as draft_arms
from paceline.bench.drafters import run as drafters
from paceline.bench.drafters import workload_split
from paceline.bench.drafters.html import write_html
from paceline.bench.drafters.run import BenchOptions, DraftersCommand
from paceline.cli.main import app
from paceline.errors import ConfigError, PacelineError
from paceline.paths import bundled
from paceline.serving.drafters.text import PromptLookupDrafter

RUN = CliRunner()
SMALL = ["--temperature", "0,0.8", "--num-prompts", "2", "--groups", "2", "--waves", "1", "--warmup", "0", "--max-tokens", "6", "--check", "1", "--threads", "1"]  # fmt: skip
ARMS = ["lookup/adaptive", "lookup/fixed4", "specblock/adaptive", "specblock/fixed4"]
NUMBER = {"type": "number"}
INTERVAL = {"type": ["array", "null"], "items": NUMBER, "minItems": 2, "maxItems": 2}
ACCEPTANCE = {
    "type": "object",
    "required": ["num_rounds", "num_cut", "num_limited", "acceptance_length", "depths", "histogram"],
    "properties": {
        "acceptance_length": {
            "type": ["object", "null"],
            "required": ["pooled", "interval", "per_request", "num_prompts"],
            "properties": {"pooled": {"type": "number", "minimum": 1}, "per_request": NUMBER, "interval": INTERVAL},
        },
        "depths": {
            "items": {
                "required": ["depth", "num_at_risk", "num_accepted", "conditional", "joint"],
                "properties": {"conditional": {"type": ["number", "null"], "minimum": 0, "maximum": 1}},
            }
        },
        "histogram": {"items": {"required": ["acceptance_length", "num_rounds"]}},
    },
}
PERCENTILES = {"required": ["p50", "p95", "p99", "max"], "additionalProperties": {"type": ["number", "null"]}}
DRAFTING = {
    **ACCEPTANCE,
    "required": [*ACCEPTANCE["required"], "drafted", "round_ms", "user_tokens_per_s", "ttft_ms", "gap_ms"],
    "properties": {
        **ACCEPTANCE["properties"],
        "drafted": ACCEPTANCE,
        "ttft_ms": PERCENTILES,
        "gap_ms": PERCENTILES,
        "round_ms": PERCENTILES,
        "cost": {
            "required": ["of_round", "of_round_with_build", "num_drafts", "ms_per_draft", "passes_per_draft", "weight_bytes_per_draft"],
            "properties": {"of_round": {"type": ["object", "null"], "properties": {"share": NUMBER, "interval": INTERVAL}}},
        },
        "prediction": {"type": ["object", "null"], "required": ["part", "predicted", "measured", "difference"]},
    },
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "required": ["format", "command", "options", "machine", "device", "target", "drafting_arms", "workloads", "cells", "summary", "random_gaps"],
    "properties": {
        "is_complete": {"const": True},
        "cells": {
            "type": "array",
            "items": {
                "required": ["bucket", "batch", "temperature", "arms", "ratios", "drafting", "lossless"],
                "properties": {
                    "drafting": {"additionalProperties": DRAFTING},
                    "lossless": {"additionalProperties": {"required": ["num_compared", "num_differing", "num_mismatches", "num_checked_tokens"]}},
                    "ratios": {"additionalProperties": {"required": ["whole", "full_batch"]}},
                },
            },
        },
        "workloads": {"additionalProperties": {"required": ["kind", "ids", "seed", "num_prompts", "prompt_tokens"]}},
        "summary": {"items": {"required": ["arm", "policy", "speedup", "speedup_interval", "acceptance_length_macro", "acceptance_length_pooled"]}},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of the command with two drafters under two policies: (document, output, folder)."""
    folder = tmp_path_factory.mktemp("drafters")
    result = RUN.invoke(
        app,
        ["bench", "drafters", *SMALL, "--nodes", "4", "--batch", "1,2", "--buckets", "tools", "--json", str(folder / "deep" / "a.json"), "--html", str(folder / "a.html")],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return json.loads((folder / "deep" / "a.json").read_text()), result.output, folder


def test_every_cell_has_every_arm_and_fits_the_schema(run):
    document, _, _ = run
    jsonschema.validate(document, SCHEMA)
    where = [(c["bucket"], c["batch"], c["temperature"]) for c in document["cells"]]
    assert where == [("tools", n, t) for n in (1, 2) for t in (0.0, 0.8)]
    for cell in document["cells"]:
        assert list(cell["arms"]) == list(cell["drafting"]) == ["plain", *ARMS]
        assert list(cell["ratios"]) == list(cell["lossless"]) == ARMS
        assert cell["drafting"]["plain"]["acceptance_length"]["pooled"] == 1.0
        for arm in ARMS:
            row = cell["drafting"][arm]
            assert row["acceptance_length"]["pooled"] == pytest.approx(1 + sum(d["joint"] for d in row["depths"]))
            low, high = cell["ratios"][arm]["whole"]["interval"]
            assert low <= cell["ratios"][arm]["whole"]["ratio"] <= high
    assert document["options"]["policies"] == ["adaptive", "fixed"] and document["options"]["nodes"] == [4]


def test_budgets_are_equal_for_every_drafter_and_draft_costs_are_counted(run):
    document, _, _ = run
    trees = {s["name"]: s["tree"] for s in document["drafting_arms"]}
    assert trees["lookup/fixed4"] == trees["specblock/fixed4"] and trees["lookup/fixed4"]["max_draft_tokens"] == 4
    specs = {s["name"]: s for s in document["drafting_arms"]}
    assert specs["lookup/fixed4"]["weight_bytes"] == 0 < specs["specblock/fixed4"]["weight_bytes"]
    for cell in document["cells"]:
        row = cell["drafting"]["specblock/fixed4"]
        assert len(row["depths"]) <= 4 and row["drafted"]["draft_tokens_per_round"] == pytest.approx(4, abs=0.2)
        cost = row["cost"]
        assert 0 < cost["of_round"]["share"] < cost["of_round_with_build"]["share"] < 1
        assert cost["passes_per_draft"] == 2, "a fixed budget re-enters SpecBlock in every round"
        assert cost["weight_bytes_per_draft"] == 2 * specs["specblock/fixed4"]["weight_bytes"]
        assert cell["drafting"]["lookup/fixed4"]["cost"]["weight_bytes_per_draft"] in (0, None)


def test_answers_are_the_targets_own_at_every_temperature(run):
    document, output, _ = run
    rows = [r for c in document["cells"] for r in c["lossless"].values()]
    assert all(r["num_checked_tokens"] > 0 and r["num_mismatches"] == 0 for r in rows)
    assert "lossless: 0 mismatches" in output


def test_chosen_prompts_are_told_and_are_less_alike_than_others(run):
    document, output, _ = run
    tools = document["workloads"]["tools"]
    assert tools["kind"] == "domain" and tools["similarity"] < tools["uniform_similarity"] and len(set(tools["ids"])) == 4  # fmt: skip
    assert document["random_gaps"] == [] and "mean similarity" in output


def test_the_page_opens_without_a_network(run):
    _, _, folder = run

    class Page(HTMLParser):
        tags: list = []
        open_tags: list = []

        def handle_starttag(self, tag, attrs):
            self.tags.append((tag, dict(attrs)))
            if tag not in ("meta", "link", "br", "input"):
                self.open_tags.append(tag)

        def handle_endtag(self, tag):
            assert self.open_tags.pop() == tag

    text = (folder / "a.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open_tags == [] and sum(tag == "table" for tag, _ in page.tags) == 6
    assert not [a for tag, a in page.tags if tag in ("script", "link", "img") and ("src" in a or "href" in a)]
    assert text.count("Plotly.newPlot(") == 3 and "Pareto" in text and "specblock/fixed4" in text
    assert "0 mismatches" in text


def test_names_from_a_data_folder_cannot_break_out_of_the_page(run, tmp_path):
    document = json.loads(json.dumps(run[0]).replace("tools", "</script><img src=x>"))
    write_html(document, tmp_path / "b.html")
    text = (tmp_path / "b.html").read_text()
    assert "<img src=x>" not in text and "&lt;img src=x&gt;" in text


# ---- comparing --------------------------------------------------------------------------------------------------------
def compare(*arguments):
    return RUN.invoke(app, ["bench", "compare", *map(str, arguments)])


def slower(folder, document, factor, name="b.json", **options):
    """The same run with specblock/fixed4 slower by a factor in every group."""
    copy = json.loads(json.dumps(document))
    copy["options"].update(options)
    for cell in copy["cells"]:
        own = cell["arms"]["specblock/fixed4"]
        own["group_seconds"] = [s * factor for s in own["group_seconds"]]
    (folder / name).write_text(json.dumps(copy), encoding="utf-8")
    return folder / name


def test_a_run_compared_with_itself_has_ratios_of_one(run, tmp_path):
    _, _, folder = run
    path = folder / "deep" / "a.json"
    result = compare(path, path, "--fail-below", "0.999", "--json", tmp_path / "c.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert len(rows) == 4 * 5
    for row in rows:
        assert row["tokens_per_s"]["ratio"] == pytest.approx(1) and row["tokens_per_s"]["interval"] == [1, 1]
        assert (row["speedup"] is None) == (row["arm"] == "plain")
        assert row["speedup"] is None or row["speedup"]["ratio"] == pytest.approx(1)


def test_a_regression_is_found_in_its_arm_only_and_sets_the_exit_code(run, tmp_path):
    document, _, folder = run
    path = folder / "deep" / "a.json"
    second = slower(tmp_path, document, 1.25)
    result = compare(path, second, "--fail-below", "0.95", "--json", tmp_path / "c.json")
    assert result.exit_code == 1 and "4 of 20 rows" in result.output
    got = json.loads((tmp_path / "c.json").read_text())
    assert {r["arm"] for r in got["failed"]} == {"specblock/fixed4"} and len(got["failed"]) == 4
    assert all(r["speedup"]["ratio"] == pytest.approx(0.8) for r in got["failed"])
    assert compare(path, second, "--fail-below", "0.75").exit_code == 0
    assert compare(path, second, "--fail-below", "0.95", "--metric", "acceptance_length").exit_code == 0
    assert compare(second, path, "--fail-below", "0.95").exit_code == 0, "faster is no regression"


def test_runs_of_different_configurations_are_refused_or_warned_of(run, tmp_path):
    document, _, folder = run
    path = folder / "deep" / "a.json"
    other = slower(tmp_path, document, 1.0, max_tokens=64)
    refused = compare(path, other)
    assert isinstance(refused.exception, ConfigError) and "option max_tokens differs: 6 and 64" in str(refused.exception)  # fmt: skip
    forced = compare(path, other, "--force")
    assert forced.exit_code == 0 and "option max_tokens differs" in forced.output
    warned = compare(path, slower(tmp_path, document, 1.0, "d.json", num_threads=7))
    assert warned.exit_code == 0 and "option num_threads differs: 1 and 7" in warned.output
    (tmp_path / "x.json").write_text("{}")
    assert isinstance(compare(path, tmp_path / "x.json").exception, ConfigError)
    assert isinstance(compare(path, tmp_path / "missing.json").exception, ConfigError)


# ---- options and arms -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafters", "none"], "drafters must be drafters"),
        (["--drafters", "no-such-folder"], "drafter must be"),
        (["--policies", "magic"], "policies must be among adaptive, bastion, fixed"),
        (["--nodes", ""], "nodes must give the budgets"),
        (["--nodes", "999"], "tree.max_draft_tokens must be in"),
        (["--batch", "0"], "batch must be"),
        (["--temperature", "-1"], "temperature must be"),
        (["--buckets", "poems"], "buckets must be among tools, code, math, facts, random, all"),
        (["--buckets", ""], "buckets must name at least one"),
        (["--isl", "1"], "isl must be"),
        (["--isl", "4000"], "max_tokens and isl must fit the model's context"),
        (["--embedding", "words"], "embedding must be one of tfidf, hidden"),
        (["--groups", "0"], "groups must be >= 1"),
        (["--baseline", "vllm"], "baseline must be"),
        (["--data", "/no/such"], "data must be a folder"),
        (["--device", "tpu"], "device must be"),
    ],
)
def test_bad_options_are_answered_in_one_sentence(arguments, message):
    result = RUN.invoke(app, ["bench", "drafters", *arguments])
    assert isinstance(result.exception, PacelineError), result.output
    assert message in str(result.exception) and "\n" not in str(result.exception)


def test_quick_shrinks_what_was_not_asked_for_and_nothing_else():
    small = DraftersCommand(options=BenchOptions(num_prompts=9, nodes=(3,)), is_quick=True).chosen()
    assert small.num_prompts == 9 and small.nodes == (3,) and small.batches == (1, 8)
    assert small.temperatures == (0.0,) and small.buckets == ("tools", "random") and small.num_counted(8) == 16


def test_a_new_policy_is_one_entry(monkeypatch):
    monkeypatch.setitem(draft_arms.BUDGET_POLICIES, "flat", {"max_frontier": 0, "policy": "fixed"})
    names = [s.name for s in draft_arms.arm_specs(["lookup"], ["adaptive", "flat"], [2, 4])]
    assert names == ["lookup/adaptive", "lookup/flat2", "lookup/flat4"]


def test_a_drafter_and_one_without_weights_draft_together():
    (spec,) = draft_arms.arm_specs(["jetspec+suffix"], ["fixed"], [4])
    assert (spec.name, spec.drafter, spec.tree.mix) == ("jetspec+suffix/fixed4", "jetspec", "suffix")
    assert spec.num_weights > 0 and spec.domains == ("tools", "code")
    with pytest.raises(ConfigError, match=r"NAME\+TEXT"):
        draft_arms.arm_specs(["lookup+suffix"], ["adaptive"], [])


def test_two_drafters_of_one_name_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="'specblock/adaptive' twice"):
        draft_arms.arm_specs(["specblock", str(bundled("specblock"))], ["adaptive"], [])


def test_the_configuration_is_on_disk_before_the_model_is_loaded(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(drafters, "load_target", broken)
    path = tmp_path / "d.json"
    with pytest.raises(RuntimeError):
        drafters.run_bench_drafters(BenchOptions(json=path), Console(quiet=True))
    document = json.loads(path.read_text())
    assert document["is_complete"] is False and document["options"]["drafters"] == ["lookup", "specblock"]
    assert [a["name"] for a in document["drafting_arms"]][-1] == "specblock/fixed8" and document["machine"]["num_cpus"]


def test_a_drafter_that_fails_ends_the_run_instead_of_looking_slow(monkeypatch):
    def fail(self, inputs):
        raise RuntimeError("no draft today")

    monkeypatch.setattr(PromptLookupDrafter, "propose", fail)
    options = BenchOptions(drafters=("lookup",), policies=("fixed",), nodes=(2,), batches=(1,), temperatures=(0.0,), buckets=("tools",), num_prompts=1, min_groups=1, warmup_groups=0, max_tokens=4, num_check=0)  # fmt: skip
    with pytest.raises(PacelineError, match=r"drafter of arm lookup/fixed2 failed.*no draft today"):
        drafters.run_bench_drafters(options, Console(quiet=True))


def test_load_buckets_run_next_to_random_tokens_of_their_length(tmp_path, monkeypatch):
    monkeypatch.setattr(workload_split, "MAX_MEASURED", 24)
    path = tmp_path / "load.json"
    result = RUN.invoke(
        app,
        ["bench", "drafters", *SMALL, "--drafters", "lookup", "--policies", "fixed", "--nodes", "2", "--temperature", "0", "--batch", "1", "--buckets", "math,random", "--isl", "32", "--check", "0", "--json", str(path)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert [c["bucket"] for c in document["cells"]] == ["math", "random", "low-32", "mixed-32", "high-32", "random-32"]
    entropies = [document["workloads"][f"{t}-32"]["entropy_nats"]["mean"] for t in ("low", "mixed", "high")]
    assert entropies == sorted(entropies) and document["workloads"]["random-32"]["isl"] == 32
    gaps = [(r["random_bucket"], r["kind"], r["arm"]) for r in document["random_gaps"]]
    assert gaps == [(b, k, arm) for b, k in (("random", "domain"), ("random-32", "load")) for arm in ("plain", "lookup/fixed2")]  # fmt: skip
    assert "Random tokens instead of text" in result.output
    of_kind = {r["kind"]: r["num_buckets"] for r in document["summary"]}
    assert of_kind == {"domain": 1, "load": 3}, "random tokens are no result"
