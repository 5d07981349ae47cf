"""The options of `paceline replay`: parsed here, carried out in bench/replay/command.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from paceline.cli.options import Html, Json, Suggest

REPLAY_HELP = (
    "Replay policies on simulated regimes, on a service's decision log, or live with real training, and say which one "
    "pays. Nothing is served. Cells, log format and report: docs/policies.md."
)


def replay(
    source: Annotated[
        str,
        typer.Argument(
            help="synthetic | core | small | a cell's name | FILE.yaml (scenario) | FILE.jsonl (decision log) | live | live-small | off-policy | off-policy-live (checks of the estimates from logs)."
        ),
    ],
    policies: Annotated[
        str,
        typer.Option(
            help="Comma list of payoff, never, always, interval, dual_ema, cara, thompson, hedge, 'oracle' (the best plan that knows the future) and 'bound' (more than any plan saves; neither in live replays), or 'all'."
        ),
    ] = "never,always,interval,payoff,oracle",
    seeds: Annotated[
        int,
        typer.Option(
            help="Seeds of each cell and policy; for live: orders of the traffic, at most 3; for off-policy: logs."
        ),
    ] = 10,
    first_seed: Annotated[int, typer.Option(help="First seed, to extend an earlier replay; not for live.")] = 0,
    sweep: Annotated[
        Optional[list[str]], typer.Option(help="KEY=V1,V2,... of a policy setting; repeat the option for combinations.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes on this computer; not for live.")] = 1,
    ray: Annotated[
        Optional[str],
        typer.Option(help="Address of a Ray cluster to run on instead ('auto' = local one); not for live."),
    ] = None,
    resume: Annotated[
        Optional[Path],
        typer.Option(help="Folder with one line for each finished run; a killed replay goes on from there."),
    ] = None,
    data: Annotated[
        Optional[Path],
        typer.Option(help="Folder of text data for live replays (docs/drafters.md); default: the bundled prompts."),
    ] = None,
    load: Annotated[
        Optional[float],
        typer.Option(help="Devices that the traffic of a live replay keeps busy: a fleet shares one update."),
    ] = None,
    json: Json = None,
    html: Html = None,
    suggest: Suggest = None,
) -> None:
    from paceline.bench.replay.command import ReplayOptions, run_replay
    from paceline.infra.state.log import configure_logging

    configure_logging("ERROR")
    options = ReplayOptions(
        source=source, policies=policies, seeds=seeds, first_seed=first_seed, sweep=tuple(sweep or ()), workers=workers,
        ray=ray, resume=resume, data=data, load=load, json=json, html=html, suggest=suggest,
    )  # fmt: skip
    run_replay(options, Console() if sys.stdout.isatty() else Console(width=160))
