"""Scripted drafters: proposals of known behaviour.

Shape legend: B requests, F frontier leaves, S draft slots, K candidates per slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal


class ScriptedDrafter:
    """Base: needs no features, keeps no KV; a subclass fills `_slots`."""

    def __init__(
        self, name: str, *, num_slots: int, num_candidates: int, is_reentrant: bool = False, is_product: bool = False
    ) -> None:
        self.caps = DrafterCaps(
            name=name,
            num_slots=num_slots,
            num_candidates=num_candidates,
            max_depth=num_slots * (2 if is_reentrant else 1),
            is_reentrant=is_reentrant,
            needs_features=False,
            is_product=is_product,
        )

    def alloc(self, num_pool_rows: int) -> None:
        """Nothing to allocate."""

    def ingest(self, inputs: DraftInputs) -> None:
        """Nothing to do."""

    def propose(self, inputs: DraftInputs) -> Proposal:
        """Slots below each anchor."""
        return self._slots(inputs.histories, inputs.request_ids)

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Slots below each leaf, as if its path were committed."""
        chains = proposal.token_ids[:, :, 0].tolist()
        requests = frontier.request.tolist()
        paths = [
            [*inputs.histories[r], *chains[r][:s], t]
            for r, s, t in zip(requests, frontier.slot.tolist(), frontier.token_ids.tolist(), strict=True)
        ]
        return self._slots(paths, [inputs.request_ids[r] for r in requests])

    def release(self, request_id: str) -> None:
        """Nothing to forget."""

    def _slots(self, histories: Sequence[Sequence[int]], request_ids: Sequence[str]) -> Proposal:
        raise NotImplementedError


class NoneDrafter(ScriptedDrafter):
    """Never proposes: plain decoding."""

    def __init__(self) -> None:
        super().__init__("none", num_slots=0, num_candidates=0)

    def _slots(self, histories: Sequence[Sequence[int]], request_ids: Sequence[str]) -> Proposal:
        empty = torch.zeros(len(histories), 0, 0)
        return Proposal(token_ids=empty.long(), logprobs=empty, widths=None)


class RepeatDrafter(ScriptedDrafter):
    """Proposes the newest token again and again."""

    def __init__(self, num_slots: int = 4) -> None:
        super().__init__("repeat", num_slots=num_slots, num_candidates=1)

    def _slots(self, histories: Sequence[Sequence[int]], request_ids: Sequence[str]) -> Proposal:
        last = torch.tensor([h[-1] for h in histories])[:, None, None].expand(-1, self.caps.num_slots, 1)
        return Proposal(token_ids=last.contiguous(), logprobs=torch.full(last.shape, -0.3), widths=None)


class RandomDrafter(ScriptedDrafter):
    """Proposes distinct random tokens with random scores; a function of (seed, history) only."""

    def __init__(
        self,
        vocab_size: int,
        seed: int = 0,
        *,
        num_slots: int = 4,
        num_candidates: int = 3,
        is_reentrant: bool = True,
        is_product: bool = False,
        absent_share: float = 0.1,
    ) -> None:
        super().__init__(
            "random",
            num_slots=num_slots,
            num_candidates=min(num_candidates, vocab_size),
            is_reentrant=is_reentrant,
            is_product=is_product,
        )
        self._vocab_size, self._seed, self._absent_share = vocab_size, seed, absent_share

    def _slots(self, histories: Sequence[Sequence[int]], request_ids: Sequence[str]) -> Proposal:
        slots, width = self.caps.num_slots, self.caps.num_candidates
        token_ids, logprobs = [], []
        for history in histories:
            rng = np.random.default_rng([self._seed, len(history), *(int(t) for t in history[-8:])])
            token_ids.append(rng.random((slots, self._vocab_size)).argsort(1)[:, :width])
            mass = np.sort(rng.dirichlet(np.ones(width + 1), size=slots)[:, :width], axis=1)[:, ::-1]
            logprob = np.log(np.maximum(mass, 1e-9))
            num_present = np.where(rng.random(slots) < self._absent_share, rng.integers(0, width + 1, slots), width)
            logprobs.append(np.where(np.arange(width) < num_present[:, None], logprob, -np.inf))
        return Proposal(
            token_ids=torch.from_numpy(np.stack(token_ids)),
            logprobs=torch.from_numpy(np.stack(logprobs)).float(),
            widths=None,
        )


class OracleDrafter(ScriptedDrafter):
    """Knows how every request goes on, up to a rate of deliberate mistakes.

    continuations: request id -> the whole text (prompt and output token ids).
    """

    def __init__(
        self, continuations: Mapping[str, Sequence[int]], *, num_slots: int = 4, hit_rate: float = 1.0, seed: int = 0
    ) -> None:
        super().__init__("oracle", num_slots=num_slots, num_candidates=1, is_reentrant=True)
        self._texts, self._hit_rate, self._seed = continuations, hit_rate, seed

    def _slots(self, histories: Sequence[Sequence[int]], request_ids: Sequence[str]) -> Proposal:
        slots = self.caps.num_slots
        token_ids = torch.zeros(len(histories), slots, 1, dtype=torch.int64)
        logprobs = torch.full((len(histories), slots, 1), float("-inf"))
        for i, (history, request_id) in enumerate(zip(histories, request_ids, strict=True)):
            rest = list(self._texts.get(request_id, ()))[len(history) : len(history) + slots]
            rng = np.random.default_rng([self._seed, len(history)])
            for s, token in enumerate(rest):
                token_ids[i, s, 0] = token if rng.random() < self._hit_rate else token ^ 1
                logprobs[i, s, 0] = float(np.log(max(self._hit_rate, 1e-3)))
        return Proposal(token_ids=token_ids, logprobs=logprobs, widths=None)


class RejectedDrafter(ScriptedDrafter):
    """Confident and never right, given a function that tells what will not come next."""

    def __init__(self, wrong_token: Callable[[Sequence[int]], int] | int = 0, num_slots: int = 4) -> None:
        super().__init__("rejected", num_slots=num_slots, num_candidates=1)
        self._wrong = wrong_token

    def _slots(self, histories: Sequence[Sequence[int]], request_ids: Sequence[str]) -> Proposal:
        wrong = [self._wrong if isinstance(self._wrong, int) else self._wrong(h) for h in histories]
        ids = torch.tensor(wrong)[:, None, None].expand(-1, self.caps.num_slots, 1)
        return Proposal(token_ids=ids.contiguous(), logprobs=torch.full(ids.shape, -0.05), widths=None)


class WeightDrafter:
    """A drafter whose only weight is one vector."""

    caps = DrafterCaps(
        name="weights", num_slots=1, num_candidates=1, max_depth=1, is_reentrant=False, needs_features=False
    )
    kv_row_bytes = 10

    def __init__(self, value: float = 0.0, num_deltas: int = 0) -> None:
        self.weight = torch.full((3,), value)
        self.deltas = torch.zeros(num_deltas)
        self.num_deltas = num_deltas
        self.num_pool_rows = None

    def check_delta(self, factors):
        if factors["added"] < 0:
            raise DrafterMismatchError("what is added must be >= 0")

    def load_delta(self, at, factors):
        self.deltas[at] = factors["added"]

    def alloc(self, num_pool_rows):
        self.num_pool_rows = num_pool_rows

    def load_state(self, state):
        if state["weight"].shape != self.weight.shape:
            raise DrafterMismatchError(f"weight must have shape (3,), got {tuple(state['weight'].shape)}")
        self.weight.copy_(state["weight"])
