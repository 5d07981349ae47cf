"""Checks: what must hold after every fault: answers are the target's own, nothing is left over, the books add up.

Answers are greedy, so that the target alone, decoding plainly in fp32, says what each must be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bandit.controller.controller import Controller
from paceline.bandit.ledger.ledger import contradictions
from paceline.bandit.ledger.totals import COSTS
from paceline.bench.chaos.load import Answer
from paceline.bench.common.lossless import LosslessChecker
from paceline.config import PolicyConfig
from paceline.contracts import Decision, decode
from paceline.infra.controller.store import HostState, held_entries, read_state
from paceline.infra.state.log import LogFile
from paceline.infra.state.redis_clients import Keys
from paceline.machine import SystemClock

MAX_RUN = 16
"""Longest stretch of tokens that is looked for as lost or doubled; the other differences are called altered."""
NEAR_TIE = 1e-4
"""Distance of a token's logit from the largest that fp32 rounding may close, so that either token is the target's own."""

LEDGER = "ledger: "
"""Beginning of every problem of the books."""
_POSITIVE = set(COSTS) - {"interference"}
"""Costs that are measured by themselves; interference is a difference, below 0 by chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Prompts and the greedy tokens behind each."""

    prompts: list[list[int]]
    want: list[list[int]]
    gap: Callable[[Sequence[int], Sequence[int]], float]
    """(prompt, tokens) -> largest distance of a token's logit from the maximum at its place, in fp32."""


def plain_questions(model: Path, prompts: list[list[int]], num_tokens: int) -> Questions:
    """Decode every prompt plainly with the transformers model in fp32; the end of text does not end an answer."""
    checker = LosslessChecker(model)
    return Questions(
        prompts=prompts, want=[checker.greedy(p, num_tokens) for p in prompts],
        gap=lambda p, out: float(checker.gaps(p, out)[0].max()),
    )  # fmt: skip


def difference(token_ids: Sequence[int], want: Sequence[int]) -> str | None:
    """How tokens differ from a beginning of those that were wanted: lost, doubled or altered; None: they do not."""
    got, due = list(token_ids), list(want)
    at = next((k for k, (a, b) in enumerate(zip(got, due, strict=False)) if a != b), None)
    if at is None:
        return None if len(got) <= len(due) else "doubled"
    for run in range(1, MAX_RUN + 1):
        if got[at : at + run] == due[max(0, at - run) : at] and _goes_on(got[at + run :], due[at:]):
            return "doubled"
        if _goes_on(got[at:], due[at + run :]):
            return "lost"
    return "altered"


def _goes_on(got: list[int], due: list[int]) -> bool:
    """Whether one list is a beginning of the other; less than two tokens prove nothing."""
    num = min(len(got), len(due))
    return num >= 2 and got[:num] == due[:num]


def answer_problems(answer: Answer, questions: Questions, *, may_break: bool) -> list[str]:
    """What is wrong with an answer. may_break: it may end early, by an explicit error."""
    found = []
    got, due = answer.token_ids, questions.want[answer.question][: answer.num_wanted]
    kind = difference(got, questions.want[answer.question])
    if kind is not None and not (
        len(got) <= answer.num_wanted and questions.gap(questions.prompts[answer.question], got) < NEAR_TIE
    ):
        at = next((k for k, (a, b) in enumerate(zip(got, due, strict=False)) if a != b), min(len(got), len(due)))
        found.append(f"tokens {kind} at {at}: {got[at : at + 4]} instead of {due[at : at + 4]}")
    if answer.is_malformed:
        found.append(f"no answer that the API has: {answer.error}")
    if answer.num_late:
        found.append(f"{answer.num_late} events after [DONE]")
    if answer.looks_complete:
        if len(got) != answer.num_wanted:
            found.append(f"tokens {'lost' if len(got) < answer.num_wanted else 'doubled'}: {len(got)} of {answer.num_wanted}")  # fmt: skip
        if answer.num_usage not in (None, len(got)):
            found.append(f"usage says {answer.num_usage} tokens, {len(got)} came")
        if answer.finish_reason != "length":
            found.append(f"finish reason {answer.finish_reason!r} instead of 'length'")
    elif not may_break:
        found.append(f"answer lost: {_how_it_ended(answer)}")
    elif answer.is_done or answer.finish_reason is not None or (answer.error is None and not answer.is_stream):
        found.append(f"broken off, yet it looks like a whole answer: {_how_it_ended(answer)}")
    return [f"answer to prompt {answer.question}: {text}" for text in found]


def _how_it_ended(answer: Answer) -> str:
    return (
        f"status {answer.status}, {len(answer.token_ids)} of {answer.num_wanted} tokens, "
        f"{'[DONE]' if answer.is_done else 'no [DONE]'}, {answer.error or 'no error'}"
    )


def ledger_problems(client: Any, keys: Keys, log: Path, policy: PolicyConfig) -> list[str]:
    """Where the controller's state in Redis and the ledger in its log file disagree; client: of Redis.

    The file is copied after each commit, so a look between the two finds a difference that the next look does not.
    Raises: redis errors.
    """
    state = read_state(client, keys)
    if state is None:
        return [f"{LEDGER}the controller's state is not in Redis"]
    decisions = [decode(data, Decision) for data in client.hgetall(keys.decisions).values()]
    return booked_problems(state, LogFile(log).newest_first(), decisions, policy)


def booked_problems(
    state: HostState, lines: Iterable[dict[str, Any]], decisions: Iterable[Decision], policy: PolicyConfig
) -> list[str]:
    """What is wrong with the books of a state: entries lost or doubled, sums that do not add up. lines: the latest first."""
    entries = list(held_entries(lines, state.num_booked, limit=state.num_booked))
    found = []
    if len(entries) != state.num_booked:
        found.append(f"the state counts {state.num_booked} entries, the log has {len(entries)} of them")
    controller = Controller.restore(state.controller, policy, clock=SystemClock())
    found += contradictions(controller.ledger_totals(), entries[::-1], decisions)
    odd = [e.entry_id for e in entries if not math.isfinite(e.seconds) or (e.kind in _POSITIVE and e.seconds < 0)]
    if odd:
        found.append(f"entries that cannot be: {', '.join(odd[:4])}")
    bank, booked_s = controller.bank(), sum(e.seconds for e in entries if e.kind in COSTS)
    if not math.isclose(bank.spent_s, booked_s, abs_tol=1e-6):
        found.append(f"the bank has spent {bank.spent_s:.6f} s, the entries {booked_s:.6f} s")
    if not math.isfinite(bank.balance_s) or bank.reserved_s < 0:
        found.append(f"the bank's balance is {bank.balance_s}, {bank.reserved_s} of it reserved")
    return [f"{LEDGER}{text}" for text in found]
