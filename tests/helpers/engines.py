"""Engines over a tiny target, their requests and sinks, and drafters that check what they are handed."""

from __future__ import annotations

import functools

import torch

from paceline.config import EngineConfig, TreeConfig
from paceline.serving.drafters.interface import DrafterCaps, Proposal
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.kv_size import pool_row_bytes
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.fakes import greedy_continuation, tiny_target
from tests.helpers.feedback import dicts_of
from tests.helpers.scripted_drafters import RepeatDrafter

VOCAB = 64


PROMPT = (10, 11, 12, 13, 14)


TREE = TreeConfig(max_draft_tokens=6, policy="fixed")


@functools.cache
def target():
    return tiny_target(vocab=VOCAB, context=128)


@functools.cache
def greedy(prompt: tuple[int, ...] = PROMPT, num_tokens: int = 24) -> tuple[int, ...]:
    return tuple(greedy_continuation(target(), list(prompt), num_tokens))


class FeatureDrafter:
    """Checks the rows it is handed against the committed text and the plain model; proposes the newest token."""

    def __init__(self) -> None:
        self.caps = DrafterCaps(
            name="feature", num_slots=2, num_candidates=1, max_depth=2, is_reentrant=False, needs_features=True
        )
        self.rows: dict[str, list[torch.Tensor]] = {}
        self.largest_call = 0
        self.released: list[str] = []

    def alloc(self, num_pool_rows):
        self.num_pool_rows = num_pool_rows

    def ingest(self, inputs):
        offsets = inputs.cu_new.tolist()
        self.largest_call = max(self.largest_call, offsets[-1])
        for b, request_id in enumerate(inputs.request_ids):
            rows, text = self.rows.setdefault(request_id, []), inputs.histories[b]
            part = slice(offsets[b], offsets[b + 1])
            positions = inputs.new_positions[part].tolist()
            assert positions == list(range(len(rows), len(rows) + len(positions))), (
                "rows are handed over once, in order"
            )
            assert inputs.new_token_ids[part].tolist() == [text[p + 1] for p in positions]
            assert inputs.new_slots[part].tolist() == [int(inputs.slot_table[b, p]) for p in positions]
            assert all(0 <= s < self.num_pool_rows for s in inputs.new_slots[part].tolist())
            rows += inputs.new_features[part].unbind(0)

    def propose(self, inputs):
        self.ingest(inputs)
        for b, request_id in enumerate(inputs.request_ids):
            assert len(self.rows[request_id]) == int(inputs.context_lens[b]) == len(inputs.histories[b]) - 1
            assert int(inputs.anchor_token_ids[b]) == inputs.histories[b][-1]
        ids = inputs.anchor_token_ids[:, None, None].expand(-1, 2, 1)
        return Proposal(token_ids=ids, logprobs=torch.full(ids.shape, -0.5), widths=None)

    def release(self, request_id):
        self.released.append(request_id)
        self.rows.pop(request_id, None)


class BrokenDrafter(RepeatDrafter):
    """Works for a few calls, then fails in the given way."""

    def __init__(self, how: str) -> None:
        super().__init__(num_slots=3)
        self.how, self.calls = how, 0

    def propose(self, inputs):
        self.calls += 1
        proposal = super().propose(inputs)
        if self.calls < 3:
            return proposal
        if self.how == "raises":
            raise RuntimeError("broken")
        if self.how == "ids":
            proposal.token_ids = proposal.token_ids + VOCAB
            return proposal
        proposal.logprobs = torch.full_like(proposal.logprobs, float(self.how))
        return proposal


class Sinks:
    def __init__(self, wants=True) -> None:
        self.rows: list[dict] = []
        self.asked: list[str] = []
        self.traces: list = []
        self.is_wanted = wants

    def record_rounds(self, rows):
        self.rows += dicts_of(rows)

    def wants(self, request_id, bucket):
        self.asked.append(request_id)
        return self.is_wanted(request_id) if callable(self.is_wanted) else self.is_wanted

    def record_trace(self, trace):
        self.traces.append(trace)


