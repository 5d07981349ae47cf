"""Records that cross a process or a folder boundary: frozen, tensor-free, encoded with msgspec."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import chain
from typing import Annotated, TypeVar

import msgspec

T = TypeVar("T")

SPAN_S = 5.0
"""Feedback is summed over spans of so many seconds, so that the traffic of each can be told."""
NO_ROWS = msgspec.Raw(b"\xc0")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""What an engine can have measured, seconds or tokens: a sum with a NaN or an infinity in it would spoil all that it is added to,
and one that cannot be stored again would end every commit. Feedback beyond these bounds is not read."""
CLASS_PREFIX = "~"
"""First character of the buckets that requests without a name are sorted into; no client's name begins with it."""


class Group(StrEnum):
    """Which drafter a request is served with: the live one, the first one (hold-back), or none."""

    ADAPTIVE = "adaptive"
    STATIC = "static"
    PLAIN = "plain"


ASKED_GROUP = "asked"
"""Group under which rounds are counted whose client chose the drafter: work like all others, and evidence of nothing."""


class RoundStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of decode rounds in columns; one element a request and round (equal lengths in all columns).

    What an engine records; FeedbackSums is what a replica makes of it.
    """

    request_id: list[str]
    bucket: list[str]
    group: list[str]
    drafter_version: list[str]
    """'' for rows decoded without a drafter."""
    is_greedy: list[bool]
    round_index: list[int]
    num_draft_tokens: list[int]
    num_accepted_tokens: list[int]
    """Bonus token excluded; before truncation by stop or length."""
    num_emitted_tokens: list[int]
    """After truncation."""
    batch_size: list[int]
    """Requests in the round."""
    draft_ms: list[float]
    """Drafting time of the round divided by the requests that drafted."""
    verify_ms: list[float]
    """Verify time of the round divided by its requests."""
    share_ms: list[float]
    """Whole round time divided by its requests: the device time that this row is charged with."""
    is_training: list[bool]
    """Whether a training job was running on this host during the round (for interference)."""
    ts: list[float]
    """End of the round, seconds since the epoch."""
    is_from_text: list[bool] = []
    """Whether the text drafter beside the version had the round: it says nothing about the version. [] = no round."""

    @property
    def num_rows(self) -> int:
        return len(self.request_id)

    @staticmethod
    def columns_of(parts: Sequence[RoundStats]) -> dict[str, list]:
        """Column name -> the column of all parts, one behind the other."""
        return {
            name: list(chain.from_iterable(getattr(part, name) for part in parts))
            for name in RoundStats.__struct_fields__
        }


class SizeSums(msgspec.Struct, array_like=True, gc=False):
    """Rounds of one cell at one batch size: drafted by its version, plain, or a text drafter's beside it."""

    num_rounds: Count = 0
    """Rounds of the first two kinds."""
    drafted_rounds: Count = 0
    """Those that the version drafted for."""
    drafted_s: Amount = 0.0
    """Device seconds of the drafted rounds."""
    plain_s: Amount = 0.0
    """Device seconds of the rounds without a draft."""
    num_tokens: Amount = 0
    """Emitted tokens of all rounds."""
    plain_tokens: Count = 0
    """Those of the rounds without a draft."""
    draft_ratio: Amount = 0.0
    """Plain rounds that a drafted one would take, by the engine's cost tables; 0 = not told, as where all were drafted."""
    text_rounds: Count = 0
    """Rounds that a text drafter had."""
    text_s: Amount = 0.0
    text_tokens: Count | Amount = 0


class RequestSums(msgspec.Struct, array_like=True, gc=False):
    """Rounds of one request in one cell. May pool several requests where only sums over requests are asked for."""

    seconds: Amount = 0.0
    """Device seconds."""
    num_tokens: Count | Amount = 0
    """Emitted tokens; whole numbers take less room where they stay such."""
    drafted_rounds: Count | Amount = 0
    """Those that the version drafted for."""
    kept: Count | Amount = 0
    """Accepted + bonus tokens of the drafted rounds."""
    num_rounds: Count = 0
    num_run: Count = 0
    """Rounds in which its version ran, also where none of its nodes was worth verifying."""
    batch_sum: Count = 0
    """Sum of the batch sizes of its rounds."""
    is_greedy: bool = False
    first_ts: Amount | None = None
    """End of its first round, seconds since the epoch; None = its first round is not among these."""


