"""Checkouts: this checkout's engine against another one's, by tree policy, on the same groups of requests in turn.

`python tests/helpers/checkouts.py --old CHECKOUT --out FILE` runs groups of every cell (drafter, bucket, batch size,
temperature); FILE gets a JSON line a group, and a run goes on where FILE ends. All arms of a checkout are engines of one
process, which waits while the other runs; the arms of a group run behind each other, another one begins each time.
A process is several per cent faster or slower than its like for as long as it lives. So policies of two checkouts are
compared over plain decoding in their own process; to compare plain decoding itself, --restart begins new processes every so
many groups. At the end, or with --show alone: ratios with 95% intervals over groups, and their geometric means.
CLOCK=cpu counts the thread's own seconds, for machines that others use too.
"""

from __future__ import annotations

import argparse
import dataclasses
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


def module(*names: str) -> Any:
    """The first of these modules that can be imported: folders differ between versions."""
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return importlib.import_module(names[-1])


class Engines:
    """What a process of one checkout answers: engines of one drafter by arm, groups that run through them."""

    def __init__(self) -> None:
        self.arms: dict[str, Any] = {}
        self.prompts: dict[str, list] = {}

    def build(self, drafter: str, arms: list[str], max_batch: int, max_tokens: int) -> dict:
        from paceline.config import EngineConfig, TreeConfig
        from paceline.contracts import Group

        self.loading = module("paceline.bench.common.engine_run", "paceline.bench.engine_run")
        self.bench = module("paceline.bench.engine.arms", "paceline.bench.engine_arms")
        self.arms = {}
        self.target = target = self.loading.load_target("bundled", drafters=[drafter])
        config = EngineConfig(max_running=max_batch, max_waiting=max(256, 4 * max_batch), prefix_caching=False)
        pages = -(-(1024 + max_tokens + 17) // config.page_tokens)
        num_tokens = (max_batch + 1) * pages * config.page_tokens // (3 if max_batch > 8 else 1)
        for arm in arms:
            own = None if arm == "plain" else self.loading.load_named_drafter(drafter, target)
            nodes = arm.removeprefix("fixed")
            tree = TreeConfig(max_draft_tokens=int(nodes), policy="fixed") if nodes.isdigit() else TreeConfig()
            if own is not None and not nodes.isdigit():
                tree = TreeConfig(policy=arm)
            engine = self.bench.new_engine(
                target, own, version=drafter if own else arm, num_tokens=num_tokens,
                config=dataclasses.replace(config, tree=tree),
            )  # fmt: skip
            self.arms[arm] = self.bench.EngineArm(arm, engine, Group.ADAPTIVE if own else Group.PLAIN)
        return {}

    def run(
        self, arm: str, bucket: str, first: int, count: int, batch: int, temperature: float, max_tokens: int
    ) -> dict:
        workloads = module("paceline.bench.common.workloads", "paceline.bench.workloads")
        request = module("paceline.serving.sampling.request", "paceline.serving.request")
        names = bucket.split("+")
        if bucket not in self.prompts:
            texts = [[p.text for p in workloads.load_prompts(name, None, 240, 0)] for name in names]
            in_turn = [text for texts_in_turn in zip(*texts, strict=False) for text in texts_in_turn]
            self.prompts[bucket] = [tuple(self.loading.encode(self.target, text)) for text in in_turn]
        pool = self.prompts[bucket]
        buckets = tuple(names[(first + i) % len(names)] for i in range(count)) if len(names) > 1 else ()
        params = [
            request.SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=first + i) for i in range(count)
        ]
        timing = self.arms[arm].run(
            self.bench.BenchGroup(
                tag=f"{bucket}-{batch}-{temperature:g}-{first}", bucket=bucket, batch=batch, params=tuple(params),
                prompts=tuple(pool[(first + i) % len(pool)] for i in range(count)), buckets=buckets,
            )
        )  # fmt: skip
        return {"seconds": timing.seconds, "tokens": timing.num_tokens}


def answer_commands() -> None:
    """The process of one checkout: a JSON line of a command in, one of its answer out."""
    if os.environ.get("CLOCK") == "cpu":
        time.perf_counter = time.thread_time  # the engines' clock, too
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print
    engines = Engines()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        out.write(json.dumps(getattr(engines, name)(**arguments)) + "\n")
        out.flush()


