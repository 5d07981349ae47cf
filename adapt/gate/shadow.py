"""Shadow scores: the tokens per round that a drafter version gives on logged texts, by an exact replay walk.

Speculative decoding is lossless, so the text does not depend on the drafter: any version can be scored on logged rows
as if it had been serving. The walk starts behind prefill's first token, lets the drafter build its tree at the anchor,
descends while the realised next token is a child, moves the anchor by the accepted tokens plus the bonus token, and
so on to the end of the text. This holds for greedy and sampled texts alike, because a round accepts a drafted token
exactly when the target drew that token.

Requests advance side by side, one round of each per pass, through the same drafter and tree code as serving, so round
boundaries and drafter KV are those of serving; the score calibration is learnt on the way, as the engine learns it.
acceptance_length counts rounds before truncation, so a last round that the text cuts is continued by `unseen_tokens`.
Shape legend: B requests, R new rows, T tokens of a text, D columns of its continuation, N tree rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from paceline.adapt.gate.gate import RequestScore
from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.interface import Drafter, DraftInputs
from paceline.serving.sampling.request import RequestTrace
from paceline.serving.trees.calibration import ScoreCalibration
from paceline.serving.trees.candidates import pack_trees
from paceline.serving.trees.host import HostBlocks
from paceline.serving.trees.policy import plain_round
from paceline.serving.trees.propose import propose_blocks
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import accepted_rows

AcceptRound = Callable[[Drafter, DraftInputs, torch.Tensor], torch.Tensor]
"""(drafter, inputs of B requests, continuation (B, D)) -> num_accepted_tokens (B,) int64.

D is one more than the drafter's depth, so that the bonus token of every round is seen.
"""


def follow_text(tree: TreeBatch, continuation: torch.Tensor) -> np.ndarray:
    """Rows whose whole path the target's text follows, (M,) int64, request after request, root first.

    continuation: (B, D) int64, the tokens behind each anchor, padded with -1.
    """
    rows, wanted = tree.on_host(), continuation.cpu().numpy()
    column = rows.depths - 1  # -1 for roots, which are accepted whatever they read
    is_match = (column < wanted.shape[1]) & (
        wanted[rows.owners, column.clip(max=wanted.shape[1] - 1)] == rows.token_ids
    )
    return accepted_rows(rows, is_match)


class SeenRound(NamedTuple):
    """What a replayed round's trees had predicted, and what came of it, of the requests whose text did not cut the round."""

    predicted: np.ndarray
    """(B',) accepted draft tokens as the path masses of the nodes foretell them."""
    num_accepted_tokens: np.ndarray
    """(B',) int64."""


def fixed_rounds(
    num_nodes: int,
    max_frontier: int,
    *,
    is_calibrated: bool = True,
    bundle_width: int | None = None,
    on_round: Callable[[SeenRound], None] | None = None,
) -> AcceptRound:
    """Rounds at a fixed node budget; re-entrant drafters go on below the `max_frontier` heaviest leaves of every block.

    bundle_width: trees grow by so many children of a node at once; None = by the heaviest nodes. on_round: told of every
    round.

    is_calibrated: the trees follow the engine's score calibration, learnt from these rounds; False = the drafter's own
    probabilities. The engine corrects a drafter's scores by the hit rates that it has seen, greedy and sampled requests
    apart, which moves nodes between branches. Rounds that the end of the text cuts teach nothing: what they hit is not
    known. Nor do rounds with one token left, for which the engine does not draft. The state lives in the returned function:
    make one per drafter version and bucket.
    """
    calibration = ScoreCalibration()

    def accept(drafter: Drafter, inputs: DraftInputs, continuation: torch.Tensor) -> torch.Tensor:
        keys = [("", "", t == 0) for t in inputs.temperatures.tolist()]
        out = plain_round(list(keys), inputs.anchor_token_ids, context_rows=0)
        blocks = HostBlocks(
            is_product=drafter.caps.is_product,
            max_nodes=num_nodes,
            max_frontier=max_frontier,
            bundle_width=bundle_width,
            corrections=lambda num_slots: calibration.corrections(keys, num_slots) if is_calibrated else None,
        )
        try:
            has_drafted = propose_blocks(drafter, inputs, blocks, out, time.perf_counter)
        except ValueError as e:
            raise DrafterMismatchError(f"a proposal must be numbers that make a tree: {e}; use another version") from e
        if num_nodes == 0 or not has_drafted or blocks.is_empty:
            return torch.zeros_like(inputs.anchor_token_ids)
        everyone = list(range(len(keys)))
        ranked = blocks.ranked()
        assert ranked is not None
        tree = pack_trees([(ranked, everyone)], np.full(len(keys), num_nodes), inputs.anchor_token_ids)
        rows, found = tree.on_host(), follow_text(tree, continuation)
        num_accepted_tokens = np.bincount(rows.owners[found], minlength=len(keys)) - 1
        num_left = (continuation >= 0).sum(1).cpu().numpy()
        teaches = (num_accepted_tokens < num_left) & (num_left > 1)
        if on_round is not None:
            predicted = np.bincount(rows.owners, np.exp(rows.scores.astype(np.float64)), len(keys)) - 1
            on_round(SeenRound(predicted[teaches], num_accepted_tokens[teaches]))
        if is_calibrated:
            calibration.observe(tree, keys, teaches.tolist(), found)
        return torch.from_numpy(num_accepted_tokens).to(continuation.device)

    return accept


