"""Shadow check: a version's shadow score beside what real decoding with that version gives.

Every version decodes every bucket with the engine at the tree budget that the gate replays; the engine's round
statistics give the real acceptance length. The same version is then scored by the gate's function on three sets of texts:

- own: traces of the very run that is compared; what is left is the replay's own error.
- same: plain decoding of the same requests, kept where it gave the same text; features come from other forwards.
- other: plain decoding of other prompts with other seeds, which is what a gate has; text varies, so errors do too.

Own and same texts are judged, per row, against MAX_ERROR_PERCENT; other texts only against their interval.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated as A
from typing import Any

from rich.console import Console

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.gate.gate import RequestScore
from paceline.adapt.gate.shadow import shadow_scores, usable_traces
from paceline.adapt.online.trainer import ShadowConfig
from paceline.bench.common.engine_run import encode, load_target, set_threads
from paceline.bench.common.recorders import Round
from paceline.bench.common.result_file import keep_settings, kept_json, plain_values, write_json
from paceline.bench.common.terminal import progress, say_file
from paceline.bench.common.workloads import BUNDLED_BUCKETS, load_prompts
from paceline.bench.engine.arms import BenchGroup
from paceline.bench.shadow.decode import Decoded, decode
from paceline.bench.shadow.report import compare, judge, print_report
from paceline.bench.shadow.versions import VersionPlan, VersionShop, plan_versions
from paceline.config import TreeConfig
from paceline.errors import ConfigError
from paceline.records import DataFolder, Dtype, JsonFile, Model, Setting, Threads, record, require
from paceline.serving.drafters.interface import Drafter
from paceline.serving.sampling.request import RequestTrace, SamplingParams
from paceline.serving.target_model.model import TargetModel

TRAIN_TEMPERATURES, _TRAIN_BATCH = (0.0, 0.8), 16


@record()
class ShadowCheckOptions:
    """Replay on logged texts, which decides what may serve, against real decoding, for several drafter versions: error of
    acceptance length with intervals.

    Exit code 1 if a paired error exceeds 2%.
    """

    num_versions: A[int, Setting("Drafter versions: the first and trained ones.", flag="versions", ge=1)] = 6
    buckets: A[tuple[str, ...], Setting("Comma list of buckets.", non_empty=True)] = BUNDLED_BUCKETS
    temperatures: A[tuple[float, ...], Setting("Comma list.", flag="temperature", ge=0, non_empty=True)] = (0.0, 0.8)
    num_prompts: A[int, Setting("Requests per row.", ge=2)] = 24
    max_tokens: A[int, Setting("New tokens per request at most.", ge=3)] = 96
    num_train_prompts: A[
        int, Setting("Requests per bucket whose traces the versions learn from.", flag="train-prompts", ge=8)
    ] = 48
    num_adaptive_prompts: A[
        int, Setting("Requests per row that the adaptive budget decodes, too; 0 = none.", flag="adaptive-prompts", ge=0)
    ] = 4
    batch: A[int, Setting("Requests decoded together.", ge=1)] = 8
    model: Model = "bundled"
    drafter: A[str, Setting("The first version: a bundled drafter's name, or a folder.")] = "bundled"
    chain: A[
        int | None,
        Setting(
            "Decode and replay chains of so many draft tokens, as vLLM and SGLang verify them; default: the gate's trees.",
            ge=1, le=32,
        ),
    ] = None  # fmt: skip
    dtype: Dtype = "auto"
    num_threads: Threads = 1
    seed: A[int, Setting("Seed of prompts, sampling and training.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None
    work: A[Path | None, Setting("Folder that keeps traces, versions and rows; a second run goes on there.")] = None

    def __post_init__(self) -> None:
        fits = self.num_adaptive_prompts <= self.num_prompts
        require(fits, f"adaptive-prompts must be in [0, num-prompts={self.num_prompts}]", self.num_adaptive_prompts)

    def settings(self, target: TargetModel) -> dict[str, Any]:
        """What the kept results of a work folder depend on, beyond version, bucket and temperature."""
        left_out = ("num_versions", "num_adaptive_prompts", "buckets", "temperatures", "num_threads", "work", "json")
        values = {k: v for k, v in dataclasses.asdict(self).items() if k not in left_out}
        return {
            **values,
            "data": str(self.data or ""),
            "target_version": target.version,
            **ShadowConfig(chain=self.chain).tree,
        }


def fixed_tree(chain: int | None = None) -> TreeConfig:
    """The engine's setting of the tree, or chain, that the gate replays."""
    tree = ShadowConfig(chain=chain).tree
    return TreeConfig(max_draft_tokens=tree["num_nodes"], max_frontier=tree["max_frontier"], policy="fixed")


