"""What does a job bring in a live replay? It is really run; results and scores are kept on disk."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from paceline.adapt.data.trace_store import ShardInfo, TraceStore
from paceline.adapt.families.target_handle import TargetHandle
from paceline.adapt.gate.shadow import shadow_scores
from paceline.adapt.online.trainer import ShadowConfig, run_training_job
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bandit.replay.outcomes import FIRST, TrainOrder, TrainTruth
from paceline.bench.replay.live_text import Say
from paceline.contracts import TrainJob, TrainResult
from paceline.paths import write_atomic
from paceline.serving.loading.families import build_drafter

NUM_NODES = 8


class MergedStore:
    """Shards of several stores under their own ids."""

    def __init__(self, stores: dict[str, TraceStore]) -> None:
        self._owner = {info.shard_id: store for store in stores.values() for info in store.list_shards()}

    def read_shard(self, shard_id: str) -> list:
        return self._owner[shard_id].read_shard(shard_id)


@dataclass
class LiveOutcomes:
    """Trains with adapt/online/trainer.py on the texts that the replay has served so far; scores by exact replay."""

    labels: tuple[str, ...]
    stores: dict[str, TraceStore]
    train_shards: dict[str, list[ShardInfo]]
    score_shards: dict[str, list[ShardInfo]]
    registry: DrafterRegistry
    first_version: str
    handle: TargetHandle
    cache: Path
    text_id: str
    """Names the texts and the target in the keys of kept results."""
    say: Say
    served: np.ndarray  # (T, D) rows traced up to the end of each step
    names: dict[str, str] = field(default_factory=dict)
    """Version of the replay -> version of the registry."""

    def __post_init__(self) -> None:
        self.names[FIRST] = self.first_version
        self._lengths: dict[str, np.ndarray] = {}

    def lengths(self, version: str) -> np.ndarray:
        """(D,) pooled acceptance length on each bucket's scored texts."""
        real = self.names[version]
        if real not in self._lengths:
            self._lengths[real] = np.array([self._length(real, bucket) for bucket in self.labels])
        return self._lengths[real]

    def _length(self, version: str, bucket: str) -> float:
        path = self.cache / "scores" / f"{version}-{bucket}-{self.text_id}.json"
        if path.is_file():
            return float(json.loads(path.read_text(encoding="utf-8"))["acceptance_length"])
        self.say(f"scoring {version} on {bucket}")
        manifest = self.registry.get_manifest(version)
        state = self.registry.load_state(version, target_version=self.handle.version)
        drafter = build_drafter(
            {**manifest.config, "drafter_type": manifest.drafter_type}, state, self.handle, version=version,
            target_version=manifest.target_version,
        )  # fmt: skip
        traces = [t for s in self.score_shards[bucket] for t in self.stores[bucket].read_shard(s.shard_id)]
        scores = shadow_scores({version: drafter}, traces, num_nodes=NUM_NODES, device=self.handle.device)[version]
        length = sum(s.num_tokens for s in scores) / max(sum(s.num_rounds for s in scores), 1)
        write_atomic(path, json.dumps({"acceptance_length": length, "num_requests": len(scores)}))
        return length

    def _seen(self, bucket: str, step: int) -> list[str]:
        """Shards of a bucket whose rows were served up to a step; a bucket that came round again has them all."""
        rows = float(self.served[step, self.labels.index(bucket)])
        out, total = [], 0
        for shard in self.train_shards[bucket]:
            total += shard.num_rows
            if total > rows:
                break
            out.append(shard.shard_id)
        return out

    def train(self, order: TrainOrder) -> TrainTruth:
        base = self.names[order.base]
        shards = self._seen(order.bucket, order.step)
        rehearsal = [s for b in self.labels if b != order.bucket for s in self._seen(b, order.step)]
        facts = [base, order.bucket, msgspec.to_builtins(order.arm), len(shards), len(rehearsal), round(order.time_limit_s), self.text_id]  # fmt: skip
        job_id = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        result = self._result(job_id, order, base, shards, rehearsal)
        version = None
        if result.status == "accepted" and result.version is not None:
            version = result.version if order.base == FIRST else f"{result.version}-{order.decision_id}"
            self.names[version] = result.version
        candidate = result.candidate
        return TrainTruth(
            status=result.status, version=version, train_s=result.train_s, shadow_s=result.shadow_s,
            seen_gain=candidate.gain_mean if candidate is not None else 0.0,
            seen_lower=candidate.gain_lower if candidate is not None else 0.0, reason=result.reason,
        )  # fmt: skip

    def _result(self, job_id: str, order: TrainOrder, base: str, shards: list[str], rehearsal: list[str]) -> TrainResult:  # fmt: skip
        path = self.cache / "jobs" / f"{job_id}.json"
        if path.is_file():
            return msgspec.json.decode(path.read_bytes(), type=TrainResult)
        self.say(f"training {order.arm.name} on {order.arm.num_rows} rows of {order.bucket}")
        job = TrainJob(
            job_id=job_id,
            bucket=order.bucket,
            arm=order.arm,
            base_version=base,
            first_version=self.first_version,
            shard_ids=shards,
            rehearsal_shard_ids=rehearsal,
            seed=int(job_id[:6], 16),
            time_limit_s=order.time_limit_s,
        )
        result = run_training_job(
            job, MergedStore(self.stores), self.registry, self.handle, shadow=ShadowConfig(num_nodes=NUM_NODES)
        )
        write_atomic(path, msgspec.json.encode(result))
        return result