MAX_BATCH = 64
MAX_ROWS = 32_768
INGEST_ROWS = 512
EndCheck = Callable[[], bool]


class ShadowStoppedError(Exception):
    """Scoring ended early because its `should_stop` said so."""


@dataclass(slots=True)
class _Texts:
    """B logged texts on the drafter's device; request b owns pool rows first_rows[b] .. first_rows[b] + T_b - 1."""

    ids: list[str]
    histories: list[list[int]]
    tokens: torch.Tensor  # (B, longest T) int64, padded with -1
    lengths: torch.Tensor  # (B,) int64
    prompt_lens: torch.Tensor  # (B,) int64
    temperatures: torch.Tensor  # (B,) float32
    features: torch.Tensor  # (sum T, m * Dm); a text's last row is undefined (never drafted from)
    first_rows: torch.Tensor  # (B,) int64

    @classmethod
    def pack(cls, traces: Sequence[RequestTrace], device: torch.device | str) -> _Texts:
        lengths = torch.tensor([len(t.token_ids) for t in traces])
        texts = [torch.tensor(t.token_ids) for t in traces]
        tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1)
        rows = [torch.nn.functional.pad(torch.as_tensor(t.features), (0, 0, 0, 1)) for t in traces]
        return cls(
            ids=[f"shadow-{i}-{t.request_id}" for i, t in enumerate(traces)],
            histories=[list(t.token_ids) for t in traces],
            tokens=tokens.to(device),
            lengths=lengths.to(device),
            prompt_lens=torch.tensor([t.prompt_len for t in traces], device=device),
            temperatures=torch.tensor([t.temperature for t in traces], dtype=torch.float32, device=device),
            features=torch.cat(rows).to(device),
            first_rows=(lengths.cumsum(0) - lengths).to(device),
        )

    def inputs(self, which: torch.Tensor, start: torch.Tensor, stop: torch.Tensor) -> DraftInputs:
        """Drafter inputs of requests `which` (B',) with new rows start..stop-1 (B',); the anchor sits at `stop`."""
        counts = stop - start
        cu_new = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        owner = torch.repeat_interleave(torch.arange(which.numel(), device=which.device), counts)
        positions = torch.arange(int(cu_new[-1]), device=which.device) - cu_new[owner] + start[owner]
        slots = self.first_rows[which[owner]] + positions
        chosen, ends = which.tolist(), stop.tolist()
        return DraftInputs(
            request_ids=[self.ids[b] for b in chosen],
            context_lens=stop,
            anchor_token_ids=self.tokens[which, stop],
            temperatures=self.temperatures[which],
            slot_table=self.first_rows[which, None] + torch.arange(max(ends), device=which.device),
            cu_new=cu_new,
            new_positions=positions,
            new_token_ids=self.tokens[which[owner], positions + 1],
            new_features=self.features[slots],
            new_slots=slots,
            histories=[self.histories[b][: n + 1] for b, n in zip(chosen, ends, strict=True)],
        )