class Checkout:
    """A process of one checkout."""

    def __init__(
        self, folder: Path, threads: int, drafter: str, arms: list[str], max_batch: int, max_tokens: int
    ) -> None:
        env = {**os.environ, "PYTHONPATH": str(folder.resolve()), "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, HERE, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=folder,
        )
        self.ask("build", drafter=drafter, arms=arms, max_batch=max_batch, max_tokens=max_tokens)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

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
    for drafter in o.drafters:
        cells = [(drafter, b, n, t) for b in o.buckets for n in o.batches for t in o.temperatures]
        order = [(c, g) for g in range(o.warmup + o.groups) for c in cells if (*c, g) not in done]
        sides: dict[str, Checkout] = {}
        for at, ((_, bucket, batch, temperature), group) in enumerate(order):
            if not sides or (o.restart and at % o.restart == 0):
                for process in sides.values():
                    process.close()
                sides = {
                    side: Checkout(
                        o.old if side == "old" else HERE.parents[2], o.threads, drafter,
                        [arm[4:] for arm in o.arms if arm.startswith(side)], max(o.batches), o.max_tokens,
                    )
                    for side in sorted({arm[:3] for arm in o.arms})
                }  # fmt: skip
            turn, found = group % len(o.arms), {}
            for side, arm in (name.split("/") for name in o.arms[turn:] + o.arms[:turn]):
                found[f"{side}/{arm}"] = sides[side].ask(
                    "run", arm=arm, bucket=bucket, first=group * sizes[batch], count=sizes[batch], batch=batch,
                    temperature=temperature, max_tokens=o.max_tokens,
                )  # fmt: skip
            row = {"cell": [drafter, bucket, batch, temperature], "group": group, "is_counted": group >= o.warmup}
            with o.out.open("a") as file:
                file.write(json.dumps({**row, "arms": found}) + "\n")
            rates = "  ".join(f"{name} {v['tokens'] / v['seconds']:.0f}" for name, v in found.items())
            print(f"{drafter} {bucket} batch {batch} T={temperature:g} group {group}: {rates} tok/s", flush=True)
        for process in sides.values():
            process.close()


def show(file: Path) -> None:
    """Ratios of tokens per second, by cell and over all: every arm that both checkouts ran, new over old (policies: over
    plain in their own process), and new/adaptive over fixed8 and over the better of plain and fixed8, which is picked anew
    in every resample."""
    from paceline.bootstrap import interval

    cells, logs = defaultdict(list), defaultdict(list)
    for row in map(json.loads, file.read_text().splitlines()):
        if row["is_counted"]:
            cells[tuple(row["cell"])].append(row["arms"])
    rng = np.random.default_rng(0)
    for cell, groups in sorted(cells.items()):
        picks = np.vstack([np.arange(len(groups)), rng.integers(len(groups), size=(4000, len(groups)))])
        rates = {
            name: np.divide(*(np.array([g[name][k] for g in groups])[picks].sum(1) for k in ("tokens", "seconds")))
            for name in groups[0]
        }
        ratios = {}
        for name in sorted({name[4:] for name in rates if {f"old/{name[4:]}", f"new/{name[4:]}"} <= rates.keys()}):
            ratios[f"{name} over old"] = rates[f"new/{name}"] / rates[f"old/{name}"]
            if name != "plain" and {"old/plain", "new/plain"} <= rates.keys():  # the luck of both processes cancels
                ratios[f"{name} over old"] *= rates["old/plain"] / rates["new/plain"]
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
    parser.add_argument(
        "--buckets",
        type=lambda s: s.split(","),
        default=["tools", "code", "math"],
        help="A+B: requests of both in turn",
    )
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64])
    parser.add_argument("--temperatures", type=lambda s: [float(t) for t in s.split(",")], default=[0.0])
    parser.add_argument(
        "--arms", type=lambda s: s.split(","), default=["old/plain", "old/adaptive", "new/plain", "new/fixed8", "new/adaptive"],
        help="old/ or new/ and plain, a tree policy or fixedN",
    )  # fmt: skip
    parser.add_argument("--groups", type=int, default=12, help="groups of a cell that count")
    parser.add_argument("--warmup", type=int, default=2, help="first groups of a cell, which do not count")
    parser.add_argument("--restart", type=int, default=0, help="new processes every so many groups; 0 = never")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    o = parser.parse_args()
    if o.worker:
        answer_commands()
    elif o.show:
        show(o.show)
    elif o.out and (o.old or not any(arm.startswith("old/") for arm in o.arms)):
        measure(o)
        show(o.out)
    else:
        parser.error("--old CHECKOUT --out FILE, or --show FILE")


if __name__ == "__main__":
    main()
