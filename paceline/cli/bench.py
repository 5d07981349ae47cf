"""Bench commands: `paceline bench ...`, measurements whose arms alternate in one run and whose ratios have intervals."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console

from paceline.cli.options import command

bench_app = typer.Typer(
    help="Measure speed: arms alternate in one run, ratios come with intervals.", no_args_is_help=True
)
COMMANDS = {
    "drafters": (
        "Compare drafters and policies: acceptance length, speedup over plain, drafting cost.",
        "bench.drafters.run:DraftersCommand:run_command",
    ),
    "compare": (
        "Compare a second result of `bench drafters` or `bench engine` with a first one.",
        "bench.drafters.compare:CompareOptions:run_compare",
    ),
    "curves": (
        "Show the learning curves of drafter folders that `train-drafter` wrote.",
        "bench.drafters.curves:CurvesOptions:run_bench_curves",
    ),
    "engine": (
        "Measure the engine, and whether speculation ever costs speed.",
        "bench.engine.run:EngineCommand:run_command",
    ),
    "soak": ("Look for leaks of the engine under random traffic.", "bench.engine.soak:SoakOptions:run_soak"),
    "streams": (
        "Watch what N concurrent streaming clients of an OpenAI-compatible server see.",
        "bench.serve.load:StreamLoadOptions:run_stream_load",
    ),
    "serve": (
        "Measure the speed of a server under closed and open loads.",
        "bench.serve.run:ServeBenchOptions:run_serve_bench",
    ),
    "chaos": (
        "Let faults happen to a service under load, and see whether anything is lost.",
        "bench.chaos.run:ChaosOptions:run_chaos",
    ),
    "fuzz": (
        "Send a server what nobody should send, and see whether it takes it.",
        "bench.serve.fuzz:FuzzOptions:run_fuzz",
    ),
    "peers": (
        "Compare servers of several projects on the same weights over HTTP.",
        "bench.peers.run:PeersOptions:run_peers",
    ),
    "shadow": ("Compare shadow scores with real decoding.", "bench.shadow.check:ShadowCheckOptions:run_shadow_check"),
    "learner": (
        "Compare a learner with a job of epochs on the same text.",
        "bench.shadow.learning:LearnerOptions:run_learner_bench",
    ),
    "budgets": (
        "Show acceptance length over draft nodes by exact replay, without a clock.",
        "bench.shadow.budgets:BudgetsOptions:run_budgets",
    ),
    "control": (
        "Measure how many replicas one controller carries.",
        "infra.replica.control_cost:ControlCostOptions:run_control_cost",
    ),
    "feedback": (
        "Measure what feedback and feature traces cost.",
        "infra.replica.feedback_cost:FeedbackCostOptions:run_feedback_cost",
    ),
    "classes": (
        "Measure requests without a bucket in classes against named buckets and one for all.",
        "bench.engine.classes:ClassBenchOptions:run_class_bench",
    ),
    "versions": (
        "Measure rounds whose requests draft with versions of their own, as deltas and as whole weights.",
        "bench.engine.versions:VersionBenchOptions:run_version_bench",
    ),
    "kernels": (
        "Measure each kernel, and how near it comes to the memory's speed.",
        "bench.shapes.kernels:KernelBenchOptions:run_bench_kernels",
    ),
    "forward": (
        "Measure the CPU's compiled forward against the memory's speed.",
        "bench.shapes.forward:ForwardOptions:run_forward_bench",
    ),
    "shapes": (
        "Count what drafting costs at the size of an 8B target.",
        "bench.shapes.run:DrafterShapesOptions:run_drafter_shapes",
    ),
    "summary": ("Reduce a result to its estimates, intervals and counts.", "bench.common.summary:SummaryOptions:run_summary"),
}  # fmt: skip
"""Command -> its help, and 'module:record:function'; the module's `has_failed`, if it has one, makes the exit code 1."""


def _runner(module: str, function: str) -> Callable[[Any, Console], bool]:
    def run(options: Any, console: Console) -> bool:
        found = importlib.import_module(module)
        document = getattr(found, function)(options, console)
        return bool(hasattr(found, "has_failed") and found.has_failed(document))

    return run


for _name, (_help, _place) in COMMANDS.items():
    _module, _record, _function = f"paceline.{_place}".split(":")
    _run = _runner(_module, _function)
    _run.__doc__ = _help
    command(bench_app, _name, f"{_module}:{_record}")(_run)