def usable_traces(traces: Sequence[RequestTrace]) -> list[RequestTrace]:
    """Traces that hold at least one round: two output tokens or more."""
    return [t for t in traces if len(t.token_ids) - t.prompt_len >= 2]


def _batches(traces: Sequence[RequestTrace], max_batch: int, max_rows: int) -> Iterator[list[int]]:
    batch: list[int] = []
    rows = 0
    for i in sorted(range(len(traces)), key=lambda i: len(traces[i].token_ids)):
        if batch and (len(batch) == max_batch or rows + len(traces[i].token_ids) > max_rows):
            yield batch
            batch, rows = [], 0
        batch.append(i)
        rows += len(traces[i].token_ids)
    if batch:
        yield batch


def _walk(
    drafter: Drafter, texts: _Texts, accept_round: AcceptRound, should_stop: EndCheck, ingest_rows: int
) -> list[list[int]]:
    num = len(texts.ids)
    everyone = torch.arange(num, device=texts.lengths.device)
    done, width = torch.zeros_like(texts.prompt_lens), max(1, ingest_rows // num)
    while bool((done < texts.prompt_lens - 1).any()):  # the last prompt row comes with the first round
        which = everyone[done < texts.prompt_lens - 1]
        stop = torch.minimum(done[which] + width, texts.prompt_lens[which] - 1)
        drafter.ingest(texts.inputs(which, done[which], stop))
        done[which] = stop
    accepted: list[list[int]] = [[] for _ in range(num)]
    anchors = texts.prompt_lens.clone()
    active = everyone
    depth = torch.arange(1, drafter.caps.max_depth + 2, device=anchors.device)
    padded = torch.nn.functional.pad(texts.tokens, (0, drafter.caps.max_depth + 1), value=-1)
    while active.numel():
        if should_stop():
            raise ShadowStoppedError
        at = anchors[active]
        inputs = texts.inputs(active, done[active], at)
        num_accepted_tokens = accept_round(drafter, inputs, padded[active[:, None], at[:, None] + depth])
        for b, a in zip(active.tolist(), num_accepted_tokens.tolist(), strict=True):
            accepted[b].append(a)
        done[active] = at
        anchors[active] = at + num_accepted_tokens + 1
        active = active[anchors[active] < texts.lengths[active] - 1]
    for request_id in texts.ids:
        drafter.release(request_id)
    return accepted


@torch.inference_mode()
def replay_rounds(
    drafter: Drafter,
    traces: Sequence[RequestTrace],
    accept_round: AcceptRound,
    *,
    device: torch.device | str = "cpu",
    should_stop: EndCheck = lambda: False,
    max_batch: int = MAX_BATCH,
    max_rows: int = MAX_ROWS,
    ingest_rows: int = INGEST_ROWS,
) -> list[list[int]]:
    """Walk each text with the drafter; return num_accepted_tokens of every round of every trace, in order.

    The last round counts only what the text still held. Allocates the drafter's KV. Traces without a round give [].

    Args:
        max_batch: texts walked at once; max_rows: their tokens in all, for which the drafter holds KV.
        ingest_rows: rows of prompts that the drafter takes in one call.
    Raises: DrafterMismatchError when the drafter's log-probabilities are not numbers; ShadowStoppedError on `should_stop`.
    """
    chosen = [i for i, t in enumerate(traces) if len(t.token_ids) - t.prompt_len >= 2]
    batches = [[chosen[j] for j in b] for b in _batches([traces[i] for i in chosen], max_batch, max_rows)]
    out: list[list[int]] = [[] for _ in traces]
    if batches:
        drafter.alloc(max(sum(len(traces[i].token_ids) for i in b) for b in batches))
    for batch in batches:
        texts = _Texts.pack([traces[i] for i in batch], device)
        rounds = _walk(drafter, texts, accept_round, should_stop, ingest_rows)
        for i, r in zip(batch, rounds, strict=True):
            out[i] = r
    return out


def unseen_tokens(traces: Sequence[RequestTrace], rounds: Sequence[Sequence[int]]) -> list[float]:
    """Expected tokens of each trace's last round beyond the end of its text; 0 where the text held the whole round.

    acceptance_length counts rounds before truncation, but the replay sees only what the text held: a last round that
    accepted all that was left is cut. What lies beyond is the mean of the version's rounds that got at least as far,
    where cut rounds speak only of the depths that their text shows (product-limit estimate). A text that ended at its
    token limit with one token to go was not drafted for, as in the engine, and has nothing beyond.
    Source: Kaplan and Meier 1958, "Nonparametric Estimation from Incomplete Observations".

    Args:
        traces: usable traces, each with at least one round.
        rounds: num_accepted_tokens of their rounds, as `replay_rounds` gives them.
    """
    cuts: list[int | None] = []  # accepted tokens of a cut last round
    seen: list[int] = []  # of the rounds that are whole
    for trace, accepted in zip(traces, rounds, strict=True):
        left = len(trace.token_ids) - trace.prompt_len - 1 - sum(a + 1 for a in accepted[:-1])
        is_undrafted = left == 1 and trace.finish_reason == "length"
        is_cut = accepted[-1] >= left and not is_undrafted
        cuts.append(left if is_cut else None)
        seen += accepted[:-1] if is_cut or is_undrafted else accepted
    known_cuts = [c for c in cuts if c is not None]
    deepest = max([*seen, *known_cuts], default=0)
    beyond = [1.0] * (deepest + 1)  # beyond[c]: the bonus token and the draft tokens accepted after c
    for depth in range(deepest, 0, -1):
        reached = sum(a >= depth for a in seen) + sum(c >= depth for c in known_cuts)
        at_risk = reached + sum(a == depth - 1 for a in seen)
        beyond[depth - 1] = 1.0 + (reached / at_risk if at_risk else 0.0) * beyond[depth]
    return [0.0 if c is None else beyond[c] for c in cuts]


def shadow_scores(
    drafters: Mapping[str, Drafter],
    traces: Sequence[RequestTrace],
    *,
    num_nodes: int,
    max_frontier: int = 4,
    is_calibrated: bool = True,
    bundle_width: int | None = None,
    on_round: Callable[[SeenRound], None] | None = None,
    device: torch.device | str = "cpu",
    should_stop: EndCheck = lambda: False,
) -> dict[str, list[RequestScore]]:
    """Score versions on the same texts with the same tree policy.

    Args:
        drafters: version -> drafter; their KV is allocated anew.
        traces: logged requests of one bucket; those without a round are left out for every version alike.
        num_nodes: draft nodes per request and round, equal for all versions.
        max_frontier: leaves of a block that a re-entrant drafter continues from.
        is_calibrated: learn the score calibration as the engine does while it serves; False scores the drafter's own
            probabilities.
        bundle_width, on_round: as for `fixed_rounds`.
    Returns: version -> one RequestScore per usable trace, in the order of the traces.
    Raises: as replay_rounds.
    """
    kept = usable_traces(traces)
    out: dict[str, list[RequestScore]] = {}
    for version, drafter in drafters.items():
        accept_round = fixed_rounds(
            num_nodes, max_frontier, is_calibrated=is_calibrated, bundle_width=bundle_width, on_round=on_round
        )
        rounds = replay_rounds(drafter, kept, accept_round, device=device, should_stop=should_stop)
        out[version] = request_scores(kept, rounds)
    return out


def request_scores(traces: Sequence[RequestTrace], rounds: Sequence[Sequence[int]]) -> list[RequestScore]:
    """Scores of usable traces, in their order. rounds: as `replay_rounds` gives them."""
    return [
        RequestScore(t.request_id, len(t.token_ids) - t.prompt_len - 1, len(r), unseen)
        for t, r, unseen in zip(traces, rounds, unseen_tokens(traces, rounds), strict=True)
    ]
