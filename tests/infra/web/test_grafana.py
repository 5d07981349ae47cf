"""Every metric and label that the Grafana dashboard and the alert rules name exists in the code's registry."""

import json
import re
from pathlib import Path

import pytest
import yaml

from paceline.infra.replica.exchange import ReplicaNumbers
from paceline.infra.web.metrics import CONTROLLER_METRICS, REPLICA_METRICS, render_metrics

FOLDER = Path(__file__).resolve().parents[3] / "infra" / "kubernetes" / "grafana"
DASHBOARD = FOLDER / "paceline_dashboard.json"
ALERTS = FOLDER / "paceline_alerts.yaml"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
REGISTRY = {
    s.name + suffix: {*s.labels, *(["le"] if suffix == "_bucket" else [])}
    for s in (*REPLICA_METRICS, *CONTROLLER_METRICS)
    for suffix in SUFFIXES[s.kind]
}
COUNTED = ("_total", *SUFFIXES["histogram"])
FUNCTIONS = {
    "histogram_quantile",
    "max",
    "min",
    "sum",
    "avg",
    "count",
    "rate",
    "increase",
    "delta",
    "last_over_time",
    "min_over_time",
    "label_values",
}
WORDS = FUNCTIONS | {"by", "unless", "and", "or"}
TARGET_LABELS = {"instance", "job"}


def expressions() -> list[tuple[str, str]]:
    """(query, legend) of every panel, variable, annotation and rule."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    found = [(t["expr"], t["legendFormat"]) for p in board["panels"] for t in p.get("targets", [])]
    found += [(v["query"]["query"], "") for v in board["templating"]["list"] if v["type"] == "query"]
    found += [(a["expr"], a["titleFormat"]) for a in board["annotations"]["list"]]
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    return found + [(r["expr"], "") for g in rules["groups"] for r in g["rules"]]


def problems(query: str, legend: str = "") -> list[str]:
    """What a query names that the registry does not have, or that is no PromQL of the kind used here."""
    out = [f"unbalanced {a}{b}" for a, b in ("()", "{}", "[]") if query.count(a) != query.count(b)]
    variable = re.fullmatch(r"label_values\((\w+)(?:\{model=~\"\$model\"\})?, (\w+)\)", query)
    if variable:
        return [] if variable[2] in REGISTRY.get(variable[1], set()) else [f"{query} asks for what is not there"]
    bare = re.sub(r'"[^"]*"', '""', query)
    labels_of: set[str] = set()
    for name, matchers in re.findall(r"\b(paceline_\w+)(?:\{([^}]*)\})?", bare):
        if name not in REGISTRY:
            out.append(f"{name} is not a metric")
            continue
        labels_of |= REGISTRY[name]
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        out += [f"{name} has no label {label}" for label in used - REGISTRY[name] - TARGET_LABELS]
    if not re.search(r"\bpaceline_", bare):
        out.append("no metric in it")
    grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", bare) for label in group.split(",")}
    shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))
    out += [f"no metric of the query has the label {label}" for label in (grouped | shown) - labels_of - TARGET_LABELS]
    if grouped:
        out += [f"the query drops the label {label} of its legend" for label in shown - grouped]
    rest = re.sub(r"\{[^}]*\}|\[[0-9]+[smhd]\]|\bby \([^)]*\)|paceline_\w+", " ", bare)
    out += [f"{word} is not known here" for word in re.findall(r"[A-Za-z_]\w*", rest) if word not in WORDS]
    counters = re.findall(r"\b(?:rate|increase)\((\w+)", bare)
    return out + [f"rate of {name}, which is no counter" for name in counters if not name.endswith(COUNTED)]


@pytest.mark.parametrize(("query", "legend"), expressions())
def test_query_names_only_what_the_code_exposes(query: str, legend: str) -> None:
    assert problems(query, legend) == []


@pytest.mark.parametrize(
    "query",
    ["max(paceline_nothing)", 'max(paceline_tokens_total{colour="x"})', "max by (version) (paceline_ledger_seconds)", "rate(paceline_kv_pages[1m])", "max(paceline_kv_pages", "foo(paceline_kv_pages)", "paceline_rounds", "1 + 1", "label_values(paceline_kv_pages, bucket)", "rate(paceline_queue_seconds[5m])", "sum by (le) (paceline_queue_seconds_sum)"],
)  # fmt: skip
def test_check_finds_planted_mistakes(query: str) -> None:
    assert problems(query)


def test_board_and_alerts_tell_services_apart() -> None:
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"][0]["rules"]
    for rule in rules:
        sums = re.findall(r"\b(?:max|min|sum|count)\b", rule["expr"])
        grouped = re.findall(r"\b(?:max|min|sum|count) by \(model(?:, \w+)*\)", rule["expr"])
        assert len(sums) == len(grouped), rule["alert"]
    text = DASHBOARD.read_text(encoding="utf-8")
    for query, _ in expressions():
        if query not in {rule["expr"] for rule in rules} and query != "label_values(paceline_rounds_total, model)":
            assert query.count("paceline_") == query.count('model=~"$model"'), query
    assert '"name": "model"' in text


def test_dashboard_shows_the_metrics_that_operators_need() -> None:
    text = DASHBOARD.read_text(encoding="utf-8")
    for name in ("ledger_net_seconds", "ledger_seconds", "acceptance_length", "tokens_per_second", "speculation_on", "canary_percent", "stream_lag_entries", "feedback_rows_dropped_total", "redis_up", "controller_epoch", "controller_snapshot_age_seconds", "time_to_first_token_seconds_bucket", "inter_token_seconds_bucket", "request_seconds_bucket", "queue_seconds_bucket", "responses_total"):  # fmt: skip
        assert f"paceline_{name}" in text, name


def test_panels_have_their_own_place_and_number() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for p in panels:
        at = p["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, p["title"]
        taken |= cells


def test_no_controller_is_missed_where_nothing_adapts() -> None:
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"][0]["rules"]
    expr = next(r["expr"] for r in rules if r["alert"] == "PacelineControllerAway")
    first = f"\n{re.findall(r'paceline_[a-z_]+', expr)[0]}{{"

    def scrape(**counters: dict) -> str:
        return render_metrics({"r1": ReplicaNumbers(model="m", counters={"engine": {"num_rounds": 9}, **counters})})[
            0
        ].decode()

    assert first in scrape(traces={"traces_written": 0}) and first not in scrape()


def test_alerts_say_what_to_do() -> None:
    rules = [r for g in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for r in g["rules"]]
    assert len({r["alert"] for r in rules}) == len(rules)
    for r in rules:
        assert r["labels"]["severity"] in ("info", "warning", "critical")
        assert r["annotations"]["summary"] and len(r["annotations"]["description"]) > 40
