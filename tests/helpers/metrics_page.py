"""Write docs/metrics.md from the metric tables: `python tests/helpers/metrics_page.py`."""

from pathlib import Path

from paceline.infra.service.ingress import INGRESS_METRICS
from paceline.infra.web.metrics import CONTROLLER_METRICS, PROCESS_LABELS, REPLICA_METRICS, MetricSpec

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "metrics.md"
HEAD = """# Metrics

`GET /metrics`. Labels never hold requests, users or versions, of which there is no end; versions, decisions and ledger are
in `GET /paceline/state`. A Grafana dashboard and alert rules are in `infra/kubernetes/grafana/`; the service's own page is
[the dashboard](operate.md#the-dashboard).

## Who may scrape

| service | scraping |
|---|---|
| on 127.0.0.1, no API token | this computer (peer and Host header must be loopback), or the admin token |
| `--api-token` | the API token or the admin token |
| on another address, no API token | the admin token; without one `/metrics` is closed (403) |
| `--metrics-public` (`metrics_public: true`) | anybody, without a token |

```
scrape_configs:
  - job_name: paceline
    authorization: {credentials_file: /etc/prometheus/paceline_token}
    static_configs: [{targets: ["paceline.internal:8000"]}]
```
"""
REPLICA = """
## Of every replica

One scrape shows all replicas, whichever of them a proxy sends it to: each writes its numbers to the service's Redis every
two seconds, and before it answers a scrape. All have the labels `model` (the name that is served) and `replica`; a
replica that is gone leaves within 15 s. Without Redis, or while it is away, an answer has the replica that was asked alone.
Scrape the service's one address. Feedback and trace metrics exist where there is a Redis and a trainable drafter.
`stream` is `true` or `false`; histograms have the
cells 1, 2, 3, 5 of each decade from 0.1 ms to 1,000 s. What Serve's proxy refuses is in Ray's metrics:
`ray_serve_num_http_error_requests_total`, `ray_paceline_refusals_total`.
"""
INGRESS = """
## Of every ingress

With `resume: true` ([serve.md](serve.md#answers-that-outlive-their-replica)) ingresses speak HTTP: the metrics from
`paceline_time_to_first_token_seconds` on are theirs, `replica` is the ingress, and they have counters of their own.
"""
CONTROLLER = """
## Of the controller

Every replica appends the same values, from a snapshot at most three seconds old; they are absent while the controller is
away (a scrape waits at most 0.8 s for it). All have the label `model`. Use `max by (model)`. `group` is `adaptive` (the live
version), `canary` (adaptive requests that the version on trial serves), `static` (hold-back), `plain` (no drafter) or `asked` (chosen by the client).
"""


_SUFFIXES = {"counter": "_total", "gauge": "", "histogram": ""}


def _table(specs: tuple[MetricSpec, ...]) -> str:
    rows = "".join(
        f"| `{s.name}{_SUFFIXES[s.kind]}` | {s.kind} | {s.unit} | "
        f"{', '.join(f'`{label}`' for label in s.labels if label not in PROCESS_LABELS) or '-'} | {s.text} |\n"
        for s in specs
    )
    return f"\n| name | kind | unit | labels | meaning |\n|---|---|---|---|---|\n{rows}"


def page() -> str:
    """The whole page."""
    own = REPLICA + _table(REPLICA_METRICS) + INGRESS + _table(tuple(spec for _, spec in INGRESS_METRICS))
    return HEAD + own + CONTROLLER + _table(CONTROLLER_METRICS)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
