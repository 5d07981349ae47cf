"""Table world: a service given by tables instead of formulas, as read from WORLD.json.

Traffic by step and class, learning curves by class and arm, what jobs cost, what they carry to other classes or take from
them, how they fail, and what a round costs. The records below are the format; world.schema.json is made of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from itertools import pairwise
from pathlib import Path
from typing import Annotated as A
from typing import Any

import msgspec
import numpy as np

from paceline.bandit.beliefs.arms import default_arms
from paceline.bandit.beliefs.job_cost import STAGING_PRIOR_S
from paceline.bandit.replay.curves import TableCosts, TableCurves
from paceline.bandit.replay.outcomes import FIRST, GATE_NOISE, HARM, SimulatedOutcomes
from paceline.bandit.replay.scenario import MAX_COUNT, MAX_STEPS, Traffic, check_world
from paceline.errors import ConfigError
from paceline.records import Setting, build, json_schema, record, require

MAX_SECONDS = 1e6
MAX_TOKENS = 1e9
"""Most tokens of a class and step."""
MAX_ROWS = 1_000_000_000
MAX_LENGTH = 64
"""Longest acceptance length that a table may name, tokens a round."""
ARMS = {arm.parameters: arm for arm in default_arms()}
"""Arm in a table -> what it trains; the names of the controller's own ways to train."""

Point = tuple[A[float, Setting(gt=0, le=MAX_ROWS)], A[float, Setting(ge=1, le=MAX_LENGTH)]]
"""(rows, acceptance length behind so many rows)."""
Share = A[float, Setting(ge=0, le=1)]


@record("world.rounds.")
class RoundPrices:
    """What a round costs a request."""

    drafted_s: A[float, Setting(gt=0, le=MAX_SECONDS)]
    """Device-seconds of a round with a draft."""
    plain_s: A[float, Setting(gt=0, le=MAX_SECONDS)]
    """The same without a draft."""
    batch_size: A[int, Setting(ge=1, le=MAX_COUNT)] = 4
    """Requests in a round."""
    slowdown: A[float, Setting(ge=0, le=3)] = 0.05
    """Relative slow-down of rounds while a job runs."""
    staging_s: A[float, Setting(ge=0, le=MAX_SECONDS)] = STAGING_PRIOR_S
    """Device-seconds of making another version live, per replica."""


@record("world.classes.")
class TrafficClass:
    """One kind of text."""

    acceptance_length: A[float, Setting(ge=1, le=MAX_LENGTH)]
    """Of the first drafter, tokens a round."""
    bucket: str = ""
    """Bucket in which the controller sees it; several classes may share one. Default: the name of the class."""
    learned_rows: A[int, Setting(ge=0, le=MAX_ROWS)] = 0
    """Rows of it that the first drafter's manifest names."""
    curves: dict[str, A[tuple[Point, ...], Setting(non_empty=True)]] = field(default_factory=dict)
    """Arm -> points of the learning curve: rows that a learner has read, and the acceptance length that it has then."""


@record("world.jobs.")
class JobTable:
    """What jobs of an arm cost."""

    fixed_s: A[float, Setting(ge=0, le=MAX_SECONDS)]
    """Device-seconds of training without any row."""
    row_s: A[float, Setting(ge=0, le=MAX_SECONDS)]
    """Device-seconds of each row, rehearsal included."""
    scoring_s: A[float, Setting(ge=0, le=MAX_SECONDS)]
    """Device-seconds of scoring without any row."""
    scoring_row_s: A[float, Setting(ge=0, le=MAX_SECONDS)] = 0.0
    """Device-seconds of scoring each row."""
    max_rows: A[int | None, Setting(ge=1, le=MAX_ROWS)] = None
    """Most rows that a job takes; default: those of the controller's arm."""


@record("world.failures.")
class Failures:
    """How jobs go wrong, as shares of all jobs."""

    failed: Share = 0.0
    """Jobs that end without a version; their seconds are spent."""
    harmful: Share = 0.0
    """Jobs that make their class worse and pass the gate."""
    harm: Share = HARM
    """Share of the acceptance length above 1 that a harmful job takes."""


@record("world.noise.")
class Noise:
    """What differs between seeds."""

    gain: A[float, Setting(ge=0, le=1)] = 0.3
    """Relative standard deviation of the rows of its curve that a row of a class is worth, cut at 0.4 and 1.8."""
    cost: A[float, Setting(ge=0, le=1)] = 0.1
    """Standard deviation of the logarithm of its seconds."""
    gate: A[float, Setting(ge=0, le=1)] = GATE_NOISE
    """Standard error of a gain that 32 requests measure, tokens a round."""


