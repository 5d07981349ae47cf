"""Budgets: acceptance length over the number of draft nodes, by exact replay of text that the target wrote.

No clock is involved: what a budget costs is another question (`bench drafters`, `bench forward`). Every drafter and every way of
growing trees is scored on the same texts, so their ratios are paired. Beside the length stands what the trees themselves
predicted, the sum of the path masses of their nodes, which is what budgets are chosen by.
Source: JetSpec (arXiv 2606.18394), acceptance over 16 to 256 nodes; BASTION (arXiv 2605.29727), its acceptance surrogate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated as A
from typing import Any

import numpy as np
from rich.console import Console

from paceline.adapt.gate.gate import RequestScore, pooled_acceptance_length
from paceline.adapt.gate.shadow import SeenRound, shadow_scores, usable_traces
from paceline.bench.common.engine_run import load_named_drafter, load_target, set_threads, target_facts
from paceline.bench.common.html_page import COLORS, menu_figure, plots, write_page
from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import interval_text, new_table, number_text, progress, say_file
from paceline.bench.common.workloads import read_questions
from paceline.bench.drafters.workload_split import domain_workload
from paceline.bench.engine.arms import BenchGroup
from paceline.bench.shadow.decode import decode
from paceline.bootstrap import rate_ratio, ratio_interval
from paceline.config import TreeConfig
from paceline.errors import ConfigError
from paceline.records import DataFolder, Dtype, HtmlFile, JsonFile, Model, Setting, Threads, record, require
from paceline.serving.sampling.request import RequestTrace, SamplingParams
from paceline.serving.target_model.model import TargetModel

POLICIES = ("ddtree", "bundle")
_BATCH = 16
_HEAD = ("drafter", "policy", "bucket", "T", "nodes", "AL", "95% interval", "over the first arm", "95% interval ", "predicted / realised")  # fmt: skip
_PAGE = """<h1>Acceptance length over draft nodes</h1>
<p>Tokens per round, by exact replay of text that the target wrote; bands are 95% intervals over requests. Predicted /
realised: accepted draft tokens a round as the trees' path masses foretell them, over those that were.</p>
{{ plots }}
{{ table(head, rows) }}"""


@record()
class BudgetsOptions:
    """Equal texts for every drafter, no clock: acceptance length and what the trees had predicted.

    Example: paceline bench budgets --drafters jetspec,dflash --nodes 8,64,256 --html budgets.html.
    """

    drafters: A[
        tuple[str, ...], Setting("Comma list of bundled drafters, lookup, suffix, or folders.", non_empty=True)
    ] = ("specblock", "eagle3", "jetspec", "dflash")
    nodes: A[tuple[int, ...], Setting("Comma list of draft nodes.", ge=1, le=256, non_empty=True)] = (8, 16, 32, 64, 128, 256)  # fmt: skip
    policies: A[
        tuple[str, ...],
        Setting("Comma list: ddtree (the heaviest nodes), bundle (all children of a node at once).", choices=POLICIES),
    ] = ("ddtree",)
    buckets: A[tuple[str, ...], Setting("Comma list of domains; '' = all of the prompts.")] = ()
    temperatures: A[tuple[float, ...], Setting("Comma list.", flag="temperature", ge=0, non_empty=True)] = (0.0,)
    num_prompts: A[int, Setting("Requests per bucket and temperature.", ge=2)] = 32
    max_tokens: A[int, Setting("New tokens per request at most.", ge=3)] = 128
    max_frontier: A[int, Setting("Leaves that a drafter of several blocks goes on from.", ge=0, le=64)] = 4
    model: Model = "bundled"
    dtype: Dtype = "auto"
    num_threads: Threads = 1
    seed: A[int, Setting("Seed of prompts and sampling.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None
    html: HtmlFile = None

    def __post_init__(self) -> None:
        require("none" not in self.drafters, "drafters must propose something", "none")


def run_budgets(options: BudgetsOptions, console: Console) -> dict[str, Any]:
    """Write the text, replay it with every drafter at every budget, print the table, write files; the document."""
    set_threads(options.num_threads)
    target = load_target(options.model, options.dtype, drafters=options.drafters)
    groups = make_groups(options, target)
    file = ResultFile(options.json, command="bench budgets", options=options, extra={"target": target_facts(target)})
    rows: list[dict[str, Any]] = []
    arms = [(d, p) for d in options.drafters for p in options.policies]
    with progress(console, "writing text", len(groups) * (1 + len(arms) * len(options.nodes))) as bar:
        for group in groups:
            bar.name(f"writing {group.tag}")
            traces = usable_traces(decode(target, None, group).traces)
            bar.step()
            for num_nodes in options.nodes:
                first: Sequence[RequestScore] | None = None
                for drafter, policy in arms:
                    bar.name(f"{drafter} {policy} {group.tag} {num_nodes} nodes")
                    scores, seen = replay(options, target, traces, drafter, policy, num_nodes)
                    first = first or scores
                    rows.append(
                        {
                            "drafter": drafter, "policy": policy, "bucket": group.bucket,
                            "temperature": group.params[0].temperature, "num_nodes": num_nodes,
                            **figures(scores, first, seen),
                        }
                    )  # fmt: skip
                    bar.step()
            file.update(rows=rows)
    table = [_row_texts(r) for r in rows]
    console.print(new_table("Acceptance length over draft nodes (exact replay)", _HEAD, 4, rows=table))
    if options.html:
        write_page(options.html, "Paceline budgets", _PAGE, plots=plots([_figure(rows)]), head=_HEAD, rows=table)
    say_file(console, "JSON", options.json)
    say_file(console, "HTML", options.html)
    return file.close(rows=rows)


def make_groups(options: BudgetsOptions, target: TargetModel) -> list[BenchGroup]:
    """Requests of every bucket and temperature. Raises: ConfigError on an unknown bucket or one without prompts."""
    questions = read_questions(options.data)
    unknown = sorted(set(options.buckets) - set(questions))
    if unknown:
        raise ConfigError(f"buckets must be among {', '.join(questions)}, got {unknown[0]!r}")
    out = []
    for bucket in options.buckets or tuple(questions):
        work = domain_workload(
            target, bucket, questions[bucket], count=options.num_prompts,
            max_prompt_tokens=target.context_tokens - options.max_tokens - 1, seed=options.seed,
            answer_tokens=options.max_tokens,
        )  # fmt: skip
        prompts = tuple(work.prompts[: options.num_prompts])
        for t in options.temperatures:
            params = tuple(
                SamplingParams(temperature=t, max_tokens=options.max_tokens, seed=options.seed * 1_000_000 + i)
                for i in range(len(prompts))
            )
            out.append(BenchGroup(tag=f"{bucket}-{t:g}", bucket=bucket, prompts=prompts, params=params, batch=_BATCH))
    return out


def replay(
    options: BudgetsOptions, target: TargetModel, traces: Sequence[RequestTrace], drafter: str, policy: str, num_nodes: int
) -> tuple[list[RequestScore], list[SeenRound]]:  # fmt: skip
    """One arm's scores of the texts, and what the trees of its rounds had predicted."""
    made = load_named_drafter(drafter, target)
    assert made is not None, "refused by the options"
    seen: list[SeenRound] = []
    scores = shadow_scores(
        {drafter: made}, traces, num_nodes=num_nodes, max_frontier=options.max_frontier, device=target.device,
        bundle_width=TreeConfig().bundle_width if policy == "bundle" else None, on_round=seen.append,
    )[drafter]  # fmt: skip
    return scores, seen


