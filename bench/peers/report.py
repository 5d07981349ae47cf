"""Peer report: rates, times and equal tokens of every arm of a cell, with intervals over groups, and the tables of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from paceline.bench.common.terminal import interval_text, new_table, number_text, say_file
from paceline.bench.peers.arms import PeerArm, TokenCounter, Turn
from paceline.bench.serve.stats import first_difference, percentiles_with_intervals, ratio_with_interval
from paceline.bootstrap import interval, rate_ratio, resampled

TOKENIZER, USAGE = "tokenizer", "usage"
_TTFT_POINTS = (50, 95)
_GROUP_KEYS = ("group_tokens", "group_seconds")


def cell_row(
    cell: Mapping[str, Any], index: int, num_groups: int, arms: Sequence[PeerArm], baseline: str, counter: TokenCounter
) -> dict[str, Any]:
    """One cell as JSON values.

    Args:
        cell: what it is (workload, temperature, concurrency). index: its number, as in the arms' turns.
        num_groups: counted groups; the warm-up has negative numbers.
        baseline: the arm that ratios and equal tokens are over.
    """
    turns = {arm.name: {g: arm.turns[index, g] for g in range(num_groups) if (index, g) in arm.turns} for arm in arms}
    turns = {name: found for name, found in turns.items() if found}
    row: dict[str, Any] = {**cell, "arms": {n: _arm(list(found.values()), counter) for n, found in turns.items()}}
    base = turns.get(baseline, {})
    row["ratios"] = {name: _ratio(found, base, counter) for name, found in turns.items() if base and name != baseline}
    if cell["temperature"] == 0:
        row["equal"] = {
            name: _equal(found, base, counter) for name, found in turns.items() if base and name != baseline
        }
    return row


def _arm(turns: Sequence[Turn], counter: TokenCounter) -> dict[str, Any]:
    answers = [a.result for turn in turns for a in turn.answers]
    whole = [r for turn in turns for r in turn.whole]
    broken = [r for r in answers if r.problem is not None]
    tokens = [[counter.count(r) for r in turn.whole] for turn in turns]
    with_usage = [r for r in whole if r.usage_tokens is not None]
    rounds = ratio_with_interval(
        [t.num_rounds + t.num_accepted_tokens for t in turns if t.num_rounds], [t.num_rounds for t in turns if t.num_rounds]
    )  # fmt: skip
    return {
        "num_requests": len(answers), "num_whole": len(whole),
        "num_refusals": sum(a.num_refused for turn in turns for a in turn.answers), "problems": dict(Counter(str(r.kind) for r in broken)),
        "examples": {str(r.kind): r.problem for r in reversed(broken)},
        "num_tokens": sum(map(sum, tokens)), "seconds": round(sum(t.seconds for t in turns), 3),
        "tokens_per_s": ratio_with_interval([sum(n) for n in tokens], [t.seconds for t in turns], digits=2),
        "request_tokens_per_s": ratio_with_interval(
            [sum(n) for n in tokens], [sum(a.result.ended_s - a.due_s for a in t.whole_answers) for t in turns], digits=2
        ),
        "ttft_ms": percentiles_with_intervals(
            [[s - a.due_s for a in t.whole_answers if (s := a.first_token_s) is not None] for t in turns], _TTFT_POINTS
        ),
        "acceptance_length": rounds,
        "token_count": USAGE if len(with_usage) == len(whole) else TOKENIZER,
        "usage_confirmed": _share(sum(map(counter.is_confirmed, with_usage)), len(with_usage)),
        "prompts_confirmed": _share(sum(map(counter.is_same_prompt, with_usage)), len(with_usage)),
        "group_tokens": [sum(n) for n in tokens], "group_seconds": [round(t.seconds, 4) for t in turns],
    }  # fmt: skip


def _ratio(own: Mapping[int, Turn], base: Mapping[int, Turn], counter: TokenCounter) -> dict[str, Any] | None:
    """Tokens per second over the baseline's, of the groups in which both gave an answer; None where it gave no token."""
    both = [(own[g], base[g]) for g in own if g in base and own[g].whole and base[g].whole]
    if not both:
        return None
    sides = [[[sum(map(counter.count, t.whole)) for t in side], [t.seconds for t in side]] for side in zip(*both, strict=True)]  # fmt: skip
    if not sum(sides[1][0]):  # answers that end at once have no token: nothing is so many times that
        return None
    value, ends = rate_ratio(*sides)
    return {"value": round(value, 4), "interval": ends}