@record("world.traffic.")
class Spell:
    """Steps with the same traffic."""

    tokens: dict[str, A[float, Setting(ge=0, le=MAX_TOKENS)]]
    """Class -> tokens to emit in each of these steps."""
    steps: A[int, Setting(ge=1, le=MAX_STEPS)] = 1


Matrix = dict[str, dict[str, Share]]


@record("world.")
class TableWorld:
    """A simulated service by tables."""

    name: A[str, Setting(non_empty=True)]
    traffic: A[tuple[Spell, ...], Setting(non_empty=True)]
    classes: A[dict[str, TrafficClass], Setting(non_empty=True)]
    rounds: RoundPrices
    jobs: A[dict[str, JobTable], Setting(non_empty=True)]
    """Arm (calibration, head or full) -> its costs; the arms that are not here cannot be ordered."""
    format: A[int, Setting(ge=1, le=1)] = 1
    family: str = "tables"
    """Worlds of one family form one line of the advice table."""
    source: str = ""
    """Where the figures come from."""
    step_s: A[float, Setting(gt=0, le=MAX_SECONDS)] = 10.0
    """Seconds of a step."""
    tokens_per_request: A[float, Setting(ge=1, le=MAX_TOKENS)] = 100.0
    num_replicas: A[int, Setting(ge=1, le=MAX_COUNT)] = 1
    """Replicas that a new version is staged on."""
    rows_share: Share = 1.0
    """Share of the tokens that become rows to train on."""
    transfer: Matrix = field(default_factory=dict)
    """Trained class -> other class -> part of the closed share that is closed there too."""
    forgetting: Matrix = field(default_factory=dict)
    """Trained class -> other class -> share of the acceptance length above 1 that endless training costs there."""
    failures: Failures = field(default_factory=Failures)
    noise: Noise = field(default_factory=Noise)

    def __post_init__(self) -> None:
        for name in self.jobs:
            require(name in ARMS, f"world.jobs must name arms among {', '.join(ARMS)}", name)
        for name, own in self.classes.items():
            require(name != "", "world.classes must have names: a swap in the bucket '' is one in all", name)
            for arm, points in own.curves.items():
                path = f"world.classes.{name}.curves"
                require(arm in self.jobs, f"{path} must name arms of world.jobs ({', '.join(self.jobs)})", arm)
                _check_curve(f"{path}.{arm}", own.acceptance_length, points)
        for title in ("transfer", "forgetting"):
            for trained, row in getattr(self, title).items():
                self._check_class(f"world.{title}", trained)
                for other in row:
                    self._check_class(f"world.{title}.{trained}", other)
                    require(other != trained, f"world.{title}.{trained} must name other classes than itself", other)
        for i, spell in enumerate(self.traffic):
            for name in spell.tokens:
                self._check_class(f"world.traffic[{i}].tokens", name)
        bad = self.failures.failed + self.failures.harmful
        require(bad <= 1, "world.failures.failed + world.failures.harmful must be <= 1", bad)
        steps = sum(spell.steps for spell in self.traffic)
        require(4 <= steps <= MAX_STEPS, f"world.traffic must have 4 to {MAX_STEPS} steps in all", steps)
        tokens = sum(spell.steps * sum(spell.tokens.values()) for spell in self.traffic)
        require(tokens >= 1, "world.traffic must hold tokens", tokens)

    def _check_class(self, path: str, name: str) -> None:
        require(name in self.classes, f"{path} must name classes of world.classes ({', '.join(self.classes)})", name)

    @property
    def duration_s(self) -> float:
        """Length of the traffic."""
        return self.step_s * sum(spell.steps for spell in self.traffic)

    def draw(self, seed: int) -> tuple[Traffic, SimulatedOutcomes]:
        """Traffic, which is the table's, and truth, of which the seed draws luck, seconds, failures and the gate's errors.

        Raises: ConfigError for a world that takes too much memory.
        """
        names = list(self.classes)
        check_world(self.name, sum(spell.steps for spell in self.traffic), len(names))
        table = np.array([[spell.tokens.get(n, 0.0) for n in names] for spell in self.traffic])
        tokens = np.repeat(table, [spell.steps for spell in self.traffic], axis=0)
        own = list(self.classes.values())
        first = np.array([c.acceptance_length for c in own])
        tops = [[points[-1][1] for points in c.curves.values()] for c in own]
        ceiling = np.array([max([float(f), *t]) for f, t in zip(first, tops, strict=True)])
        buckets = tuple(c.bucket or name for name, c in self.classes.items())
        learned: dict[str, int] = {}
        for bucket, c in zip(buckets, own, strict=True):
            if c.learned_rows:
                learned[bucket] = learned.get(bucket, 0) + c.learned_rows
        rng, steps = np.random.default_rng([seed, 5]), len(tokens)
        rounds, noise = self.rounds, self.noise
        traffic = Traffic(
            step_s=self.step_s, labels=buckets, tokens=tokens, drafted_s=rounds.drafted_s, plain_s=rounds.plain_s,
            batch_size=rounds.batch_size, tokens_per_request=self.tokens_per_request, num_replicas=self.num_replicas,
            rows_share=self.rows_share,
        )  # fmt: skip
        outcomes = SimulatedOutcomes(
            first=first,
            ceiling=ceiling,
            curves=TableCurves(tuple(_shares(c, top) for c, top in zip(own, ceiling.tolist(), strict=True))),
            costs=TableCosts({n: (j.fixed_s, j.row_s, j.scoring_s, j.scoring_row_s) for n, j in self.jobs.items()}),
            forgetting=_matrix(self.forgetting, names),
            transfer=_matrix(self.transfer, names),
            luck=np.clip(rng.normal(1.0, noise.gain, len(first)), 0.4, 1.8),
            cost=np.exp(rng.normal(0.0, noise.cost, steps)),
            fate=rng.random(steps),
            noise_seed=int(rng.integers(2**31)),
            failed=self.failures.failed,
            harmful=self.failures.harmful,
            harm=self.failures.harm,
            gate_noise=noise.gate,
            slowdown=rounds.slowdown,
            staging_s=rounds.staging_s,
            learned={FIRST: learned},
            arms=tuple(
                msgspec.structs.replace(ARMS[n], num_rows=j.max_rows or ARMS[n].num_rows) for n, j in self.jobs.items()
            ),
        )
        return traffic, outcomes