def figures(scores: Sequence[RequestScore], first: Sequence[RequestScore], seen: Sequence[SeenRound]) -> dict[str, Any]:
    """Acceptance length with its interval, over the first arm's, and how well the trees' masses foretold it."""
    own, base = (np.array([(s.num_tokens + s.num_unseen_tokens, s.num_rounds) for s in x]).T for x in (scores, first))
    _, ends = ratio_interval(own[0].tolist(), own[1].tolist())
    over, over_ends = rate_ratio(own, base)
    predicted = sum(float(r.predicted.sum()) for r in seen)
    realised = sum(int(r.num_accepted_tokens.sum()) for r in seen)
    return {
        "acceptance_length": round(pooled_acceptance_length(scores), 4), "interval": ends,
        "over_first": round(over, 4), "over_first_interval": over_ends,
        "predicted_over_realised": round(predicted / realised, 4) if realised else None,
        "num_requests": len(scores), "num_rounds": int(own[1].sum()),
    }  # fmt: skip


def _row_texts(row: dict[str, Any]) -> list[str]:
    names = [row["drafter"], row["policy"], row["bucket"], f"{row['temperature']:g}", str(row["num_nodes"])]
    length, over = number_text(row["acceptance_length"], 3), number_text(row["over_first"], 3)
    own, paired = interval_text(row["interval"], 3), interval_text(row["over_first_interval"], 3)
    return [*names, length, own, over, paired, number_text(row["predicted_over_realised"], 3)]


def _figure(rows: Sequence[dict[str, Any]]) -> Any:
    """Acceptance length over nodes, a line an arm; the menu chooses bucket and temperature."""
    import plotly.graph_objects as go

    shown: dict[str, list[Any]] = {}
    for bucket, t in dict.fromkeys((r["bucket"], r["temperature"]) for r in rows):
        cell = [r for r in rows if (r["bucket"], r["temperature"]) == (bucket, t)]
        for i, arm in enumerate(dict.fromkeys((r["drafter"], r["policy"]) for r in cell)):
            own = [r for r in cell if (r["drafter"], r["policy"]) == arm]
            ends = [r["interval"] or [r["acceptance_length"]] * 2 for r in own]
            error = {
                "type": "data", "symmetric": False, "thickness": 1,
                "array": [e[1] - r["acceptance_length"] for e, r in zip(ends, own, strict=True)],
                "arrayminus": [r["acceptance_length"] - e[0] for e, r in zip(ends, own, strict=True)],
            }  # fmt: skip
            line = go.Scatter(
                x=[r["num_nodes"] for r in own], y=[r["acceptance_length"] for r in own], name=" ".join(arm),
                error_y=error, mode="lines+markers", line={"color": COLORS[i % len(COLORS)]},
            )  # fmt: skip
            shown.setdefault(f"{bucket}, T={t:g}", []).append(line)
    return menu_figure(
        shown, title="acceptance length", height=520, xaxis={"title": "draft nodes", "type": "log"}, yaxis_title="tokens per round"
    )  # fmt: skip
