"""Checkouts: this checkout's engine against another one's, by tree policy, on the same groups of requests in turn.

`python tests/helpers/checkouts.py --old CHECKOUT --out FILE` runs groups of every cell (drafter, bucket, batch size,
temperature); FILE gets a JSON line a group, and a run goes on where FILE ends. Every arm has a process of its own, so that all
have the same memory, and waits while others run; the arms of a group run behind each other, another one begins each time. At the end, or with
--show alone, every cell's ratios with 95% intervals over groups, and their geometric mean.
CLOCK=cpu counts the thread's own seconds, for machines that others use too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve()
WARMUP = 2
"""First groups of a cell, which are not counted."""


def module(*names: str) -> Any:
    """The first of these modules that can be imported: folders differ between versions."""
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return importlib.import_module(names[-1])


class Engine:
    """What a process answers: it builds the engine of its arm with a drafter, and runs groups through it."""

    def __init__(self) -> None:
        self.arm: Any = None
        self.prompts: dict[str, list] = {}

    def build(self, arm: str, drafter: str, max_batch: int, max_tokens: int) -> dict:
        from paceline.config import EngineConfig, TreeConfig
        from paceline.contracts import Group

        self.loading = module("paceline.bench.common.engine_run", "paceline.bench.engine_run")
        self.bench = module("paceline.bench.engine.arms", "paceline.bench.engine_arms")
        self.arm = None
        self.target = target = self.loading.load_target("bundled", drafters=[drafter])
        own = None if arm == "plain" else self.loading.load_named_drafter(drafter, target)
        nodes, tree = arm.removeprefix("fixed"), TreeConfig()
        if nodes.isdigit():
            tree = TreeConfig(max_draft_tokens=int(nodes), policy="fixed")
        elif own is not None:
            tree = TreeConfig(policy=arm)
        config = EngineConfig(
            max_running=max_batch, max_waiting=max(256, 4 * max_batch), prefix_caching=False, tree=tree
        )
        pages = -(-(1024 + max_tokens + 17) // config.page_tokens)
        num_tokens = (max_batch + 1) * pages * config.page_tokens // (3 if max_batch > 8 else 1)
        version = drafter if own else arm
        engine = self.bench.new_engine(target, own, version=version, num_tokens=num_tokens, config=config)
        self.arm = self.bench.EngineArm(arm, engine, Group.ADAPTIVE if own else Group.PLAIN)
        return {}

    def run(self, bucket: str, first: int, count: int, batch: int, temperature: float, max_tokens: int) -> dict:
        workloads = module("paceline.bench.common.workloads", "paceline.bench.workloads")
        request = module("paceline.serving.sampling.request", "paceline.serving.request")
        if bucket not in self.prompts:
            texts = [p.text for p in workloads.load_prompts(bucket, None, 240, 0)]
            self.prompts[bucket] = [tuple(self.loading.encode(self.target, text)) for text in texts]
        pool = self.prompts[bucket]
        params = [
            request.SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=first + i) for i in range(count)
        ]
        timing = self.arm.run(
            self.bench.BenchGroup(
                tag=f"{bucket}-{batch}-{temperature:g}-{first}", bucket=bucket, batch=batch, params=tuple(params),
                prompts=tuple(pool[(first + i) % len(pool)] for i in range(count)),
            )
        )  # fmt: skip
        return {"seconds": timing.seconds, "tokens": timing.num_tokens}


def answer_commands() -> None:
    """The process of one arm: a JSON line of a command in, one of its answer out."""
    if os.environ.get("CLOCK") == "cpu":
        time.perf_counter = time.thread_time  # the engines' clock, too
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print
    engine = Engine()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        out.write(json.dumps(getattr(engine, name)(**arguments)) + "\n")
        out.flush()


class Arm:
    """A process of one checkout and tree policy."""

    def __init__(self, folder: Path, threads: int) -> None:
        env = {**os.environ, "PYTHONPATH": str(folder.resolve()), "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, HERE, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=folder,
        )

    def ask(self, name: str, **arguments: Any) -> dict:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline() or sys.exit(f"the process of {name} {arguments} has died"))


def measure(o: argparse.Namespace) -> None:
    """Run what FILE lacks."""
    lines = o.out.read_text().splitlines() if o.out.exists() else []
    done = {tuple(json.loads(line)["cell"]) + (json.loads(line)["group"],) for line in lines}
    sizes = {batch: max(4, 2 * batch if batch < 64 else batch) for batch in o.batches}
    arms = {name: Arm(o.old if name.startswith("old") else HERE.parents[2], o.threads) for name in o.arms}
    for drafter in o.drafters:
        cells = [(drafter, b, n, t) for b in o.buckets for n in o.batches for t in o.temperatures]
        order = [(c, g) for g in range(WARMUP + o.groups) for c in cells if (*c, g) not in done]
        if not order:
            continue
        for name, arm in arms.items():
            arm.ask("build", arm=name[4:], drafter=drafter, max_batch=max(o.batches), max_tokens=o.max_tokens)
        for (_, bucket, batch, temperature), group in order:
            turn, found = group % len(o.arms), {}
            for name in o.arms[turn:] + o.arms[:turn]:
                found[name] = arms[name].ask(
                    "run", bucket=bucket, first=group * sizes[batch], count=sizes[batch], batch=batch,
                    temperature=temperature, max_tokens=o.max_tokens,
                )  # fmt: skip
            with o.out.open("a") as file:
                file.write(
                    json.dumps({"cell": [drafter, bucket, batch, temperature], "group": group, "arms": found}) + "\n"
                )
            rates = "  ".join(f"{name} {v['tokens'] / v['seconds']:.0f}" for name, v in found.items())
            print(f"{drafter} {bucket} batch {batch} T={temperature:g} group {group}: {rates} tok/s", flush=True)


def show(file: Path) -> None:
    """Ratios of tokens per second, by cell and over all: every arm that both checkouts ran, new over old, and new/adaptive
    over fixed8 and over the better of plain and fixed8, which is picked anew in every resample."""
    from paceline.bootstrap import interval

    cells, logs = defaultdict(list), defaultdict(list)
    for row in map(json.loads, file.read_text().splitlines()):
        if row["group"] >= WARMUP:
            cells[tuple(row["cell"])].append(row["arms"])
    rng = np.random.default_rng(0)
    for cell, groups in sorted(cells.items()):
        picks = np.vstack([np.arange(len(groups)), rng.integers(len(groups), size=(4000, len(groups)))])
        rates = {
            name: np.divide(*(np.array([g[name][k] for g in groups])[picks].sum(1) for k in ("tokens", "seconds")))
            for name in groups[0]
        }
        ratios = {
            f"{n[4:]} over old": rates[n] / rates["old" + n[3:]]
            for n in rates
            if "old" + n[3:] in rates and n[:3] == "new"
        }
        if {"new/adaptive", "new/plain", "new/fixed8"} <= rates.keys():
            ratios["adaptive over fixed8"] = rates["new/adaptive"] / rates["new/fixed8"]
            ratios["over the better"] = rates["new/adaptive"] / np.maximum(rates["new/plain"], rates["new/fixed8"])
        text = f"{cell[0]} {cell[1]} batch {cell[2]} T={cell[3]:g}"
        text = f"{text:34}{len(groups):3} groups"
        for name, over in ratios.items():
            logs[name].append(np.log(over))
            text += f"  {name} {over[0]:.3f} {interval(over[0], over[1:], len(groups), is_positive=True, digits=3)}"
        print(text)
    for name, own in logs.items():
        mean = np.exp(np.mean(own, axis=0))
        ends = interval(mean[0], mean[1:], len(groups), is_positive=True, digits=3)
        print(f"{name}, geometric mean of {len(own)} cells: {mean[0]:.3f} {ends}")


def numbers(text: str) -> list[int]:
    """Of "1,8,64"."""
    return [int(n) for n in text.split(",")]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--old", type=Path, help="folder of the other checkout")
    parser.add_argument("--out", type=Path, help="JSON lines, one a group")
    parser.add_argument("--show", type=Path, help="print the table of such a file; nothing runs")
    parser.add_argument("--drafters", type=lambda s: s.split(","), default=["specblock", "dflash", "suffix"])
    parser.add_argument("--buckets", type=lambda s: s.split(","), default=["tools", "code", "math"])
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64])
    parser.add_argument("--temperatures", type=lambda s: [float(t) for t in s.split(",")], default=[0.0])
    parser.add_argument(
        "--arms", type=lambda s: s.split(","), default=["old/adaptive", "new/plain", "new/fixed8", "new/adaptive"],
        help="old/ or new/ and plain, a tree policy or fixedN",
    )  # fmt: skip
    parser.add_argument("--groups", type=int, default=12, help="groups of a cell that count")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    o = parser.parse_args()
    if o.worker:
        answer_commands()
    elif o.show:
        show(o.show)
    elif o.old and o.out:
        measure(o)
        show(o.out)
    else:
        parser.error("--old CHECKOUT --out FILE, or --show FILE")


if __name__ == "__main__":
    main()