def _check_curve(path: str, first: float, points: tuple[tuple[float, float], ...]) -> None:
    """Rows rise, lengths do not fall: of a job that made things worse the gate keeps the version before it."""
    for i, (before, after) in enumerate(pairwise([(0.0, first), *points])):
        require(
            after[0] > before[0], f"{path}[{i}][0] must be more rows than the point before ({before[0]:g})", after[0]
        )
        require(after[1] >= before[1], f"{path}[{i}][1] must be at least the acceptance length before ({before[1]:g})", after[1])  # fmt: skip


def _shares(own: TrafficClass, ceiling: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Arm -> its curve as shares of the gap between the first drafter and the ceiling."""
    gap = ceiling - own.acceptance_length
    out = {}
    for arm, points in own.curves.items():
        rows = np.array([0.0, *(p[0] for p in points)])
        lengths = np.array([own.acceptance_length, *(p[1] for p in points)])
        out[arm] = (rows, (lengths - own.acceptance_length) / gap if gap > 0 else np.zeros_like(rows))
    return out


def _matrix(table: Mapping[str, Mapping[str, float]], names: list[str]) -> np.ndarray:
    return np.array([[table.get(a, {}).get(b, 0.0) for b in names] for a in names])


def read_table(path: Path) -> TableWorld:
    """The world of a JSON file. Raises: ConfigError that names the path in it and the rule, in one sentence."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_keys_once)
    except OSError as e:
        raise ConfigError(f"world {path} must be a readable file: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"world {path} must be JSON: {e}") from e
    try:
        return table_of(values)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def _keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping of a JSON object. Raises: ValueError for a key that comes twice, of which the first would be lost."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} must come once in its object")
    return values


def table_of(values: Any) -> TableWorld:
    """The world of plain values, as JSON has them. Raises: ConfigError that names the path in them and the rule."""
    if isinstance(values, Mapping):
        values = {k: v for k, v in values.items() if k != "$schema"}  # editors find the schema by it
    return build(TableWorld, values, "world.")


def world_schema() -> dict[str, Any]:
    """The JSON schema of a world file; rules between several fields are checked by reading it."""
    schema = json_schema(TableWorld, title="Paceline table world")
    schema["properties"]["$schema"] = {"type": "string", "description": "Where editors find this schema."}
    return schema
