"""Which policy settings follow from a replay, as a file for `paceline serve --config`?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.bandit.replay.simulate import HINDSIGHT
from paceline.config import ServiceConfig, build_config
from paceline.errors import ConfigError
from paceline.paths import write_atomic

MAX_LOSS_PERCENT = 1.0
"""A setting that loses more than this in any cell is suggested only when all of them do."""


def suggest(report: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(values of a service configuration, sentences that say why). Raises ConfigError when nothing can be suggested."""
    ranked = [o for o in report["overall"] if o["policy"] not in HINDSIGHT]
    if not ranked:
        raise ConfigError("suggest needs at least one policy besides the oracle; name some in --policies")
    safe = [o for o in ranked if o["worst_cell_percent"] >= -MAX_LOSS_PERCENT]
    chosen = (safe or ranked)[0]
    net = chosen["net_percent"]
    why = [
        f"{chosen['label']}: net {net['mean']:+.2f}% of serving cost over {chosen['num_cells']} cells and "
        f"{report['num_seeds']} seeds (95% interval {net['low']:+.2f} .. {net['high']:+.2f}), worst cell "
        f"{chosen['worst_cell_percent']:+.2f}% ({chosen['worst_cell']}).",
    ]
    if not safe:
        why.append(f"Every policy lost more than {MAX_LOSS_PERCENT:g}% in some cell; 'never' would not.")
    others = [o for o in ranked if o is not chosen]
    if others:
        other = others[0]
        relation = "higher net, but a worse worst cell" if other["net_percent"]["mean"] > net["mean"] else "next best"
        why.append(f"{other['label']} ({relation}): {other['net_percent']['mean']:+.2f}%, worst cell {other['worst_cell_percent']:+.2f}% ({other['worst_cell']}).")  # fmt: skip
    why.append(f"From a {report['kind']} replay of {report['source']}.")
    values = {"policy": {"policy": chosen["policy"], **chosen["settings"]}}
    build_config(ServiceConfig, values)
    return values, why


def write_suggestion(report: dict[str, Any], path: Path) -> list[str]:
    """Write the YAML file, the reasons as comments; returns the reasons."""
    import yaml

    values, why = suggest(report)
    comments = "".join(f"# {line}\n" for line in why)
    write_atomic(path, comments + yaml.safe_dump(values, sort_keys=False))
    return why