class Run:
    """One request's events."""

    def __init__(self, engine: Engine, request_id: str = "r", prompt=PROMPT, **fields) -> None:
        self.events: list = []
        request = {
            k: fields.pop(k) for k in ("group", "bucket", "is_traced", "priority", "tenant", "is_own") if k in fields
        }
        params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **fields}
        engine.submit(
            GenerationRequest(
                request_id=request_id, prompt_token_ids=tuple(prompt), params=SamplingParams(**params), **request
            ),
            self.events.append,
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for e in self.events for t in e.token_ids)

    @property
    def last(self):
        return self.events[-1]


def make_engine(
    drafter=None, *, num_pages: int = 64, sinks: Sinks | None = None, packs_prompts: bool | None = None, model=None,
    trace_max_bytes: int | None = None, **config,
) -> Engine:  # fmt: skip
    """model: what forwards instead of the tiny target, with its attributes."""
    slots = drafter if isinstance(drafter, DrafterSlots) else DrafterSlots(drafter, "v0" if drafter else "")
    row_bytes, _ = pool_row_bytes(target(), slots, has_traces=sinks is not None)
    values = {"page_tokens": 4, "kv_bytes": num_pages * 4 * row_bytes, "tree": TREE, **config}
    return Engine(
        model or target(), slots, EngineConfig(**values),
        feedback=sinks, traces=sinks, prompts=sinks if hasattr(sinks, "record_prompt") else None, trace_topk=4,
        trace_max_bytes=trace_max_bytes, packs_prompts=packs_prompts,
    )  # fmt: skip


def finish(engine: Engine) -> int:
    steps = 0
    while engine.step():
        engine.check_integrity()
        steps += 1
        assert steps < 1000
    engine.check_integrity()
    return steps


class RowDrafter:
    """Its KV at a row is a hash of the weights and of the text up to the token behind the row, computed from the row
    before; every proposal checks all rows of its requests, whoever wrote them."""

    def __init__(self, weights: int = 0) -> None:
        self.caps = DrafterCaps(
            name="rows", num_slots=2, num_candidates=1, max_depth=2, is_reentrant=False, needs_features=True,
            is_row_local=True,
        )  # fmt: skip
        self.weights = weights
        self.num_new = self.num_checked = 0

    def load_state(self, state) -> None:
        self.weights = int(state["weights"])

    def alloc(self, num_pool_rows: int) -> None:
        self.pool = [0] * num_pool_rows

    def _next(self, before: int, token: int) -> int:
        return hash((self.weights, before, token))

    def ingest(self, inputs) -> None:
        offsets = inputs.cu_new.tolist()
        assert inputs.new_features is not None and inputs.new_features.shape[0] == offsets[-1]
        positions, slots, tokens = (t.tolist() for t in (inputs.new_positions, inputs.new_slots, inputs.new_token_ids))
        for b in range(len(inputs.request_ids)):
            for i in range(offsets[b], offsets[b + 1]):
                at = positions[i]
                before = self.pool[int(inputs.slot_table[b, at - 1])] if at else 0
                self.pool[slots[i]] = self._next(before, tokens[i])
        self.num_new += offsets[-1]

    def propose(self, inputs) -> Proposal:
        self.ingest(inputs)
        for b, history in enumerate(inputs.histories):
            value, rows = 0, inputs.slot_table[b].tolist()
            for at in range(len(history) - 1):
                value = self._next(value, history[at + 1])
                assert self.pool[rows[at]] == value, "drafter KV of another text or of other weights"
            self.num_checked += len(history) - 1
        ids = inputs.anchor_token_ids[:, None, None].expand(-1, 2, 1)
        return Proposal(token_ids=ids, logprobs=torch.full(ids.shape, -0.5), widths=None)

    def release(self, request_id: str) -> None:
        pass
