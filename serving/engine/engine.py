"""Engine: takes requests, and runs round after round over them.

One thread calls `step`; every other thread talks to it through `submit`, `abort` and `call_between_rounds`, whose effect
begins at the next round boundary.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from paceline.config import EngineConfig
from paceline.contracts import Histogram
from paceline.errors import EngineStoppedError, RequestError
from paceline.machine import Clock, SystemClock
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.budget.roofline import TargetShape
from paceline.serving.drafters.forward import choose_ranking
from paceline.serving.drafters.slots import DrafterSlots, delta_name
from paceline.serving.engine.buckets import BucketNames
from paceline.serving.engine.classes import PromptClasses, PromptSink
from paceline.serving.engine.decode import DecodeRunner
from paceline.serving.engine.inbox import Call, EngineInbox
from paceline.serving.engine.output import EndSink, FeedbackSink, RoundOutput
from paceline.serving.engine.prefill import PrefillRunner
from paceline.serving.engine.running import DrafterPins, RunningRequest, StopStringChecker
from paceline.serving.engine.scheduler import Deadlines, Scheduler
from paceline.serving.engine.traces import TraceCollector, TraceSink
from paceline.serving.loading.calibration import EngineProbe
from paceline.serving.loading.graphs import EngineGraphs, default_backend, prepare
from paceline.serving.loading.kv_size import pool_row_bytes, settle_kv_bytes
from paceline.serving.sampling.draw import TokenCounts, TokenLimits, has_limits, has_penalties
from paceline.serving.sampling.grammar import GrammarFactory
from paceline.serving.sampling.request import GenerationRequest, RequestStatus, RoundEvent
from paceline.serving.sampling.text_stream import TokenText
from paceline.serving.target_model.graph_capture import GraphBackend, Progress
from paceline.serving.target_model.kv_cache import PageAllocator
from paceline.serving.target_model.model import TargetModel
from paceline.serving.target_model.prefix_cache import PrefixCache
from paceline.serving.trees.policy import TreePolicy


def check_balance(allocator: PageAllocator, scheduler: Scheduler, slots: DrafterSlots, output: RoundOutput) -> None:
    """Raise AssertionError naming what does not balance; for tests and idle engines, between rounds."""
    allocator.check_integrity()
    pins = dict.fromkeys(slots.num_pins(), 0)
    num_held = 0
    for r in output.by_id.values():
        if r.is_pinned and r.slot is not None:
            pins[r.slot] += 1
            if r.delta >= 0:
                pins[delta_name(r.delta)] += 1
        num_pages = len(allocator.pages(r.request_id))
        num_held += num_pages - allocator.num_shared_rows(r.request_id) // allocator.page_tokens
        num_shared = allocator.num_shared_rows(r.request_id)
        is_active = r in scheduler.active
        assert is_active != (r in scheduler.waiting), f"{r.request_id} is in both lists or in none"
        assert r.row_capacity == num_pages * allocator.page_tokens, f"{r.request_id}: stale row table"
        assert is_active or num_pages == 0, f"{r.request_id} waits but holds pages"
        if r.status is RequestStatus.RUNNING:
            assert r.context_len == len(r.tokens) - 1, f"{r.request_id}: KV length is not committed - 1"
        assert num_shared <= r.context_len, f"{r.request_id}: it would write rows that others share"
        assert r.drafted_len <= r.context_len <= r.row_capacity, f"{r.request_id}: row counts are inconsistent"
    assert pins == slots.num_pins(), f"drafter pins do not balance: {pins} != {slots.num_pins()}"
    num_shared_pages = allocator.cache.num_nodes - allocator.cache.num_idle
    assert num_held + num_shared_pages + allocator.num_free_pages == allocator.num_pages, (
        "pages of ended requests are held"
    )
    ranks = [r.rank for r in scheduler.active]
    assert ranks == sorted(ranks), "active requests are out of order"
    assert len(scheduler.active) + len(scheduler.waiting) == len(output.by_id), "a request is lost"


def check_bias(logit_bias: Sequence[tuple[int, float]], vocab_size: int) -> None:
    """Raise RequestError unless every biased token is in the vocabulary and named once."""
    token_ids = [t for t, _ in logit_bias]
    bad = next((t for t in token_ids if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise RequestError(f"logit_bias token ids must be in [0, {vocab_size}), got {bad}")
    if len(set(token_ids)) < len(token_ids):
        raise RequestError("logit_bias must name every token id at most once")


logger = logging.getLogger(__name__)


class Engine:
    """Generates for many requests at once with one target and pinned drafters."""

    def __init__(
        self,
        target: TargetModel,
        slots: DrafterSlots,
        config: EngineConfig,
        *,
        clock: Clock | None = None,
        feedback: FeedbackSink | None = None,
        traces: TraceSink | None = None,
        prompts: PromptSink | None = None,
        ends: EndSink | None = None,
        trace_topk: int = 8,
        trace_max_bytes: int | None = None,
        policy: TreePolicy | None = None,
        rng: np.random.Generator | None = None,
        timer: Callable[[], float] = time.perf_counter,
        num_sharing: int = 1,
        packs_prompts: bool | None = None,
        graph_backend: GraphBackend | None = None,
    ) -> None:
        """Allocate the KV pool from the byte budget and bind the drafters to it.

        Args:
            prompts: takes the vectors of prompts whose request names no bucket.
            ends: is told of every request with a traceparent when it ends.
            trace_max_bytes: of one trace's hidden states; a longer request leaves none. None: no limit.
            policy: tree policy; one for `config.tree` when None.
            rng: source of the seeds of requests without one.
            timer: monotonic seconds, for durations (`clock` is for time stamps).
            packs_prompts: run prompt rows and tree rows of a round in one forward; None: where it pays
                (packed_forward.py).
            num_sharing: replicas on this machine, which share its RAM when `config.kv_bytes` is None.
            graph_backend: what makes the graphs that `warm_up` captures; CUDA graphs where they can be had when None.
        Raises: ConfigError when the budget is too small (kv_budget.settle_kv_bytes).
        """
        graph_backend = graph_backend or default_backend(target, config)
        if graph_backend is not None:
            slots.prepare_all()  # their weights take their memory before the KV pool takes its share of what is free
        row_bytes, keeps_features = pool_row_bytes(target, slots, has_traces=traces is not None)
        config = settle_kv_bytes(
            config, row_bytes=row_bytes, context_tokens=target.context_tokens, device=target.device,
            num_sharing=num_sharing,
        )  # fmt: skip
        assert config.kv_bytes is not None
        self.target = target
        self.slots = slots
        self.config = config
        self._clock = clock or SystemClock()
        self._timer = timer
        num_scratch = config.max_running * (config.tree.max_draft_tokens + 1)
        num_pages = config.kv_bytes // (config.page_tokens * row_bytes)
        limit = min(target.context_tokens, num_pages * config.page_tokens)
        self.max_context_tokens = min(limit, config.max_context_tokens or limit)
        """Prompt and output tokens that one request may have."""
        self.prefix_cache = PrefixCache(config.page_tokens, is_enabled=config.prefix_caching)
        self.allocator = PageAllocator(num_pages, config.page_tokens, self.prefix_cache)
        self.kv = target.new_kv_pool(num_pages, config.page_tokens, num_scratch, keeps_features=keeps_features)
        slots.alloc(num_pages * config.page_tokens)
        self._pins = DrafterPins(self.allocator, slots)
        self.scheduler = Scheduler(
            self.allocator,
            self._pins,
            page_tokens=config.page_tokens,
            max_running=config.max_running,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            min_prefill_tokens=config.min_prefill_tokens,
            priority_aging_s=config.priority_aging_s,
        )
        self.queue_times = Histogram()
        """Seconds from submission to the first admission of each request."""
        self._deadlines = Deadlines()
        takes_ragged_rows = target.kernels.is_capturable or not target.pads_requests
        self._packs_prompts = takes_ragged_rows if packs_prompts is None else packs_prompts
        rng = rng if rng is not None else np.random.default_rng()
        self._inbox = EngineInbox(config.max_waiting, self.scheduler.waiting, rng)
        self.output = RoundOutput(
            self.scheduler,
            self._pins,
            clock=self._clock,
            feedback=feedback,
            ends=ends,
            on_end=self._note_end,
        )
        if traces is not None and self.kv.features is not None:
            self.output.traces = TraceCollector(
                traces, self.kv.features, choose_ranking(target.kernels), topk=trace_topk, target_version=target.version,
                tap_layers=target.tap_layers, max_bytes=trace_max_bytes, note_error=self.output.note_broken_sink,
            )  # fmt: skip
        cost = CostModel(shape=TargetShape.of(target.config, target.dtype.itemsize))
        self.policy = policy or TreePolicy(
            config.tree, cost=cost, vocab_size=target.vocab_size, timer=timer, kernels=target.kernels
        )
        self.classes: PromptClasses | None = None
        """What sorts requests without a bucket; None: the engine keeps no hidden states, or is told not to."""
        if config.max_classes and self.kv.features is not None:
            self.classes = PromptClasses(
                self.kv.features, len(target.tap_layers), target_version=target.version, tap_layers=target.tap_layers,
                sink=prompts, note_error=self.output.note_broken_sink,
            )  # fmt: skip
        elif config.max_classes:
            logger.info("requests without a bucket share one: no hidden states are kept to tell their classes by")
        self._prefill = PrefillRunner(target, self.kv, self.scheduler, self.output, self._pins, self.classes)
        self.graphs: EngineGraphs | None = None
        if graph_backend is not None:
            self.graphs = EngineGraphs(
                graph_backend, target, self.kv, slots, config, self.max_context_tokens, self.policy,
                num_traced=0 if self.output.traces is None else trace_topk,
            )  # fmt: skip
        self._decode = DecodeRunner(
            target, self.kv, self.scheduler, slots, self.policy, self.output,
            chunk_rows=config.prefill_chunk_tokens, timer=timer, graphs=self.graphs,
        )  # fmt: skip
        self._token_text = TokenText(target.tokenizer)
        self.grammars = GrammarFactory(target.tokenizer, target.vocab_size, target.eos_token_ids)
        self._buckets = BucketNames(config.max_buckets)
        self._known_versions = set(slots.versions().values())

    # ---- any thread ---------------------------------------------------------------------------------------------
    def tenant_of(self, bucket: str) -> str:
        """The tenant that a bucket's name counts for; '' = nobody."""
        return self._buckets.owner(bucket)

    def draft_ratio(self, num_requests: int) -> float:
        """Plain rounds that a drafted round of so many requests would take, as the cost tables foretell."""
        return self.policy.budget.draft_ratio(num_requests)

    def submit(self, request: GenerationRequest, on_event: Callable[[RoundEvent], None]) -> None:
        """Queue a request; `on_event` is called from the engine thread once per round, last with a finish_reason.

        A grammar is compiled here, by the caller, in up to some seconds; one that `grammars` has prepared takes no time.
        Raises: RequestError (prompt empty, too long or with unknown ids; bias of an unknown token; grammar that cannot be
            used; request id in use; nothing left to resume), CapacityError (queue full, too many grammars at once),
            EngineStoppedError.
        """
        self.submit_all((request,), on_event)

    def submit_all(self, requests: Sequence[GenerationRequest], on_event: Callable[[RoundEvent], None]) -> None:
        """Queue all of the requests or none; raises like `submit`."""
        self._inbox.put_all([self._new_running(r, on_event) for r in requests])

    def _new_running(self, request: GenerationRequest, on_event: Callable[[RoundEvent], None]) -> RunningRequest:
        prompt, params, resumed = request.prompt_token_ids, request.params, request.resumed_token_ids
        if not prompt:
            raise RequestError("prompt must have at least one token, got none")
        if len(prompt) >= self.max_context_tokens:
            raise RequestError(
                f"prompt must be shorter than the context of {self.max_context_tokens} tokens, got {len(prompt)} tokens"
            )
        if min(prompt) < 0 or max(prompt) >= self.target.vocab_size:
            raise RequestError(
                f"prompt token ids must be in [0, {self.target.vocab_size}), got {min(prompt)}..{max(prompt)}"
            )
        check_bias(params.logit_bias, self.target.vocab_size)
        token_limit = min(len(prompt) + params.max_tokens, self.max_context_tokens)
        if resumed and (
            len(prompt) + len(resumed) >= token_limit or not 0 <= min(resumed) <= max(resumed) < self.target.vocab_size
        ):
            raise RequestError(
                f"resumed_token_ids must be fewer than the answer may have and in [0, {self.target.vocab_size}), "
                f"got {len(resumed)} ids"
            )  # fmt: skip
        stops = frozenset(params.stop_token_ids)
        grammar = None
        if params.grammar is not None:
            grammar = self.grammars.start(
                params.grammar, stop_token_ids=stops, ignores_eos=params.ignore_eos, bad_words=params.bad_words,
                tenant=request.tenant,
            )  # fmt: skip
        if not params.ignore_eos or grammar is not None:  # with ignore_eos a grammar draws it only where it must end
            stops |= self.target.eos_token_ids
        limits = None
        if has_limits(params):
            limits = TokenLimits(
                params, prompt_len=len(prompt), stop_token_ids=stops, vocab_size=self.target.vocab_size
            )
        checker = None
        if params.stop:
            checker = StopStringChecker(
                self._token_text, params.stop, prompt, skip_special=params.skip_special_tokens,
                min_tokens=params.min_tokens, kept_ids=params.kept_token_ids,
            )  # fmt: skip
        return RunningRequest(
            request=request,
            on_event=on_event,
            arrival=0,
            seed=params.seed if params.seed is not None else 0,
            token_limit=token_limit,
            stop_token_ids=stops,
            stop_checker=checker,
            counts=TokenCounts(prompt, self.target.vocab_size) if has_penalties(params) else None,
            submitted_s=self._clock.now(),
            grammar=grammar,
            limits=limits,
        )

    def now(self) -> float:
        """Seconds of the engine's clock, in which deadlines are given."""
        return self._clock.now()

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self.scheduler.waiting) + len(self._inbox)

    def abort(self, request_id: str) -> None:
        """End a request at the next round boundary (finish reason 'abort'); unknown or finished ids are ignored."""
        self._inbox.abort(request_id)

    def call_between_rounds(self, fn: Callable[[], Any]) -> Future:
        """Run `fn` in the engine thread at the next round boundary; the future gives its result or exception."""
        return self._inbox.call(fn)

    def wait_for_work(self, timeout_s: float) -> None:
        """Block an idle engine's thread until something arrives, `wake` is called or the time is over."""
        self._inbox.wait(timeout_s)

    def wake(self) -> None:
        """End a `wait_for_work`."""
        self._inbox.wake()

    def close_inbox(self, reason: str) -> None:
        """Refuse new requests from now on; running ones continue."""
        self._inbox.close(reason)

    # ---- engine thread ------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def step(self) -> bool:
        """One round: boundary work, admit, one prefill chunk, one decode round. False when there was nothing to do."""
        self._boundary()
        scheduler = self.scheduler
        if len(self._deadlines):
            for request in self._deadlines.take_expired(self._clock.now(), self.output.by_id):
                self.output.end_early(request, "deadline")
        if not scheduler.active and not scheduler.waiting:
            self.deliver_traces()
            return False
        admitted = scheduler.admit()
        if admitted:
            scheduler.note_drafted()
        for request in admitted:
            if request.status is not RequestStatus.PREFILL:  # it gave way to one that was admitted behind it
                continue
            request.move_to(self.target.device)  # here: who submits would wait for the round that runs
            if request.admitted_s is None:
                request.admitted_s = self._clock.now()
                self.queue_times.observe(request.admitted_s - request.submitted_s)
            if self._pins.pin(request) and self.output.traces is not None:
                self.output.traces.start(request)
            self._pins.adopt_shared_rows(request)
        num_lookahead, has_decoding = self.config.tree.max_draft_tokens, scheduler.num_running > 0
        batch = scheduler.reserve(num_lookahead) if self._packs_prompts and has_decoding else []
        chunks = scheduler.prefill_chunks(self._decode.num_rows if has_decoding else 0)
        if batch and chunks:
            prompts = self._prefill.pack(chunks)
            out = self._decode.run(batch, prompts)
            assert out is not None
            self._prefill.finish(prompts, out)
            return True
        if chunks:
            self._prefill.run(chunks)
        batch = batch or scheduler.reserve(num_lookahead)
        if batch:
            self._decode.run(batch)
        return True

    @property
    def is_idle(self) -> bool:
        """No request is queued, running or in the inbox."""
        return self._inbox.num_unfinished == 0

    def deliver_traces(self) -> None:
        """Hand over the traces of requests that have ended, once their rows are on the host. Engine thread."""
        if self.output.traces is not None:
            self.output.traces.deliver(is_waiting=True)

    @torch.inference_mode()
    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile kernels, capture graphs, measure what verify and drafting cost; before the first request.

        progress: called with jobs done and jobs planned.
        """
        forward = self.graphs.target.forward if self.graphs is not None else self.target.forward
        probe = EngineProbe(self.target, self.kv, timer=self._timer, forward=forward)
        slot = self.slots.live_slot
        drafter = self.slots.drafter(slot)
        prepare(self.graphs, probe.kernel_jobs(self.policy, drafter), self._timer, progress)
        probe.calibrate_verify(self.policy, self.config.max_running)
        if drafter is not None:
            try:
                graphs = None if self.graphs is None else self.graphs.drafting(drafter)
                probe.calibrate_draft(self.policy, drafter, self.config.max_running, graphs)
            except Exception as e:  # a broken drafter costs speed, never the engine
                self.slots.mark_failed(slot, f"calibration raised {type(e).__name__}: {e}")

    def fail_all(self, error: str) -> None:
        """End every request with finish reason 'error' and refuse new ones; the engine cannot be used afterwards."""
        self.close_inbox(error)
        arrived, _, calls = self._inbox.take()  # what was to be aborted ends with the others
        calls = self._take(arrived, set(), calls)
        for request in list(self.output.by_id.values()):
            try:
                self.output.end_early(request, "error", error)
            except Exception:  # the failed round left the state inconsistent; the owner must still hear of it
                logger.exception("request %s could not be ended cleanly", request.request_id)
                with contextlib.suppress(Exception):  # one owner that is gone must not keep it from the others
                    request.on_event(request.event(self._clock.now(), finish_reason="error", error=error))
                self._inbox.forget(request.request_id)
        calls += self._inbox.take()[2]  # queued while requests were still known; later ones are refused
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineStoppedError(error))

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; safe from any thread (values may be one round old)."""
        return {
            "num_running": len(self.scheduler.active),
            "num_waiting": self.num_waiting,
            "forward": self.target.forward_name,
            "num_pages": self.allocator.num_pages,
            "num_free_pages": self.allocator.num_free_pages,
            "num_rounds": self._decode.num_rounds,
            "round_part_s": dict(self._decode.part_s),
            "num_graphs": self.graphs.num_graphs if self.graphs is not None else 0,
            "num_prefill_rows": self._prefill.num_rows,
            "num_tokens": self.output.num_tokens,
            "num_finished": self.output.num_finished,
            "num_aborted": self.output.num_aborted,
            "num_expired": self.output.num_expired,
            "num_preemptions": self.scheduler.num_preemptions,
            "num_cached_pages": self.prefix_cache.num_nodes,
            "num_prefix_lookups": self.scheduler.num_lookups,
            "num_prefix_hits": self.scheduler.num_hits,
            "num_prefix_hit_tokens": self.scheduler.num_hit_rows,
            "num_prefix_evictions": self.prefix_cache.num_evictions,
            "num_callback_errors": self.output.num_callback_errors,
            "num_buckets": len(self._buckets),
            "num_bucket_capped": self._buckets.num_capped,
            "num_classes": self.classes.num_classes if self.classes is not None else 0,
            "num_classed": self.classes.num_classed if self.classes is not None else 0,
            "num_unclassed": self.classes.num_unclassed if self.classes is not None else 0,
            "num_drafter_failures": self.slots.num_failures + len(self.policy.text_failures),
            "drafter_failures": self.slots.failures() | self.policy.text_failures,
            "slots": self.slots.versions(),
            "live_version": self.slots.live_version,
            "num_swaps": self.slots.num_swaps,
        }

    def check_integrity(self) -> None:
        """Raise AssertionError when pages, pins or request states do not balance. Engine thread, between rounds."""
        check_balance(self.allocator, self.scheduler, self.slots, self.output)
        assert self._inbox.num_unfinished == len(self.output.by_id) + len(self._inbox), "request ids leak"

    # ---- private ------------------------------------------------------------------------------------------------
    def _boundary(self) -> None:
        if self._inbox.is_empty:  # the hot path takes no lock
            return
        calls = self._take(*self._inbox.take())
        if calls:  # what they say of a version that comes back is not to be forgotten with what was known of it
            self._forget_versions()
        for fn, future in calls:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(fn())
            except Exception as e:  # belongs to the caller, who reads the future
                future.set_exception(e)
        if calls:
            self._forget_versions()

    def _take(self, arrived: list[RunningRequest], aborts: set[str], calls: list[Call]) -> list[Call]:
        for request in arrived:
            asked = request.request
            request.bucket = self._buckets.resolve(asked.bucket, asked.tenant, self.slots.routed(), is_own=asked.is_own)
            request.awaits_class = self.classes is not None and asked.bucket is None and not asked.is_own
            self.output.by_id[request.request_id] = request
            self.scheduler.add(request)
            self._deadlines.add(request, self.output.by_id)
        for request_id in aborts:
            running = self.output.by_id.get(request_id)
            if running is not None:
                self.output.end_early(running, "abort")
        return calls

    def _note_end(self, request_id: str) -> None:
        self.policy.release(request_id)
        self._inbox.forget(request_id)

    def _forget_versions(self) -> None:
        """Drop what the policy learnt about drafter versions that are no longer resident."""
        held = set(self.slots.versions().values())
        for version in self._known_versions - held:
            self.policy.forget(version)
        self._known_versions = held
