"""Command of the GPU check: `python -m paceline.bench.gpu_check --out DIR`; it needs the standard library only."""

from __future__ import annotations

import argparse
import math
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from paceline.bench.gpu_check.stages import STAGES, SUMMARY, CheckOptions, run_child, run_stages, table

_EPILOG = """\
stages, in this order:
{stages}

Every stage has a process and a part of the budget of its own; one that fails, hangs or runs out of time leaves
what it had, and the next one runs. After each stage DIR/{summary} is replaced whole: it holds everything,
so that one file has to be brought home. Exit code 1: a stage did not end well.

Needed on the machine: Python 3.11 to 3.14, torch with CUDA, triton, transformers, numpy, safetensors and what these
depend on; of the checkout everything but .git. What else is missing is said by the stage `machine`; carry it as
wheels for that machine's Python, in one folder (--wheels; nothing is fetched):
  pip download --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d wheels msgspec pydantic

  python -m paceline.bench.gpu_check --out /tmp/check --wheels wheels       on a GPU, within 9 minutes
  python -m paceline.bench.gpu_check --out /tmp/check --dry-run             small shapes on the CPU, a minute
  python -m paceline.bench.gpu_check --out /tmp/check --stages machine,engine --budget 120

docs/gpu.md says how to read the result."""


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {s.name:<9} {s.share:>4.0f} s  {s.question}" for s in STAGES)
    parser = argparse.ArgumentParser(
        prog="python -m paceline.bench.gpu_check",
        description="Find out on a GPU what runs, whether it is right and how fast it is, in a few minutes.",
        epilog=_EPILOG.format(stages=listed, summary=SUMMARY),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"folder for {SUMMARY}; made if it is not there")
    parser.add_argument(
        "--budget", type=float, default=540.0, metavar="S", help="seconds for all stages; default: %(default)g"
    )
    parser.add_argument("--stages", metavar="A,B", help="only these; default: all")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="folder of carried wheels that stages import from")
    parser.add_argument("--dry-run", action="store_true", help="the same stages with small shapes on the CPU")
    parser.add_argument("--stage-entry", help=argparse.SUPPRESS)
    parser.add_argument("--stage-imports", nargs="*", default=(), help=argparse.SUPPRESS)
    parser.add_argument("--stage-result", type=Path, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check, or, with --stage-entry, be the process of one stage; the exit code."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.stage_entry:
        return run_child(given.stage_entry, given.stage_imports, given.stage_result, is_dry=given.dry_run)
    if given.out is None:
        parser.error("--out DIR must be given")
    if not 0 < given.budget < math.inf:
        parser.error(f"--budget must be > 0 and finite, got {given.budget:g}")
    if given.wheels is not None and not given.wheels.is_dir():
        parser.error(f"--wheels must be a folder, got {given.wheels}")
    names = [s.name for s in STAGES] if given.stages is None else given.stages.split(",")
    unknown = sorted(set(names) - {s.name for s in STAGES})
    if unknown:
        parser.error(f"--stages must be among {', '.join(s.name for s in STAGES)}, got {', '.join(unknown)}")
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        parser.error(f"--out must be a folder, or one that can be made, got {given.out}: {e.strerror}")
    options = CheckOptions(out=given.out, budget_s=given.budget, is_dry=given.dry_run, wheels=given.wheels)
    chosen = tuple(s for s in STAGES if s.name in names)
    try:
        summary = run_stages(options, chosen, lambda line: print(line, flush=True))
    except zipfile.BadZipFile as e:
        parser.error(f"--wheels must hold whole wheels: {e}; carry them again")
    except OSError as e:
        parser.error(f"nothing can be written to {given.out}: {e.strerror}; name another --out or make room")
    print(f"\n{table(summary)}\n{given.out / SUMMARY}", flush=True)
    return int(any(row["state"] != "done" for row in summary["stages"]))


if __name__ == "__main__":
    sys.exit(main())
