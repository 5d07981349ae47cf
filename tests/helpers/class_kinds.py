"""Class kinds: how well classes tell kinds of prompts apart, by streams of real prompts whose kind is known.

`python -m tests.helpers.class_kinds --model smollm2 --data DIR` takes the vectors of each kind's prompts from an engine, once, and shows
them to a controller's book as they would come: all kinds mixed, some far rarer than others, two at a time by turns, three alone. Of the
requests behind the first minute it prints

- `pure`: those in a class that have the kind of most requests there
- `main`: those of a kind in the class that most of it is in
- `none`: those in no class
- `lost`: kinds of which less than half is in classes that are theirs
"""

from __future__ import annotations

import argparse
import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from paceline.bandit.beliefs.classes import ClassBook
from paceline.bench.common.engine_run import encode, load_target
from paceline.bench.common.workloads import read_questions
from paceline.config import EngineConfig
from paceline.infra.demo.pools import bucket_pools, kind_pools
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.classes import NUM_DIMS
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.engines import Sinks, finish

FEWEST = 60
"""Prompts of a kind, at least."""
Stream = list[tuple[float, str, np.ndarray]]
"""(second, kind, vector) of each request."""


class _Vectors(Sinks):
    def __init__(self) -> None:
        super().__init__()
        self.taken: list[np.ndarray] = []

    def record_prompt(self, space: str, vector: np.ndarray, tenant: str) -> None:
        self.taken.append(vector.copy())


def vectors_of(model: str, data: Path | None, num_prompts: int) -> dict[str, np.ndarray]:
    """Kind -> (n, NUM_DIMS) vectors of its prompts, of the kinds that have FEWEST."""
    target = load_target(model, drafters=["bundled"])
    sinks, found = _Vectors(), {}
    config = EngineConfig(kv_bytes=256 << 20, max_running=8)
    engine = Engine(target, DrafterSlots(), config, feedback=sinks, traces=sinks, prompts=sinks)
    if data is None:
        pools = bucket_pools(("tools", "code", "math", "facts"), None, target.tokenizer)
    else:
        pools = kind_pools(sorted(read_questions(data)), data, target.tokenizer)
    for kind, prompts in pools.items():
        texts = [tuple(encode(target, p.text)) for p in prompts]
        fitting = [t for t in texts if len(t) < target.context_tokens]
        if len(fitting) < FEWEST:
            continue
        for i, tokens in enumerate(random.Random(0).sample(fitting, min(num_prompts, len(fitting)))):
            params = SamplingParams(max_tokens=1)
            engine.submit(
                GenerationRequest(request_id=f"{kind}-{i}", prompt_token_ids=tokens, params=params), lambda e: None
            )
            finish(engine)
        found[kind], sinks.taken = np.array(sinks.taken, float), []
        print(f"{kind}: {len(found[kind])} prompts", flush=True)
    return found


def stream(
    vectors: dict[str, np.ndarray], phases: list[tuple[dict[str, float], float]], rate: float, seed: int
) -> Stream:
    """Requests of phases: (kind -> how often, seconds), `rate` a second."""
    rng, at, now, out = random.Random(seed), Counter[str](), 0.0, []
    order = {kind: rng.sample(range(len(v)), len(v)) for kind, v in vectors.items()}
    for kinds, seconds in phases:
        end = now + seconds
        while now < end:
            (kind,) = rng.choices(list(kinds), list(kinds.values()))
            out.append((now, kind, vectors[kind][order[kind][at[kind] % len(order[kind])]]))
            at[kind] += 1
            now += rng.expovariate(rate)
    return out


def streams(vectors: dict[str, np.ndarray], seed: int) -> dict[str, Stream]:
    """The traffic that is tried."""
    rng, kinds = random.Random(seed), list(vectors)
    turns = rng.sample(kinds, len(kinds)) + rng.sample(kinds, len(kinds))
    rare = {kind: 1 / (i + 1) for i, kind in enumerate(rng.sample(kinds, len(kinds)))}
    pairs = [(dict.fromkeys(turns[i : i + 2], 1.0), 60.0) for i in range(len(turns) - 1)]
    return {
        "mixed": stream(vectors, [(dict.fromkeys(kinds, 1.0), 240.0)], 10.0, seed),
        "rare": stream(vectors, [(rare, 300.0)], 10.0, seed),
        "turns": stream(vectors, pairs, 3.0, seed),
        "three": stream(vectors, [(dict.fromkeys(rng.sample(kinds, 3), 1.0), 300.0)], 2.0, seed),
    }


def sorted_into(requests: Stream) -> list[tuple[float, str, str]]:
    """(second, kind, class or '') of each request, told by what was published before it."""
    book, out, tidied = ClassBook(), [], 0.0
    for now, kind, vector in requests:
        if now - tidied >= 2.0:
            tidied = now
            book.tidy(16, now)
        told, name = book.published, ""
        if told.names:
            away = np.linalg.norm(np.array(told.centroids) - vector, axis=1)
            best = int(away.argmin())
            name = told.names[best] if away[best] <= told.radii[best] else ""
        out.append((now, kind, name))
        book.observe("s", vector.astype("<f4").tobytes(), NUM_DIMS, now)
    return out


def measure(rows: list[tuple[float, str, str]]) -> dict[str, float]:
    """What the module's first lines name, and the numbers of classes and kinds."""
    rows = [row for row in rows if row[0] >= 60.0]
    of_class, of_kind = defaultdict(Counter), defaultdict(Counter)
    for _, kind, name in rows:
        of_kind[kind][name] += 1
        if name:
            of_class[name][kind] += 1
    owner = {name: kinds.most_common(1)[0][0] for name, kinds in of_class.items()}
    own = {kind: sum(n for name, n in c.items() if owner.get(name) == kind) for kind, c in of_kind.items()}
    num_told = sum(sum(kinds.values()) for kinds in of_class.values())
    return {
        "pure": sum(max(kinds.values()) for kinds in of_class.values()) / max(num_told, 1),
        "main": sum(max((n for name, n in c.items() if name), default=0) for c in of_kind.values()) / len(rows),
        "none": 1 - num_told / len(rows),
        "lost": sum(2 * own[kind] < sum(c.values()) for kind, c in of_kind.items()),
        "classes": len(of_class),
        "kinds": len(of_kind),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="bundled", help="target whose hidden states tell prompts apart")
    parser.add_argument("--data", type=Path, default=None, help="folder of text data; default: the bundled prompts")
    parser.add_argument("--prompts", type=int, default=240, help="of each kind, at most")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    vectors = vectors_of(options.model, options.data, options.prompts)
    for name in streams(vectors, 0):
        found = [measure(sorted_into(streams(vectors, seed)[name])) for seed in range(options.seeds)]
        mean = {key: sum(f[key] for f in found) / len(found) for key in found[0]}
        print(name, " ".join(f"{key} {value:.3g}" for key, value in mean.items()), flush=True)


if __name__ == "__main__":
    main()
