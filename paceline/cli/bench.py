"""Bench commands: `paceline bench ...`, measurements whose arms alternate in one run and whose ratios have intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console

from paceline.cli.options import command

if TYPE_CHECKING:
    from paceline.bench.common.summary import SummaryOptions
    from paceline.bench.drafters.compare import CompareOptions
    from paceline.bench.drafters.curves import CurvesOptions
    from paceline.bench.drafters.run import DraftersCommand
    from paceline.bench.engine.run import EngineCommand
    from paceline.bench.engine.soak import SoakOptions
    from paceline.bench.serve.load import StreamLoadOptions
    from paceline.bench.serve.run import ServeBenchOptions
    from paceline.bench.shadow.check import ShadowCheckOptions
    from paceline.bench.shapes.kernels import KernelBenchOptions
    from paceline.bench.shapes.run import DrafterShapesOptions
    from paceline.infra.replica.feedback_cost import FeedbackCostOptions

bench_app = typer.Typer(
    help="Measure speed: arms alternate in one run, ratios come with intervals.", no_args_is_help=True
)


@command(bench_app, "drafters", "paceline.bench.drafters.run:DraftersCommand")
def bench_drafters(options: DraftersCommand, console: Console) -> bool:
    """Compare drafters and policies: acceptance length, speedup over plain, drafting cost."""
    from paceline.bench.drafters.run import run_bench_drafters
    from paceline.bench.drafters.table import lossless_counts

    return bool(lossless_counts(run_bench_drafters(options.chosen(), console))["num_mismatches"])


@command(bench_app, "compare", "paceline.bench.drafters.compare:CompareOptions")
def bench_compare(options: CompareOptions, console: Console) -> bool:
    """Compare a second result of `bench drafters` or `bench engine` with a first one."""
    from paceline.bench.drafters.compare import run_compare

    return bool(run_compare(options, console)["failed"])


@command(bench_app, "curves", "paceline.bench.drafters.curves:CurvesOptions")
def bench_curves(options: CurvesOptions, console: Console) -> None:
    """Show the learning curves of drafter folders that `train-drafter` wrote."""
    from paceline.bench.drafters.curves import run_bench_curves

    run_bench_curves(options.drafters, options.html, console)


@command(bench_app, "engine", "paceline.bench.engine.run:EngineCommand")
def bench_engine(options: EngineCommand, console: Console) -> bool:
    """Measure the engine, and whether speculation ever costs speed."""
    if options.shapes is not None:
        from paceline.bench.engine.shapes import run_shapes

        run_shapes(options.shapes_options(), console)
        return False
    from paceline.bench.engine.run import run_engine_bench

    summary = run_engine_bench(options.chosen(), console)["summary"]
    return summary["verdict"] == "violated" or bool(summary["num_mismatches"])


@command(bench_app, "soak", "paceline.bench.engine.soak:SoakOptions")
def bench_soak(options: SoakOptions, console: Console) -> bool:
    """Look for leaks of the engine under random traffic."""
    from paceline.bench.engine.soak import run_soak

    return run_soak(options, console)["verdict"] in ("failed", "leaks")


@command(bench_app, "streams", "paceline.bench.serve.load:StreamLoadOptions")
def bench_streams(options: StreamLoadOptions, console: Console) -> bool:
    """Watch what N concurrent streaming clients of an OpenAI-compatible server see."""
    from paceline.bench.serve.load import has_failed, run_stream_load

    return has_failed(run_stream_load(options, console))


@command(bench_app, "serve", "paceline.bench.serve.run:ServeBenchOptions")
def bench_serve(options: ServeBenchOptions, console: Console) -> bool:
    """Measure the speed of a server under closed and open loads."""
    from paceline.bench.serve.run import has_failed, run_serve_bench

    return has_failed(run_serve_bench(options, console))


@command(bench_app, "shadow", "paceline.bench.shadow.check:ShadowCheckOptions")
def bench_shadow(options: ShadowCheckOptions, console: Console) -> bool:
    """Compare shadow scores with real decoding."""
    from paceline.bench.shadow.check import run_shadow_check

    return not run_shadow_check(options, console)["passed"]


@command(bench_app, "feedback", "paceline.infra.replica.feedback_cost:FeedbackCostOptions")
def bench_feedback(options: FeedbackCostOptions, console: Console) -> None:
    """Measure what feedback and feature traces cost."""
    from paceline.infra.replica.feedback_cost import run_feedback_cost

    run_feedback_cost(options, console)


@command(bench_app, "kernels", "paceline.bench.shapes.kernels:KernelBenchOptions")
def bench_kernels(options: KernelBenchOptions, console: Console) -> None:
    """Measure each kernel, and how near it comes to the memory's speed."""
    from paceline.bench.shapes.kernels import run_bench_kernels

    run_bench_kernels(options, console)


@command(bench_app, "shapes", "paceline.bench.shapes.run:DrafterShapesOptions")
def bench_shapes(options: DrafterShapesOptions, console: Console) -> None:
    """Count what drafting costs at the size of an 8B target."""
    from paceline.bench.shapes.run import run_drafter_shapes

    run_drafter_shapes(options, console)


@command(bench_app, "summary", "paceline.bench.common.summary:SummaryOptions")
def bench_summary(options: SummaryOptions, console: Console) -> None:
    """Reduce a result to its estimates, intervals and counts."""
    from paceline.bench.common.summary import run_summary

    run_summary(options, console)