def make_workloads(options: ShadowCheckOptions, target: TargetModel, bucket: str) -> dict[str, BenchGroup]:
    """Requests of one bucket by use, no prompt in two of them: 'train', and 'scored <T>', 'other <T>' per temperature.

    Raises: ConfigError when the bucket has too few prompts.
    """
    sizes = (options.num_prompts, options.num_prompts, options.num_train_prompts)
    texts = list(dict.fromkeys(p.text for p in load_prompts(bucket, options.data, sum(sizes), options.seed)))
    if len(texts) < sum(sizes):
        raise ConfigError(
            f"bucket {bucket!r} must have 2 x num_prompts + train_prompts = {sum(sizes)} different prompts, "
            f"got {len(texts)}; ask for fewer"
        )
    prompts = [tuple(encode(target, text)) for text in texts]
    scored, other, train = (prompts[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(3))

    def make(name: str, chosen: list[tuple[int, ...]], temperatures: Sequence[float], first_seed: int) -> BenchGroup:
        batch = _TRAIN_BATCH if name == "train" else options.batch
        params = tuple(
            SamplingParams(
                temperature=temperatures[i % len(temperatures)],
                max_tokens=options.max_tokens,
                seed=options.seed * 1_000_000 + first_seed + i,
            )
            for i in range(len(chosen))
        )
        return BenchGroup(tag=f"{bucket}-{name}", bucket=bucket, prompts=tuple(chosen), params=params, batch=batch)

    out = {"train": make("train", train, TRAIN_TEMPERATURES, 200_000)}
    for t in options.temperatures:
        out[f"scored {t:g}"] = make(f"scored-{t:g}", scored, (t,), 0)
        out[f"other {t:g}"] = make(f"other-{t:g}", other, (t,), 100_000)
    return out


class ShadowCheck:
    """One run of the check: target, versions, texts; rows are kept in the work folder as they are made."""

    def __init__(self, options: ShadowCheckOptions, folder: Path) -> None:
        """Load the target. Raises: ConfigError when the folder holds results of other settings."""
        self._options, self._folder = options, folder
        self._target = load_target(options.model, options.dtype, drafters=[options.drafter])
        folder.mkdir(parents=True, exist_ok=True)
        keep_settings(folder / "settings.json", options.settings(self._target))
        self._shop = VersionShop(folder, self._target, drafter=options.drafter, seed=options.seed)
        self._work = {b: make_workloads(options, self._target, b) for b in options.buckets}
        self._plans = plan_versions(options.num_versions, options.buckets)

    @property
    def dtype(self) -> str:
        """Number type of the target; drafter and KV follow the service."""
        return self._target.dtype_name

    @property
    def num_jobs(self) -> int:
        """Captures, trainings, plain decodings and cells."""
        cells = len(self._options.buckets) * len(self._options.temperatures)
        return len(self._options.buckets) + len(self._plans) + 2 * cells + len(self._plans) * cells

    def run(self, start: Callable[[str], None], done: Callable[[], None]) -> list[dict[str, Any]]:
        """Rows of every version x bucket x temperature x text. start: told what begins; done: after each job."""
        options = self._options
        for bucket in options.buckets:
            start(f"capture {bucket}")
            self._shop.capture(self._work[bucket]["train"])
            done()
        versions: dict[str, VersionPlan] = {}
        for plan in self._plans:
            start(f"train {plan.name}")
            versions[self._shop.version(plan, start)] = plan
            done()
        rows: list[dict[str, Any]] = []
        for bucket in options.buckets:
            for t in options.temperatures:
                plain = {}
                for use in ("scored", "other"):
                    start(f"plain {bucket} T={t:g} ({use})")
                    plain[use] = self._plain(self._work[bucket][f"{use} {t:g}"])
                    done()
                for version, plan in versions.items():
                    start(f"{plan.name} on {bucket} T={t:g}")
                    rows += self._cell(version, plan, bucket, t, plain)
                    done()
        return rows

    def _plain(self, work: BenchGroup) -> list[RequestTrace]:
        """Traces of plain decoding, in the order of the prompts."""
        store = TraceStore(self._folder / "plain" / work.tag)
        shards = store.list_shards()
        if not shards:
            traces = decode(self._target, None, work).traces
            store.write_shard(traces, work.bucket)
            return traces
        found = {t.request_id: t for t in store.read_shard(shards[-1].shard_id)}
        return [found[f"{work.tag}-{i}"] for i in range(len(work.prompts))]

    def _cell(
        self, version: str, plan: VersionPlan, bucket: str, temperature: float, plain: dict[str, list[RequestTrace]]
    ) -> list[dict[str, Any]]:
        """The kept rows of a cell. plain: traces of plain decoding by use, 'scored' and 'other'."""
        work = self._work[bucket][f"scored {temperature:g}"]
        head = {
            "version": version, "arm": plan.arm, "trained_on": plan.trained_on, "bucket": bucket,
            "temperature": temperature,
        }  # fmt: skip
        count, kept = self._options.num_adaptive_prompts, self._folder / "rows"
        name = f"{version}-{bucket}-{temperature:g}"
        rows = kept_json(kept / f"{name}.json", lambda: self._fixed(head, work, plain["scored"], plain["other"]))
        if count:
            rows += kept_json(kept / f"{name}-adaptive-{count}.json", lambda: self._adaptive(head, work, count))
        return rows

    def _fixed(
        self, head: dict[str, Any], work: BenchGroup, same: list[RequestTrace], other: list[RequestTrace]
    ) -> list[dict[str, Any]]:
        """Real decoding at the gate's budget against scores on own, same and other texts."""
        version, tree = head["version"], fixed_tree(self._options.chain)
        real = decode(self._target, self._drafter(version), work, version=version, tree=tree)
        equal = [i for i, t in enumerate(same) if t.token_ids == real.traces[i].token_ids]
        everyone = list(range(len(same)))
        texts = {
            "own": (real.traces, everyone),
            "same": ([same[i] for i in equal], equal),
            "other": (other, everyone),
        }
        rows = []
        for text, (traces, chosen) in texts.items():
            if usable_traces(traces):
                scores, is_paired = self._score(version, traces), text != "other"
                rounds = _rounds_of(real, scores if is_paired else None, chosen)
                rows.append({**head, "budget": "fixed", "text": text, **compare(scores, rounds, is_paired=is_paired)})
        return rows

    def _score(self, version: str, traces: list[RequestTrace]) -> list[RequestScore]:
        """The gate's score of one version."""
        tree = ShadowConfig(chain=self._options.chain).tree
        scores = shadow_scores({version: self._drafter(version)}, traces, **tree, device=self._target.device)
        return scores[version]

    def _drafter(self, version: str) -> Drafter:
        return self._shop.drafter(version, self._options.chain)

    def _adaptive(self, head: dict[str, Any], work: BenchGroup, count: int) -> list[dict[str, Any]]:
        """Real decoding as the service does it, one request at a time with the adaptive budget, next to the score at the
        gate's budget on the same texts. The replay has no clock, so it cannot follow a budget made of measured times."""
        version = head["version"]
        few = dataclasses.replace(
            work, tag=f"{work.tag}-adaptive", prompts=work.prompts[:count], params=work.params[:count], batch=1
        )
        real = decode(self._target, self._drafter(version), few, version=version)
        scores = self._score(version, real.traces)
        rounds = _rounds_of(real, scores, list(range(count)))
        drafted = [r.num_draft_tokens for own in rounds for r in own if r.num_draft_tokens]
        if not drafted:
            return []
        figures = compare(scores, rounds, is_paired=True, drafted_only=True)
        row = {**head, "budget": "adaptive", "text": "own", **figures}
        row["num_draft_tokens"] = round(sum(drafted) / len(drafted), 2)
        return [row]


def has_failed(document: dict[str, Any]) -> bool:
    """Whether a paired error is too large, or nothing could be judged."""
    return not document["passed"]


def _rounds_of(real: Decoded, scores: Sequence[RequestScore] | None, chosen: Sequence[int]) -> list[tuple[Round, ...]]:
    """Rounds of the chosen requests; only of those that have a score, when scores are given."""
    kept = None if scores is None else {s.request_id for s in scores}
    return [real.rounds[i] for i in chosen if kept is None or real.traces[i].request_id in kept]


def run_shadow_check(options: ShadowCheckOptions, console: Console) -> dict[str, Any]:
    """Run the check, print its table, write its JSON; the document's 'passed' tells whether paired errors are small."""
    set_threads(options.num_threads)
    with tempfile.TemporaryDirectory(prefix="paceline-shadow-") as spare:
        check = ShadowCheck(options, options.work or Path(spare))
        with progress(console, "shadow check", check.num_jobs) as bar:
            rows = check.run(bar.name, bar.step)
    result = {
        "options": {k: v for k, v in plain_values(options).items() if k not in ("work", "json")},
        "dtype": check.dtype,
        "tree": ShadowConfig(chain=options.chain).tree,
        **judge(rows),
        "rows": rows,
    }
    print_report(result, console)
    if options.json:
        write_json(options.json, result)
    say_file(console, "JSON", options.json)
    return result