def _equal(own: Mapping[int, Turn], base: Mapping[int, Turn], counter: TokenCounter) -> dict[str, Any]:
    """How far greedy answers are the baseline's: tokens until the first difference, over those of the longer answer."""
    num_equal = num_compared = num_same = num_all = 0
    for group in own.keys() & base.keys():
        for a, b in zip(own[group].answers, base[group].answers, strict=False):
            if a.result.problem is not None or b.result.problem is not None:
                continue
            as_text = not (a.result.token_ids and b.result.token_ids)
            x, y = (counter.output_ids(r.result, as_text=as_text) for r in (a, b))
            at = first_difference(x, y)
            num_compared += 1
            num_equal += at is None
            num_same += len(x) if at is None else at
            num_all += max(len(x), len(y))
    return {"num_compared": num_compared, "num_equal": num_equal, "token_share": _share(num_same, num_all)}


def mean_ratios(cells: Sequence[Mapping[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Per temperature, concurrency and arm: geometric mean over the workloads of the speed over the baseline's.

    A workload in which one of both lost a whole group is left out. Groups of a workload are drawn together.
    """
    out = []
    places = dict.fromkeys((c["temperature"], c["concurrency"]) for c in cells)
    for temperature, concurrency in places:
        own = [c for c in cells if (c["temperature"], c["concurrency"]) == (temperature, concurrency)]
        for name in dict.fromkeys(name for c in own for name in c["ratios"]):
            pairs = [(c["arms"][name], c["arms"][baseline]) for c in own if c["ratios"].get(name)]
            columns = [
                np.array([side[key] for side in pair for key in _GROUP_KEYS]) for pair in pairs if _is_paired(*pair)
            ]
            if not columns:
                continue
            found = [resampled(x, lambda s: np.log(s[0] / s[1] * s[3] / s[2]), seed=i) for i, x in enumerate(columns)]
            value = float(np.exp(np.mean([v for v, _ in found])))
            spread = np.exp(np.mean([values for _, values in found], axis=0))
            ends = interval(value, spread, min(x.shape[1] for x in columns), is_positive=True)
            out.append({"temperature": temperature, "concurrency": concurrency, "arm": name, "num_workloads": len(columns), "value": round(value, 4), "interval": ends})  # fmt: skip
    return out


def _is_paired(own: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Whether both have the same groups, all with tokens."""
    return (
        len(own["group_tokens"]) == len(base["group_tokens"]) and min(*own["group_tokens"], *base["group_tokens"]) > 0
    )


def _share(top: int, bottom: int) -> float | None:
    return round(top / bottom, 4) if bottom else None


def has_failed(document: Mapping[str, Any]) -> bool:
    """Whether an arm of Paceline failed or lost an answer, or no server could be measured at all."""
    own = [s for s in document["servers"] if s["is_own"]]
    lost = any(
        arm["num_whole"] < arm["num_requests"]
        for cell in document["cells"] for name, arm in cell["arms"].items() if name in {s["name"] for s in own}
    )  # fmt: skip
    return lost or any(s["problem"] for s in own) or not document["cells"]


def print_peers(document: Mapping[str, Any], console: Console) -> None:
    """The tables, a row for every server that gave none, and what a reader must know of them."""
    baseline = document["baseline"]
    for key, cells in itertools.groupby(document["cells"], lambda c: (c["workload"], c["temperature"])):
        names = ("clients", "arm", "whole", "tokens/s", f"/ {baseline}", "tokens/s a request", "TTFT ms p50", "TTFT ms p95", "accept.", "equal tokens")  # fmt: skip
        table = new_table(f"{key[0]}, T={key[1]:g}: 95% intervals over groups", names, left={"clients", "arm"})
        for cell in cells:
            for i, (name, arm) in enumerate(cell["arms"].items()):
                equal = cell.get("equal", {}).get(name)
                table.add_row(
                    str(cell["concurrency"]) if i == 0 else "", name, f"{arm['num_whole']}/{arm['num_requests']}",
                    ("" if arm["token_count"] == USAGE else "~") + _figure(arm["tokens_per_s"], 1), _figure(cell["ratios"].get(name), 2),
                    _figure(arm["request_tokens_per_s"], 1), *(_percentile(arm["ttft_ms"], f"p{p}") for p in _TTFT_POINTS),
                    number_text((arm["acceptance_length"] or {}).get("value"), 2),
                    "-" if equal is None or equal["token_share"] is None else f"{equal['token_share']:.0%}",
                    end_section=i + 1 == len(cell["arms"]),
                )  # fmt: skip
        console.print(table)
    means = {(m["temperature"], m["concurrency"], m["arm"]): m for m in document["means"]}
    places = list(dict.fromkeys(key[:2] for key in means))
    if means and len({c["workload"] for c in document["cells"]}) > 1:
        columns = ["arm", *(f"T={temperature:g} x {concurrency}" for temperature, concurrency in places)]
        table = new_table(f"Tokens/s over {baseline}: geometric mean of the workloads", columns)
        for name in dict.fromkeys(key[2] for key in means):
            table.add_row(name, *(_figure(means.get((*place, name)), 2) for place in places))
        console.print(table)
    for server in document["servers"]:
        if server["problem"]:
            console.print(f"[red]{server['name']}[/red]: {escape(server['problem'])}", soft_wrap=True)
    for name, words in document["skipped"].items():
        console.print(f"[yellow]{name}[/yellow]: skipped: {escape(words)}", soft_wrap=True)
    _print_counts(document["cells"], console)
    if document["num_repeated_prompts"]:
        console.print(f"{document['num_repeated_prompts']} prompts of a workload come again in another cell, for every arm alike: caches and drafters that remember may know them", soft_wrap=True)  # fmt: skip
    say_file(console, "JSON", document["options"]["json"])


def _print_counts(cells: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Arms whose own counts are not those of the shared tokenizer."""
    rows = [(name, arm) for cell in cells for name, arm in cell["arms"].items()]
    for name in dict.fromkeys(name for name, _ in rows):
        own = [arm for other, arm in rows if other == name]
        if any(arm["token_count"] == TOKENIZER for arm in own):
            console.print(f"{name}: ~ it sends no usage: tokens are the shared tokenizer's count of its texts", soft_wrap=True)  # fmt: skip
        for key, words in (("usage_confirmed", "answers whose usage is the shared tokenizer's count of their text"), ("prompts_confirmed", "prompts of which it read as many tokens as the shared tokenizer makes")):  # fmt: skip
            shares = [arm[key] for arm in own if arm[key] is not None]
            if shares and min(shares) < 1:
                console.print(f"{name}: {min(shares):.1%} (least of a cell) of {words}", soft_wrap=True)
        for kind, words in {kind: words for arm in own for kind, words in arm["examples"].items()}.items():
            console.print(f"{name}: [red]{sum(a['problems'].get(kind, 0) for a in own)} x {kind}[/red]: {escape(str(words))}", soft_wrap=True)  # fmt: skip


def _figure(value: Mapping[str, Any] | None, digits: int) -> str:
    if value is None:
        return "-"
    ends = f" ({interval_text(value['interval'], digits)})" if value["interval"] else ""
    return f"{value['value']:.{digits}f}{ends}"


def _percentile(values: Mapping[str, Any], name: str) -> str:
    ends = (values["intervals"] or {}).get(name)
    return number_text(values[name]) + (f" ({interval_text(ends, 0)})" if ends else "")