class CellSums(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Rounds of one (bucket, group, drafter version) in one span of time."""

    bucket: str
    group: str
    version: str
    """'' for rounds decoded without a drafter."""
    span: Count = 0
    """The rounds ended in [span, span + 1) x SPAN_S seconds since the epoch."""
    sizes: dict[Count, SizeSums]
    """Batch size -> its rounds."""
    requests: dict[str, RequestSums]
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0
    """Bonus tokens excluded."""

    @property
    def num_rounds(self) -> int:
        return sum(sums.num_rounds + sums.text_rounds for sums in self.sizes.values())

    @property
    def drafted_rounds(self) -> int:
        return sum(sums.drafted_rounds for sums in self.sizes.values())


class RoundMean(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Mean device seconds of like rounds, for the comparison of rounds with and without a training job."""

    batch_size: Count
    is_drafted: bool
    is_training: bool
    num_rounds: Count
    mean_s: Amount
    """Per request of the round."""
    is_from_text: bool = False
    """Drafted by a text drafter; is_drafted is true of them, too."""


class FeedbackSums(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What producers report for a span of time."""

    cells: list[CellSums]
    rounds: list[RoundMean] = []
    num_dropped: Count = 0
    """Rows dropped by the producer since its batch before; a row is a request in a round."""

    @property
    def num_rows(self) -> int:
        return sum([sums.num_rounds + sums.text_rounds for cell in self.cells for sums in cell.sizes.values()])


class PromptVectors(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What kinds of prompts without a bucket came: a few numbers for each, no text."""

    space: str
    """Hash of what the vectors depend on besides the prompt: target, tapped layers, projection."""
    num_dims: int
    vectors: bytes
    """(prompts, num_dims) float32, little-endian."""
    tenants: list[str] = []
    """Who sent each of the prompts, '' = nobody; empty = nobody sent any."""


class TrafficClasses(msgspec.Struct, frozen=True, kw_only=True):
    """Where the classes of prompts without a bucket lie; a prompt belongs to the nearest one within whose radius it is."""

    rev: int = 0
    """Grows with every change."""
    space: str = ""
    """As PromptVectors has it; vectors of another one belong to no class."""
    names: list[str] = []
    """Buckets, K of them."""
    centroids: list[list[float]] = []
    """(K, num_dims)."""
    radii: list[float] = []
    """(K,) largest distance from the centroid."""


class FeedbackBatch(FeedbackSums, frozen=True, kw_only=True):
    """Round statistics of one replica on their way to the controller.

    (replica_id, boot_epoch, seq) identifies the batch: consumers drop a seq that they have already folded.
    """

    replica_id: str
    boot_epoch: int
    """Start time of the replica's process in ns."""
    seq: Count
    """1, 2, 3, ... within (replica_id, boot_epoch)."""
    target_version: str
    rows: msgspec.Raw = NO_ROWS
    """The RoundStats behind the sums where they are kept for exports (feedback.keep_rows), else nil; see `rows_of`."""
    prompts: PromptVectors | None = None
    """Of some of the prompts without a bucket that began since the batch before."""
    tenants: dict[str, str] = {}
    """Bucket of these cells -> the tenant that its name counts for; those of nobody are left out."""


def rows_of(batch: FeedbackBatch) -> RoundStats | None:
    """The rows that travel with a batch; None without. Raises msgspec.ValidationError on a wrong shape."""
    return msgspec.msgpack.decode(batch.rows, type=RoundStats | None)


class DesiredState(msgspec.Struct, frozen=True, kw_only=True):
    """The one generation-numbered record that every replica reconciles to."""

    gen: int
    version: str
    """Drafter version that new adaptive requests are pinned to."""
    first_version: str
    """Drafter version of the hold-back group."""
    holdback_percent: int
    """Share of requests, by crc32(request id), that keep the first drafter."""
    canary_version: str = ""
    """Version on trial, '' = none; `version` is its incumbent."""
    canary_percent: int = 0
    """Share of adaptive requests, by `is_canary`, that it serves."""
    canary_bucket: str = ""
    """Class whose requests it is tried on, against that class's version; '' = those that `version` serves."""
    class_versions: dict[str, str] = {}
    """Class (bucket) -> drafter version that its new adaptive requests are pinned to; all others take `version`."""
    reason: str = ""
    ts: float = 0.0

    def version_of(self, bucket: str) -> str:
        """Drafter version that new adaptive requests of a class are pinned to, a canary apart."""
        return self.class_versions.get(bucket, self.version)


class DrafterManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a drafter version is; its weights are `<registry>/blobs/<sha256>.safetensors`."""

    version: str
    """Short content id: first 12 characters of sha256."""
    sha256: str
    num_bytes: int
    drafter_type: str
    """'specblock'."""
    config: dict
    """Architecture settings of the drafter."""
    shapes_hash: str
    target_version: str
    """Hash of the target's config, weights and tokenizer; a mismatch is refused."""
    parent: str | None
    arm: str
    """Training arm that made it, 'initial' for the first."""
    bucket: str | None
    num_train_rows: int
    metrics: dict
    created: float
    delta_of: str | None = None
    """The version whose weights this one adds to; its own are then the factors alone. None: they are whole."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine of a replica is and can do, so that nobody asks it for more."""

    kind: str
    """'paceline' | 'vllm' | 'sglang'."""
    engine_version: str = ""
    """As the engine calls its release; '' = this project's own."""
    draft_shape: str
    """'tree' | 'chain'."""
    max_draft_tokens: int
    """Draft tokens of a round at most."""
    group_unit: str
    """What keeps the first drafter or tries another one: 'request', or 'time' where one drafter serves all requests."""
    window_s: float = 0.0
    """Length of a piece of time, where that is the unit: a multiple of SPAN_S."""
    timing: str
    """What is timed: 'round' or, where only sums of whole requests are told, 'request'."""
    has_features: bool
    """Whether its requests leave traces to train on."""


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica runs now; written to Redis with a time to live."""

    replica_id: str
    gen: int
    version: str
    slots: dict[str, str]
    """Drafter slot name -> version."""
    failed_gen: int | None
    failed_reason: str
    swap_pause_ms: list[float]
    """Pauses of the latest swaps (time the engine thread spent in the flip)."""
    staging_s: float = 0.0
    """Seconds that loading, validating and copying the current version took."""
    counters: dict[str, int] = {}
    """Feedback rows: produced, delivered, dropped."""
    ts: float
    swap_gen: int | None = None
    """Generation that last changed here which version serves whom; None = not told, `gen` stands for it."""
    canary_version: str = ""
    """Version that serves this replica's canary requests."""
    failures: dict[str, str] = {}
    """Version -> why its drafter was switched off while it served."""
    errors: dict[str, int] = {}
    """Version -> requests pinned to it that ended in an error, since the replica's start."""
    class_versions: dict[str, str] = {}
    """Class -> its own version, where this replica has it; the live version serves the others of the desired record."""
    refused: dict[str, str] = {}
    """Version of a class -> why this replica does not serve it."""
    engine: EngineFacts | None = None
    """None: a release that did not tell."""
    target_version: str = ""
    """Target that it serves; "" = a release that did not tell."""

    def runs(self, gen: int) -> bool:
        """Whether it took up this generation and its drafter has not failed since."""
        return self.gen == gen and self.failed_gen != gen


TIME_BOUNDS_S = tuple(float(f"{m}e{e}") for e in range(-4, 3) for m in (1, 2, 3, 5)) + (1000.0,)
"""Upper ends of a histogram's cells, seconds: 0.1 ms to 1,000 s, each at most twice the one before it."""


class Histogram(msgspec.Struct, array_like=True):
    """Times in cells, as Prometheus counts them; one writer, any number of readers."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(TIME_BOUNDS_S) + 1))
    """Times up to each of TIME_BOUNDS_S and above the one before it; the last cell has what is longer than all."""
    sum_s: float = 0.0

    def observe(self, seconds: float, weight: int = 1) -> None:
        """Count a time `weight` times; what a clock that was set back makes negative counts as none."""
        seconds = max(seconds, 0.0)
        self.counts[bisect_left(TIME_BOUNDS_S, seconds)] += weight
        self.sum_s += seconds * weight

    def combine(self, other: Histogram, sign: int = 1) -> Histogram:
        """Both together; with `sign` -1 what came after the earlier `other`."""
        counts = [a + sign * b for a, b in zip(self.counts, other.counts, strict=True)]
        return Histogram(counts, self.sum_s + sign * other.sum_s)

    def quantile(self, q: float) -> float | None:
        """The time that a share `q` of them does not exceed, seconds; None without times.

        Within a cell times count as evenly spread, as in PromQL's histogram_quantile; beyond the last bound it is the bound.
        """
        rank = q * sum(self.counts)
        below, lower = 0, 0.0
        for upper, count in zip(TIME_BOUNDS_S, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (upper - lower) * (rank - below) / count
            below, lower = below + count, upper
        return TIME_BOUNDS_S[-1] if self.counts[-1] else None


class AnswerTimes(msgspec.Struct, array_like=True):
    """How long clients waited for the parts of answers that are streamed, or of those that are not."""

    first_token: Histogram = msgspec.field(default_factory=Histogram)
    """From the arrival of a request to its first tokens; one a request."""
    per_token: Histogram = msgspec.field(default_factory=Histogram)
    """From chunk to chunk of a choice over the tokens of the later one; one a token."""
    whole: Histogram = msgspec.field(default_factory=Histogram)
    """From the arrival of a request to the end of its answer; one a complete answer."""


class HttpMeters(msgspec.Struct, array_like=True):
    """What a process that speaks HTTP counts of the requests that it answers; written by its event loop."""

    streamed: AnswerTimes = msgspec.field(default_factory=AnswerTimes)
    at_once: AnswerTimes = msgspec.field(default_factory=AnswerTimes)
    responses: dict[str, dict[int, int]] = {}
    """Route -> status code -> responses."""
    broken: dict[str, int] = {}
    """Route -> answers that broke off after their status was sent."""

    def times(self, is_streamed: bool) -> AnswerTimes:
        return self.streamed if is_streamed else self.at_once

    def count(self, route: str, code: int, is_broken: bool) -> None:
        """Count a response that has ended."""
        codes = self.responses.setdefault(route, {})
        codes[code] = codes.get(code, 0) + 1
        if is_broken:
            self.broken[route] = self.broken.get(route, 0) + 1


def combine_meters(many: Iterable[HttpMeters], earlier: HttpMeters | None = None) -> HttpMeters:
    """The sum of several processes' meters, less `earlier` ones."""
    out = HttpMeters()
    for sign, meters in chain(((1, m) for m in many), () if earlier is None else ((-1, earlier),)):
        for own, other in ((out.streamed, meters.streamed), (out.at_once, meters.at_once)):
            for name in AnswerTimes.__struct_fields__:
                setattr(own, name, getattr(own, name).combine(getattr(other, name), sign))
        for route, codes in meters.responses.items():
            sums = out.responses.setdefault(route, {})
            for code, n in codes.items():
                sums[code] = sums.get(code, 0) + sign * n
        for route, n in meters.broken.items():
            out.broken[route] = out.broken.get(route, 0) + sign * n
    return out


class ArmSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train: which parameters, on how many rows."""

    name: str
    parameters: str
    """'calibration' | 'head' | 'full' | 'lora'."""
    num_rows: int
    """Fresh supervised rows that a burst reads at most (the newest of the bucket)."""
    rehearsal_share: float = 0.125
    """Rehearsal requests from other buckets, as a share of all steps."""
    learning_rate: float = 5e-4
    """Of every step behind the warm-up."""
    rank: int = 0
    """Of the factors that `lora` learns."""


class BurstPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a burst was ordered for: one that will not bring it ends early."""

    seconds: float
    """Device-seconds that it is expected to use."""
    rise: float
    """Relative rise of tokens per round that is expected behind it."""
    pay_rise: float
    """Relative rise that pays for these seconds and for the swap."""


def burst_plan(decision: Decision) -> BurstPlan | None:
    """The plan of a training decision; None where the policy made none."""
    plan = decision.context.get("plan")
    return None if plan is None else msgspec.convert(plan, BurstPlan)


class TrainJob(msgspec.Struct, frozen=True, kw_only=True):
    """An order for a burst of a bucket's learner; job_id = hash(decision, base version, bucket, arm, newest shard)."""

    job_id: str
    bucket: str
    arm: ArmSpec
    base_version: str
    first_version: str
    shard_ids: list[str]
    """Trace shards of the bucket, oldest first."""
    rehearsal_shard_ids: list[str]
    seed: int
    time_limit_s: float
    """Device-seconds that the burst may use."""
    min_gain: float = 0.0
    """Relative rise of tokens per round that a swap costs: a snapshot with surely more is made a version."""
    plan: BurstPlan | None = None
    """None: it reads everything, whatever comes of it."""
    text_began: float = 0.0
    """When the bucket's present text began, whose learner is no other's; 0 = it had no other."""


Z90 = 1.645
"""Half-width of a central 90% interval of a normal distribution, in standard deviations."""


class ShadowScore(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance length of one version on rows it has not learned, by exact replay, with its paired gain over the incumbent."""

    version: str
    acceptance_length: float
    num_requests: int
    num_tokens: int
    gain_mean: float
    """Paired mean of acceptance_length minus the incumbent's, per request."""
    gain_lower: float
    """Lower end of the 90% bootstrap interval of gain_mean; -inf for a single request."""

    @property
    def gain_error(self) -> float:
        """Standard error of gain_mean."""
        return max(self.gain_mean - self.gain_lower, 0.0) / Z90


class TrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a burst.

    accepted: a version, surely better. rejected: its learner surely gains too little, and begins again. learning: not sure yet, the learner goes on in the next burst. stopped: ended before it scored a request.
    """

    job_id: str
    status: str
    """'accepted' | 'rejected' | 'learning' | 'failed' | 'stopped'."""
    version: str | None
    reason: str
    train_s: float
    shadow_s: float
    candidate: ShadowScore | None = None
    """The learner's snapshot, on requests before it learned them."""
    incumbent: ShadowScore | None = None
    first: ShadowScore | None = None
    elsewhere: dict[str, list[ShadowScore]] = {}
    """Other bucket -> scores of [the snapshot, the incumbent] on rehearsal requests of it, before the learner learned them."""
    num_rows: int | None = None
    """Fresh rows that the burst learned; None: all that were ordered."""
    num_requests: int | None = None
    """Requests of these rows."""
    log_evidence: float | None = None
    """Of the learner's gain since its base, to go on with; `paceline.bootstrap.LOG_SURE` is enough."""
    num_rows_before: int = 0
    """Fresh rows that its learner had learned since the base in earlier bursts."""
    start_s: float | None = None
    """Part of train_s before the first row was learned: imports in a process that is new, reading of models and text. None = not told."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision of the controller, with everything needed to replay it."""

    decision_id: int
    ts: float
    bucket: str
    action: str
    """'hold' | 'train' | 'recall' | 'rollback' | 'pin'."""
    arm: str | None
    version: str | None
    policy: str
    context: dict
    expected_gain: float
    """Expected relative fall of device time per token."""
    expected_saving_s: float
    expected_cost_s: float
    propensity: float
    reason: str
    """One sentence with its numbers."""
    realised_gain: float | None = None
    realised_saving_s: float | None = None
    realised_cost_s: float | None = None
    outcome: str | None = None


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Device-seconds spent (positive) or saved (positive) under one heading."""

    entry_id: str
    """Unique; folding the same id twice changes nothing."""
    ts: float
    kind: str
    """'training' | 'shadow' | 'interference' | 'staging' | 'saving'."""
    bucket: str
    version: str | None
    seconds: float
    arm: str | None = None
    """Arm of the training job that the entry belongs to, or that made the version; None = neither is known."""
    standard_error_s: float = 0.0
    """Of a saving: the standard error of `seconds`; spending is metered and has none."""


def class_name(number: int) -> str:
    """The bucket of a class of unnamed traffic."""
    return f"{CLASS_PREFIX}class-{number}"


def is_canary(request_id: str, version: str, percent: int) -> bool:
    """Whether an adaptive request is served by the canary `version`: equal on every replica and after a restart.

    BLAKE2b, since crc32 of a prefixed id depends on crc32 of the id, which the hold-back and the trace sampling use; the
    version is part of it, so that each canary meets other requests.
    """
    digest = hashlib.blake2b(f"{version}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 10_000 < percent * 100


def window_name(replica_id: str, ts: float, window_s: float) -> str:
    """What a window of time of a replica is drawn by, as a request elsewhere by its id (EngineFacts.group_unit = 'time')."""
    return f"{replica_id}@{int(ts // window_s)}"


def encode(record: msgspec.Struct) -> bytes:
    """Encode a record as MessagePack."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode MessagePack into a record; raises msgspec.ValidationError on a wrong shape."""
    return msgspec.msgpack.decode(data, type=kind)
