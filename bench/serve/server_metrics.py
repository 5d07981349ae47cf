"""Server metrics: what a server's own Prometheus page says about acceptance before and after a load, by engine.

| server | what is read | gives |
|---|---|---|
| vLLM | counters `vllm:spec_decode_num_{drafts,draft_tokens,accepted_tokens}_total`, `..._accepted_tokens_per_pos_total` | acceptance length of the load, rate, share accepted per depth |
| SGLang | gauge `sglang:spec_accept_length` | the server's own running mean, not the load's |
| Paceline | gauge `paceline_acceptance_length` (30 s), counters `paceline_emitted_tokens_total`, `paceline_rounds_total` | the same; answers carry their own account, which is better |

Counters count whatever else the server does in the meantime.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

NOT_OFFERED = "not offered"
_VLLM = "vllm:spec_decode_num_"
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """One reading of a Prometheus page."""

    samples: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)
    """Sample name -> (labels, value) of each series."""

    def total(self, name: str) -> float | None:
        """Sum over all series; None where the page lacks it."""
        found = self.samples.get(name)
        return None if not found else sum(v for _, v in found)

    def mean(self, name: str) -> float | None:
        """Mean over the series of a gauge that have a value above 0; None without any."""
        found = [v for _, v in self.samples.get(name, ()) if v > 0]
        return sum(found) / len(found) if found else None


def parse_page(text: str) -> MetricsPage:
    """Read Prometheus' text format; a page that is none, in whole or in part, gives what was read before."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))
    except (ValueError, KeyError, IndexError):
        pass  # an HTML page or the like: the server has no metrics here
    return MetricsPage(samples)


async def read_page(http: httpx.AsyncClient) -> MetricsPage | None:
    """GET /metrics; None where the server has none, keeps it closed, or is too slow."""
    try:
        response = await http.get("/metrics", timeout=_TIMEOUT_S, follow_redirects=True)
    except httpx.HTTPError:
        return None
    return parse_page(response.text) if response.status_code == 200 else None


def acceptance_between(before: MetricsPage | None, after: MetricsPage | None) -> dict[str, Any]:
    """What two readings say; {"source": "not offered"} where they say nothing.

    acceptance_length includes the bonus token: 1 + accepted / drafts.
    """
    if before is None or after is None:
        return {"source": NOT_OFFERED}
    for of in (_vllm, _sglang, _paceline):
        found = of(before, after)
        if found is not None:
            return found
    return {"source": NOT_OFFERED}


def _vllm(before: MetricsPage, after: MetricsPage) -> dict[str, Any] | None:
    drafts, proposed, accepted = (_grown(before, after, f"{_VLLM}{n}_total") for n in ("drafts", "draft_tokens", "accepted_tokens"))  # fmt: skip
    if not drafts or proposed is None or accepted is None:
        return None
    then, now = (_by_position(page) for page in (before, after))
    grown = [now[i] - then.get(i, 0.0) for i in sorted(now)]
    return {
        "source": "vllm counters",
        "acceptance_length": {"value": round(1 + accepted / drafts, 4), "interval": None},
        "acceptance_rate": round(accepted / proposed, 4) if proposed else None,
        "num_rounds": int(drafts), "num_draft_tokens": int(proposed), "num_accepted_tokens": int(accepted),
        "accepted_share_per_depth": [round(g / drafts, 4) for g in grown] or None,
    }  # fmt: skip


def _by_position(page: MetricsPage) -> dict[int, float]:
    """Accepted tokens per depth, summed over engines."""
    out: dict[int, float] = {}
    for labels, value in page.samples.get(f"{_VLLM}accepted_tokens_per_pos_total", ()):
        if labels.get("position", "").isdigit():
            at = int(labels["position"])
            out[at] = out.get(at, 0.0) + value
    return out


def _sglang(before: MetricsPage, after: MetricsPage) -> dict[str, Any] | None:
    length = after.mean("sglang:spec_accept_length")
    if length is None:
        return None
    return {
        "source": "sglang gauge: the server's running mean, not this load's",
        "acceptance_length": {"value": round(length, 4), "interval": None},
        "acceptance_rate": after.mean("sglang:spec_accept_rate"),
    }


def _paceline(before: MetricsPage, after: MetricsPage) -> dict[str, Any] | None:
    length = after.mean("paceline_acceptance_length")
    tokens, rounds = (_grown(before, after, f"paceline_{n}_total") for n in ("emitted_tokens", "rounds"))
    if length is None and not rounds:
        return None
    return {
        "source": "paceline gauge: mean of the latest 30 s over buckets and groups",
        "acceptance_length": None if length is None else {"value": round(length, 4), "interval": None},
        "tokens_per_engine_round": round(tokens / rounds, 4) if tokens and rounds else None,
    }


def _grown(before: MetricsPage, after: MetricsPage, name: str) -> float | None:
    now = after.total(name)
    if now is None:
        return None
    then = before.total(name) or 0.0
    return now - then if now >= then else now  # a restart in between begins at 0
