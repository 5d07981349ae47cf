"""Replay command: runs the kind of replay that `paceline replay` is asked for and writes its reports."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated as A
from typing import Any

import msgspec
from rich.console import Console

from paceline.bandit.controller.decision_log import read_log
from paceline.bandit.ledger.totals import fold_entries
from paceline.bandit.off_policy.forced import follow_log
from paceline.bandit.off_policy.log import value_policy
from paceline.bandit.replay.logged import LoggedService, prepare, replay_logged
from paceline.bandit.replay.simulate import BOUND, HINDSIGHT, ORACLE, Cell
from paceline.bench.common.result_file import write_json
from paceline.bench.replay.frames import check_export, frames_of
from paceline.bench.replay.html import write_html
from paceline.bench.replay.plan import (
    Task,
    Variant,
    describe,
    parse_sweep,
    plan,
    policy_names,
    read_scenarios,
    variants,
)
from paceline.bench.replay.report import (
    FORMAT,
    build_report,
    check_ranked,
    check_seeds,
    print_report,
    write_suggestion,
)
from paceline.bench.replay.run import RUNS_FILE, Row, row_of, run_all
from paceline.errors import ConfigError
from paceline.paths import check_folder
from paceline.records import MODELS, DataFolder, HtmlFile, JsonFile, Setting, record, require

LIVE = ("live", "live-small")
"""Names of replays that really train."""
CHECKS = ("off-policy", "off-policy-live")
"""Names of the comparison of off-policy estimates with the truth; the second really trains."""

USUAL = "never,always,interval,payoff,oracle"
"""Policies that run where none are named."""


@record()
class ReplayOptions:
    """On simulated regimes, on a service's decision log, or live with real training. Nothing is served. Cells, log format
    and report: docs/policies.md.

    Examples: paceline replay small. paceline replay decisions.jsonl --policies payoff,never --suggest policy.yaml.
    """

    source: A[
        str,
        Setting(
            "synthetic | core | small | tables | a cell's name | WORLD.json (tables) or a folder of them | FILE.yaml (scenario) "
            "| FILE.jsonl (decision log) | live | live-small | off-policy | off-policy-live (checks of the estimates from logs).",
            is_argument=True,
            non_empty=True,
        ),
    ]  # fmt: skip
    policies: A[
        str,
        Setting(
            "Comma list of payoff, never, always, interval, dual_ema, cara, thompson, hedge, 'oracle' (the best plan that "
            "knows the future), 'bound' (more than any plan saves; neither in live replays) and MODULE:CLASS of your own, or 'all'."
        ),
    ] = USUAL
    seeds: A[
        int,
        Setting(
            "Seeds of a cell and policy; live: orders of the traffic, at most 3, with --service of noise; off-policy: logs.",
            ge=1,
        ),
    ] = 10
    first_seed: A[int, Setting("First seed, to extend an earlier replay; not for live.", ge=0, le=2**62)] = 0
    sweep: A[
        tuple[str, ...], Setting("KEY=V1,V2,... of a policy setting; repeated for combinations.", is_repeated=True)
    ] = ()
    workers: A[int, Setting("Processes on this computer; not for live.", ge=1)] = 1
    ray: A[str | None, Setting("Address of a Ray cluster to run on ('auto' = local one); not for live.")] = None
    resume: A[Path | None, Setting("Folder with a line for each finished run; a killed replay goes on there.")] = None
    data: DataFolder = None
    service: A[
        Path | None,
        Setting(
            "With live: traffic of this service's log and its captured text (DATA_DIR/services/NAME) instead.", is_folder=True
        ),
    ] = None  # fmt: skip
    model: A[str, Setting(f"Target of --service: {MODELS}")] = "bundled"
    drafter: A[
        Path | None,
        Setting("With --service: folder of another first drafter than the service's; what would have paid then?", is_folder=True),
    ] = None  # fmt: skip
    load: A[float | None, Setting("Devices that live traffic keeps busy: a fleet shares one update.", gt=0)] = None
    json: JsonFile = None
    html: HtmlFile = None
    parquet: A[
        Path | None, Setting("Folder for runs, cells, curves and decisions as Parquet files (extra 'frames').")
    ] = None
    tensorboard: A[
        Path | None, Setting("Folder for a TensorBoard log of each run: net and figures (extra 'tensorboard').")
    ] = None
    suggest: A[
        Path | None, Setting("Write the best settings as YAML for 'paceline serve --config'.", is_output=True)
    ] = None

    def __post_init__(self) -> None:
        if self.suggest is not None:
            check_seeds(self.seeds, is_live=self.source in LIVE)
        if self.parquet is not None:
            check_export("parquet", self.parquet)
        if self.tensorboard is not None:
            check_export("tensorboard", self.tensorboard)
        if self.resume is not None:
            check_folder(self.resume, RUNS_FILE, "resume")
        if self.load is not None and self.source not in LIVE:
            raise ConfigError(
                f"load is set by the scenario, except in {' and '.join(LIVE)}; got source {self.source!r}"
            )
        if self.service is not None and (self.source != "live" or self.data is not None or self.load is not None):
            raise ConfigError(
                "--service must go with source live, and without --data and --load, which the service has"
            )
        require(self.service is not None or self.model == "bundled", "--model must go with --service", self.model)
        require(self.service is not None or self.drafter is None, "--drafter must go with --service", self.drafter)
        if self.source in (*LIVE, "off-policy-live"):  # real training, one run after another, in an order of its own
            given = (
                ("--workers", self.workers != 1), ("--ray", self.ray is not None), ("--first-seed", self.first_seed != 0),
            )  # fmt: skip
            unused = [name for name, is_given in given if is_given]
            if unused:
                raise ConfigError(
                    f"{', '.join(unused)} must be left out with {self.source}: its runs really train, one after another "
                    "on this computer, in fixed orders of the traffic"
                )
        elif self.data is not None:
            raise ConfigError(
                f"--data must be left out with {self.source}: nothing is trained there; it is for live replays"
            )


def run_replay(options: ReplayOptions, console: Console) -> dict[str, Any]:
    """Run the replay, print its tables, write what was asked for; returns the report.

    Raises: ConfigError for arguments, scenarios and logs that are not usable.
    """
    chosen = variants(_policies(options), parse_sweep(options.sweep))
    if options.suggest is not None:
        check_ranked(v.policy for v in chosen)
    if options.source in CHECKS:
        return _check(options, chosen, console)
    if options.source in LIVE:
        report, rows = _live(options, chosen, console)
    elif options.source.endswith((".jsonl", ".log")):
        report, rows = _logged(options, chosen, console)
    else:
        report, rows = _synthetic(options, chosen, console)
    print_report(report, console)
    if options.json is not None:
        write_json(options.json, report)
    if options.html is not None:
        write_html(report, options.html)
    if options.parquet is not None or options.tensorboard is not None:
        frames = frames_of(report, rows)
        if options.parquet is not None:
            frames.write_parquet(options.parquet)
        if options.tensorboard is not None:
            frames.write_tensorboard(options.tensorboard)
            line = f"written: {options.tensorboard} (tensorboard --logdir {options.tensorboard})"
            console.print(line, highlight=False, markup=False)
    if options.suggest is not None:
        for line in write_suggestion(report, options.suggest):
            console.print(line, highlight=False, markup=False)
        console.print(
            f"written: {options.suggest} (paceline serve --config {options.suggest})", highlight=False, markup=False
        )
    return report


def _policies(options: ReplayOptions) -> tuple[str, ...]:
    """The policies that are to run; plans of hindsight that nobody named are left out where there can be none."""
    names = policy_names(options.policies)
    is_named = options.policies.strip() not in (USUAL, "all")
    if is_named or options.source not in (*LIVE, *CHECKS):
        return names
    return tuple(name for name in names if name not in HINDSIGHT)


def _check(options: ReplayOptions, chosen: list[Variant], console: Console) -> dict[str, Any]:
    from paceline.bench.replay.off_policy import KEEP, print_check, run_check, run_live_check

    if any(v.policy in HINDSIGHT for v in chosen):
        raise ConfigError("policies must not name 'oracle' or 'bound' here: no log says what it would have done")
    if options.seeds < 2:
        raise ConfigError(f"seeds must be >= 2 logs, got {options.seeds}")
    if any(out is not None for out in (options.html, options.suggest, options.parquet, options.tensorboard)):
        raise ConfigError(
            "html and suggest are not written for off-policy checks, nor are parquet and tensorboard; use --json"
        )
    if options.ray is not None:
        raise ConfigError("ray is not used by off-policy checks; use --workers")
    if options.source == "off-policy-live":
        found = run_live_check(chosen, options.seeds, cache=options.resume, data=options.data, console=console)
    elif options.resume is not None or options.data is not None:
        raise ConfigError("resume and data concern off-policy-live only")
    else:
        first = options.first_seed
        found = run_check(chosen, options.seeds, workers=options.workers, console=console, first_seed=first)
    print_check(found, console)
    report = {"format": FORMAT, "kind": options.source, "num_logs": options.seeds, "keep": KEEP, "policies": found}
    if options.json is not None:
        write_json(options.json, report)
    return report


Reported = tuple[dict[str, Any], list[Row]]
"""(report, the runs that it is made of)."""


def _synthetic(options: ReplayOptions, chosen: list[Variant], console: Console) -> Reported:
    cells = read_scenarios(options.source)
    return replay_cells(
        cells, chosen, source=options.source, seeds=range(options.first_seed, options.first_seed + options.seeds),
        workers=options.workers, resume=options.resume, console=console, ray_address=options.ray,
    )  # fmt: skip


def replay_cells(
    cells: Sequence[Cell], chosen: Sequence[Variant], *, source: str, seeds: range, console: Console, workers: int = 1,
    resume: Path | None = None, ray_address: str | None = None,
) -> Reported:  # fmt: skip
    """Run every variant on every cell and seed.

    Raises: ConfigError for a --resume folder or a cluster that is not usable.
    """
    tasks = plan(cells, chosen, len(seeds), seeds.start)
    rows = run_all(tasks, workers=workers, resume=resume, console=console, ray_address=ray_address)
    scenarios = [describe(c) for c in cells]
    return build_report(rows, kind="synthetic", source=source, scenarios=scenarios, notes=_notes(rows)), rows


def _notes(rows: list[Row], where: str = "in the same world") -> list[str]:
    """`where`: what the plans of hindsight are carried out in."""
    notes = []
    served = {r["cell"] for r in rows if r["never_s"] > 0}
    idle = sorted({r["cell"] for r in rows} - served)
    if idle:
        notes.append(f"nothing was served in {', '.join(idle)}, so the net there is 0; more load or a longer duration tells policies apart")  # fmt: skip
    broken = sorted({f"{r['cell']} {r['label']} seed {r['seed']}: {c}" for r in rows for c in r["contradictions"][:1]})
    if broken:
        notes.append(f"ledger and decisions contradict each other in {len(broken)} runs, first: {broken[0]}")
    if any(r["policy"] == ORACLE for r in rows):
        notes.append(f"oracle: the best plan that was found with knowledge of the future, carried out {where}")
    if any(r["policy"] == BOUND for r in rows):
        notes.append(
            f"bound: more than any plan can save {where} (no forgetting, free recalls, jobs at the same time); the best plan lies between oracle and bound"
        )
    return notes


def _logged(options: ReplayOptions, chosen: list[Variant], console: Console) -> Reported:
    service = prepare(read_log(Path(options.source)), Path(options.source).stem)
    scenario = service.scenario
    run = partial(run_all, workers=options.workers, console=console, ray_address=options.ray)
    tasks = plan([scenario], chosen, options.seeds, options.first_seed)
    rows = run(tasks, resume=options.resume, run_one=partial(run_logged, service=service))
    plans = [Task(scenario=scenario, variant=v, seed=0) for v in chosen if v.policy not in HINDSIGHT]
    estimates = run(plans, resume=None, run_one=partial(run_off_policy, service=service), title="off-policy")
    model = "by the gain model alone, which the log's own jobs may beat"
    notes = [*service.notes(), _ledger_note(service), *_notes(rows, model)]
    described = {"name": scenario.name, "duration_s": scenario.duration_s, "step_s": scenario.step_s}
    report = build_report(
        rows, kind="logged", source=options.source, scenarios=[described], notes=notes,
        off_policy=[_off_policy_row(r) for r in estimates],
    )  # fmt: skip
    return report, rows


def _ledger_note(service: LoggedService) -> str:
    """The ledger of the log beside a replay that does what the log did: how far the replay's model can be trusted."""
    booked, replayed = fold_entries(service.log.entries), follow_log(service)
    spent, saved = sum(replayed.spent.values()), replayed.never_s - replayed.serving_s
    low, high = booked.saved_interval_s()
    return (
        f"the log's ledger: spent {booked.spent_s():.1f} s, saved {booked.saved_s():.1f} s (95% {low:.1f} .. {high:.1f}); "
        f"a replay that does what the log did: spent {spent:.1f} s, saved {saved:.1f} s"
    )


def _live(options: ReplayOptions, chosen: list[Variant], console: Console) -> Reported:
    if any(v.policy in HINDSIGHT for v in chosen):
        raise ConfigError("policies must not name 'oracle' or 'bound' in a live replay: what training would bring is not known there")  # fmt: skip
    if options.service is not None:
        from paceline.bench.replay.served import run_served

        rows, scenarios, notes = run_served(
            chosen, options.service, model=options.model, num_seeds=options.seeds, cache=options.resume, console=console,
            drafter=options.drafter,
        )  # fmt: skip
    else:
        from paceline.bench.replay.live import SMALL, LiveConfig, run_live

        rows, scenarios, notes = run_live(
            chosen, config=SMALL if options.source == "live-small" else LiveConfig(), num_orders=options.seeds, data=options.data,
            cache=options.resume, console=console, load=options.load,
        )  # fmt: skip
    found = build_report(rows, kind="live", source=options.source, scenarios=scenarios, notes=[*notes, *_notes(rows)])
    return found, rows


def run_logged(task: Task, service: LoggedService) -> Row:
    """One run as plain values."""
    result = replay_logged(service, task.variant.policy, dict(task.variant.settings), task.seed)
    return row_of(task, msgspec.to_builtins(result))


def run_off_policy(task: Task, service: LoggedService) -> Row:
    """One policy's estimate as plain values."""
    found = value_policy(service, task.variant.policy, dict(task.variant.settings), seed=task.seed)
    return row_of(task, msgspec.to_builtins(found))


def _off_policy_row(r: Row) -> dict[str, Any]:
    """What the report says about a policy without hindsight; docs/policies.md names the fields."""
    return {
        "label": r["label"], "policy": r["policy"], "settings": r["settings"], "verdict": r["verdict"], "why": r["why"],
        **{k: None if v is None else round(v, 3) for k, v in r["net"].items()},
        "mean_s": round(r["net"]["total_s"] / max(r["num_decisions"], 1), 4),
        "num_decisions": r["num_decisions"], "logged_s": round(r["logged_s"], 3), "num_missed": r["num_missed"],
    }  # fmt: skip
