"""Draws: the token that the target draws at a row.

Shape legend: B requests, N rows (several per request), V vocabulary, E extra tokens of a row, R subset of rows.
Processed distribution: logit bias -> limits and grammar mask -> penalties -> temperature -> top-k -> top-p -> min-p. The
filters so see only tokens that limits and grammar allow. Draws are inverse-CDF in token order with one uniform per (seed, position), so a
seeded request draws the same tokens whatever the tree, batch or drafter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from paceline.errors import RequestError
from paceline.serving.sampling.bans import bans_of
from paceline.serving.sampling.grammar_state import GrammarState
from paceline.serving.sampling.request import SamplingParams

_CHUNK = 64  # tokens per partial sum of the inverse CDF
_PROBE = 256  # most likely tokens looked at first for top-p and min-p; a full sort only when they do not suffice
_MAX_DRAWN = 2**25
"""Logits that are drawn from together: penalties and filters need six times their memory meanwhile, 800 MB."""
_BELOW_ONE = 1.0 - 2.0**-50


class TokenCounts:
    """Tokens seen by one request, for its penalties; the engine keeps one per request with `has_penalties(params)`.

    repetition_penalty looks at prompt and output, presence and frequency penalties at the output only.
    """

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        self.is_in_prompt = torch.zeros(vocab_size, dtype=torch.bool)  # (V,)
        self.is_in_prompt[torch.as_tensor(list(prompt_token_ids), dtype=torch.int64)] = True
        self.num_in_output = torch.zeros(vocab_size, dtype=torch.float32)  # (V,)

    def move_to(self, device: torch.device | str) -> None:
        """Be on a device from now on; made on the host."""
        self.is_in_prompt, self.num_in_output = self.is_in_prompt.to(device), self.num_in_output.to(device)

    def add(self, token_ids: Iterable[int]) -> None:
        """Count emitted output tokens (call for every emitted token, the newest anchor included)."""
        ids = torch.as_tensor(list(token_ids), dtype=torch.int64, device=self.num_in_output.device)
        self.num_in_output.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))


def has_penalties(params: SamplingParams) -> bool:
    """Whether the request needs TokenCounts."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class TokenLimits:
    """The tokens that one request may draw at a position, behind its own tokens; the engine keeps one per request with
    `has_limits(params)`.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_len: int,
        stop_token_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        """stop_token_ids: all that end the answer; not drawn before it has min_tokens.

        Raises: RequestError where ids are unknown or no token is left to be drawn.
        """
        always = early = _allowed(params.allowed_token_ids, vocab_size)
        self.bans = bans_of(params.bad_words, vocab_size)
        if self.bans.always:
            always = early = always.clone()
            always[self.bans.always] = False
        if params.min_tokens:
            early = always.clone()
            early[[t for t in stop_token_ids if 0 <= t < vocab_size]] = False
        if not early.any():
            raise RequestError(
                "allowed_token_ids must hold a token that does not end the answer where min_tokens is given, and that "
                "bad_words does not ban, got none"
            )
        if self.bans.reach:
            left = early.clone()
            left[self.bans.completing] = False
            if not left.any():  # somewhere on its way the answer could have no next token
                raise RequestError("bad_words must leave a token that is the end of none of them, got none")
        self._newest: list[int] = []  # of the output, as far back as the bans look
        self.until = prompt_len + params.min_tokens
        """Position of the first output token that may end the answer."""
        self.always = always  # (V,) bool
        self.early = early  # (V,) bool, before `until`

    def move_to(self, device: torch.device | str) -> None:
        """Be on a device from now on; made on the host."""
        self.always, self.early = self.always.to(device), self.early.to(device)

    def add(self, token_ids: Sequence[int]) -> None:
        """Note emitted output tokens (call for every one of them, the newest anchor included)."""
        if self.bans.reach:
            self._newest = [*self._newest, *token_ids][-self.bans.reach :]

    def held_back(self, path: Sequence[int]) -> list[int]:
        """Tokens that `bad_words` bans behind the output and the uncommitted tokens `path`, besides those of the masks."""
        return self.bans.behind([*self._newest, *path])


@lru_cache(maxsize=4)
def _allowed(token_ids: tuple[int, ...], vocab_size: int) -> torch.Tensor:
    """(V,) bool, True at these ids, or everywhere for (); shared by the choices of a body, so not to be changed."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        bad = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise RequestError(f"allowed_token_ids must be in [0, {vocab_size}), got {bad}")
    found = torch.full((vocab_size,), not token_ids)
    found[list(token_ids)] = True
    return found


def has_limits(params: SamplingParams) -> bool:
    """Whether the request needs TokenLimits; in a grammar its state bans words."""
    return (
        params.min_tokens > 0 or bool(params.allowed_token_ids) or (bool(params.bad_words) and params.grammar is None)
    )


@dataclass(kw_only=True, slots=True)
class SamplingBatch:
    """Sampling settings of B requests as tensors; immutable, so cache it while the batch stays the same."""

    temperatures: torch.Tensor  # (B,) float32, 0 = greedy
    top_ks: torch.Tensor  # (B,) int64, V-or-more when off
    top_ps: torch.Tensor  # (B,) float64
    min_ps: torch.Tensor  # (B,) float32
    repetition: torch.Tensor  # (B,) float32
    presence: torch.Tensor  # (B,) float32
    frequency: torch.Tensor  # (B,) float32
    seeds: torch.Tensor  # (B,) int64, hashed
    counts: list[TokenCounts | None]  # (B,)
    is_greedy: list[bool]  # (B,)
    is_filtered: list[bool]  # (B,) top-k, top-p or min-p in force
    is_penalised: list[bool]  # (B,)
    biases: list[tuple[torch.Tensor, torch.Tensor] | None]  # (B,) token ids (K,) int64 and what to add (K,) float32
    limits: list[TokenLimits | None]  # (B,)
    grammars: list[GrammarState | None]  # (B,) draws follow their state; the caller moves it (`advance`)
    has_grammars: bool
    reads_paths: bool
    """Whether some draw depends on the uncommitted tokens above its row: penalties, words that are banned."""
    is_all_greedy: bool
    """Every request greedy without biases, limits, grammars and penalties: one argmax is enough."""

    @staticmethod
    def from_params(
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        counts: Sequence[TokenCounts | None] | None = None,
        device: torch.device | str = "cpu",
        grammars: Sequence[GrammarState | None] | None = None,
        limits: Sequence[TokenLimits | None] | None = None,
    ) -> SamplingBatch:
        """Collect settings; `seeds` are any ints (the engine draws one when params.seed is None).

        `counts` must hold a TokenCounts for every request with penalties, `grammars` a state for every request with a
        grammar and `limits` TokenLimits for every request that has some; ValueError otherwise.
        """
        counts = [None] * len(params) if counts is None else list(counts)
        is_penalised = [has_penalties(p) for p in params]
        if len(counts) != len(params) or len(seeds) != len(params):
            raise ValueError(f"seeds and counts must have one entry per request, got {len(seeds)} and {len(counts)}")
        if any(p and c is None for p, c in zip(is_penalised, counts, strict=True)):
            raise ValueError("counts must hold TokenCounts for every request with penalties, got None")
        grammars = [None] * len(params) if grammars is None else list(grammars)
        if any((p.grammar is None) != (g is None) for p, g in zip(params, grammars, strict=True)):
            raise ValueError("grammars must hold a GrammarState for exactly the requests with a grammar")
        limits = [None] * len(params) if limits is None else list(limits)
        if any(has_limits(p) != (own is not None) for p, own in zip(params, limits, strict=True)):
            raise ValueError("limits must hold TokenLimits for exactly the requests that have some")
        is_greedy = [p.temperature == 0.0 for p in params]
        has_grammars = any(g is not None for g in grammars)
        is_plain = not (any(is_penalised) or has_grammars or any(p.logit_bias or has_limits(p) for p in params))

        def f32(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return SamplingBatch(
            temperatures=f32([p.temperature for p in params]),
            top_ks=torch.tensor([p.top_k or 2**40 for p in params], dtype=torch.int64, device=device),
            top_ps=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            min_ps=f32([p.min_p for p in params]),
            repetition=f32([p.repetition_penalty for p in params]),
            presence=f32([p.presence_penalty for p in params]),
            frequency=f32([p.frequency_penalty for p in params]),
            seeds=torch.tensor([_to_int64(_mix_number(s)) for s in seeds], dtype=torch.int64, device=device),
            counts=counts,
            is_greedy=is_greedy,
            is_filtered=[p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0) for p in params],
            is_penalised=is_penalised,
            biases=[
                (torch.tensor([t for t, _ in p.logit_bias], device=device), f32([b for _, b in p.logit_bias]))
                if p.logit_bias
                else None
                for p in params
            ],
            limits=limits,
            grammars=grammars,
            has_grammars=has_grammars,
            reads_paths=any(is_penalised) or any(own is not None and own.bans.reach > 0 for own in limits),
            is_all_greedy=all(is_greedy) and is_plain,
        )

    def to(self, device: torch.device) -> SamplingBatch:
        """The same settings on a device; themselves where they are there."""
        if self.seeds.device == device:
            return self
        tensors: dict[str, Any] = {
            f.name: value.to(device) for f in fields(self) if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        biases = [bias and (bias[0].to(device), bias[1].to(device)) for bias in self.biases]
        return replace(self, **tensors, biases=biases)

    def rewind(self) -> None:
        """Take every grammar back to the committed tokens of its request."""
        for grammar in self.grammars:
            if grammar is not None:
                grammar.rewind()

    def advance(self, owners: Iterable[int], token_ids: Iterable[int]) -> None:
        """Move the grammars of requests `owners` over the tokens just drawn for them."""
        for owner, token_id in zip(owners, token_ids, strict=True):
            grammar = self.grammars[owner]
            if grammar is not None:
                grammar.advance(token_id)

    def uniforms(self, owner: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One uniform in [0, 1) per (seed, position): float64, the shape of owner and positions broadcast.

        Source: splitmix64 (Steele, Lea, Flood 2014) as a counter-based hash, applied to the hashed seed plus the position.
        """
        bits = _mix(self.seeds[owner] + positions * _GOLDEN)
        return _shift(bits, 11).double() * 2.0**-53

    def uniforms_of_one(self, first: int, offsets: Sequence[int]) -> torch.Tensor:
        """`uniforms` of a lone request at positions first + offsets, which repeat: (N,) float64 on the CPU.

        In Python numbers, because two dozen tensor operators take longer than a few dozen multiplications.
        """
        seed = int(self.seeds[0])
        found = {offset: _uniform(seed + (first + offset) * _GOLDEN) for offset in set(offsets)}
        return torch.tensor([found[offset] for offset in offsets], dtype=torch.float64)


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # int64 tensors wrap, so the constants are the two's complement
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_ALL_BITS = 2**64 - 1


def _to_int64(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _mix_number(x: int) -> int:
    """`_mix` of any int, in Python numbers: 64 bits without a sign."""
    x = (x + _GOLDEN) & _ALL_BITS
    x = ((x ^ (x >> 30)) * _MIX_1) & _ALL_BITS
    x = ((x ^ (x >> 27)) * _MIX_2) & _ALL_BITS
    return x ^ (x >> 31)


def _uniform(x: int) -> float:
    """The uniform of `_mix_number`."""
    return (_mix_number(x) >> 11) * 2.0**-53


def argmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """Index of the largest logit of each row, first one on ties. (N, V) -> (N,) int64."""
    if logits.device.type == "cpu" and not logits.requires_grad:
        return torch.from_numpy(logits.numpy().argmax(-1))  # 25 times faster than torch's argmax on CPU
    return logits.argmax(-1)


def draw_tokens(
    logits: torch.Tensor,
    owner: torch.Tensor,
    positions: torch.Tensor,
    batch: SamplingBatch,
    extra_token_ids: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    owner_list: list[int] | None = None,
) -> torch.Tensor:
    """Draw one token per row from the request's processed distribution; greedy requests take the argmax.

    A request with a grammar may have one row: the one behind the tokens that its grammar's state stands for.

    Args:
        logits: (N, V) float32; not modified.
        owner: (N,) int64, request index of each row.
        positions: (N,) int64, position of the token drawn.
        extra_token_ids: (N, E) int64, -1 between and behind them: uncommitted tree tokens above the row (root excluded) as
            they follow one another, for penalties and banned words; None = there are none.
        uniforms: (N,) float64, when the caller has computed batch.uniforms(owner, positions) already.
        owner_list: `owner` on the host, where the caller knows it.
    Returns: (N,) int64.  Syncs: reads owner unless owner_list is given, extra_token_ids where words are banned, and off the
        CPU three numbers or more where requests filter.
    """
    if batch.is_all_greedy:
        return argmax_rows(logits)
    owner_list = owner.tolist() if owner_list is None else owner_list
    step = max(_MAX_DRAWN // logits.shape[1], 1)
    if len(owner_list) > step:
        parts = [slice(start, start + step) for start in range(0, len(owner_list), step)]
        return torch.cat(
            [
                draw_tokens(
                    logits[p], owner[p], positions[p], batch, None if extra_token_ids is None else extra_token_ids[p],
                    None if uniforms is None else uniforms[p], owner_list[p],
                )
                for p in parts
            ]
        )  # fmt: skip
    logits = _bias(logits, owner_list, batch)
    logits = _limit(logits, owner_list, positions, batch, extra_token_ids)
    if batch.has_grammars:
        logits = _mask(logits, owner_list, batch)
    if any(batch.is_penalised):
        logits = _penalise(logits, owner_list, batch, extra_token_ids)
    sampled = [i for i, b in enumerate(owner_list) if not batch.is_greedy[b]]
    if len(sampled) == len(owner_list):
        return _draw(logits, owner, owner_list, positions, batch, uniforms)
    token_ids = argmax_rows(logits)
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        part = None if uniforms is None else uniforms[rows]
        of = [owner_list[i] for i in sampled]
        token_ids[rows] = _draw(logits[rows], owner[rows], of, positions[rows], batch, part)
    return token_ids


def _draw(
    logits: torch.Tensor,
    owner: torch.Tensor,
    owner_list: list[int],
    positions: torch.Tensor,
    batch: SamplingBatch,
    uniforms: torch.Tensor | None,
) -> torch.Tensor:
    weights = logits - logits.amax(-1, keepdim=True)  # subtract first: a tiny temperature must not overflow
    weights = weights.div_(batch.temperatures[owner][:, None]).exp_()
    if any(batch.is_filtered):
        filtered = [i for i, b in enumerate(owner_list) if batch.is_filtered[b]]
        if filtered:
            rows = torch.tensor(filtered, device=logits.device)
            weights[rows] = _filter(weights[rows], owner[rows], batch)
    if uniforms is None:
        uniforms = batch.uniforms(owner, positions)
    return _inverse_cdf(weights, uniforms)


def draw_captured(
    logits: torch.Tensor, owner: torch.Tensor, positions: torch.Tensor, batch: SamplingBatch, *, has_filters: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw_tokens` without host reads, of requests without biases, limits, grammars and penalties.

    Args:
        logits, owner, positions: as for draw_tokens.
        batch: its tensors alone are read.
        has_filters: whether top-k, top-p and min-p are looked at.
    Returns: tokens (N,) int64, and whether each is right, (N,) bool: filters look at the likeliest tokens only.
    Syncs: none.
    """
    temperatures = batch.temperatures[owner]
    weights = logits - logits.amax(-1, keepdim=True)
    weights = weights.div_(torch.where(temperatures > 0, temperatures, 1.0)[:, None]).exp_()
    is_right = torch.ones_like(owner, dtype=torch.bool)
    if has_filters:
        vocab = weights.shape[1]
        best = weights.topk(min(vocab, _PROBE), dim=-1).values
        num = _num_kept(best, weights.sum(-1, dtype=torch.float64), owner, batch, vocab)
        is_right = _suffices(num, best.shape[1], owner, batch, vocab)
        kept, surplus = _kept(weights, best, num)
        weights = weights * (_without_surplus(weights, best, num, kept, surplus) | (num >= vocab)[:, None])
    drawn = _inverse_cdf(weights, batch.uniforms(owner, positions))
    return torch.where(temperatures > 0, drawn, logits.argmax(-1)), is_right | (temperatures <= 0)


def _bias(logits: torch.Tensor, owner_list: list[int], batch: SamplingBatch) -> torch.Tensor:
    """Logits with the numbers that requests add to tokens' logits (OpenAI's logit_bias)."""
    found = [(i, bias) for i, b in enumerate(owner_list) if (bias := batch.biases[b]) is not None]
    if not found:
        return logits
    rows = torch.tensor([i for i, (ids, _) in found for _ in range(ids.numel())], device=logits.device)
    token_ids, values = (torch.cat(column) for column in zip(*(bias for _, bias in found), strict=True))
    return logits.index_put((rows, token_ids), values, accumulate=True)


def _limit(
    logits: torch.Tensor, owner_list: list[int], positions: torch.Tensor, batch: SamplingBatch,
    extra_token_ids: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Logits with -inf for the tokens that a request's limits do not allow at the row's position behind its path."""
    found = [(i, limits) for i, b in enumerate(owner_list) if (limits := batch.limits[b]) is not None]
    if not found:
        return logits
    rows = torch.tensor([i for i, _ in found], device=logits.device)
    is_early = positions[rows] < torch.tensor([limits.until for _, limits in found], device=logits.device)
    early, always = (torch.stack([getattr(limits, name) for _, limits in found]) for name in ("early", "always"))
    is_allowed = torch.where(is_early[:, None], early, always)  # (R, V)
    if any(limits.bans.reach for _, limits in found):
        paths = [()] * len(found) if extra_token_ids is None else extra_token_ids[rows].tolist()
        for line, ((_, limits), path) in enumerate(zip(found, paths, strict=True)):
            held_back = limits.held_back([t for t in path if t >= 0])
            if held_back:
                is_allowed[line, held_back] = False
    return logits.index_put((rows,), logits[rows].masked_fill(~is_allowed, -torch.inf))


def _mask(logits: torch.Tensor, owner_list: list[int], batch: SamplingBatch) -> torch.Tensor:
    """Logits with -inf for the tokens that a request's grammar does not allow next."""
    states = ((i, batch.grammars[b]) for i, b in enumerate(owner_list))
    found = [(i, mask) for i, state in states if state is not None and (mask := state.allowed()) is not None]
    if not found:
        return logits
    rows = torch.tensor([i for i, _ in found], device=logits.device)
    is_allowed = torch.from_numpy(np.stack([mask for _, mask in found])).to(logits.device)  # (R, V)
    return logits.index_put((rows,), logits[rows].masked_fill(~is_allowed, -torch.inf))


def _penalise(
    logits: torch.Tensor, owner_list: list[int], batch: SamplingBatch, extra_token_ids: torch.Tensor | None
) -> torch.Tensor:
    """Repetition (CTRL, arXiv 1909.05858 section 4.1), presence and frequency penalties on the rows that have them."""
    picked = [i for i, b in enumerate(owner_list) if batch.is_penalised[b]]
    if not picked:
        return logits
    counts = [c for c in (batch.counts[owner_list[i]] for i in picked) if c is not None]
    rows = torch.tensor(picked, device=logits.device)
    of = torch.tensor([owner_list[i] for i in picked], device=logits.device)
    num = torch.stack([c.num_in_output for c in counts])  # (R, V)
    if extra_token_ids is not None and extra_token_ids.shape[1] > 0:
        extra = extra_token_ids[rows]
        num = num.scatter_add(1, extra.clamp(min=0), (extra >= 0).float())
    seen = num > 0
    x = logits[rows]
    factor = batch.repetition[of][:, None]
    x = torch.where(torch.stack([c.is_in_prompt for c in counts]) | seen, torch.where(x > 0, x / factor, x * factor), x)
    x = x - batch.presence[of][:, None] * seen - batch.frequency[of][:, None] * num
    logits = logits.clone()
    logits[rows] = x
    return logits


def _filter(weights: torch.Tensor, owner: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Zero what top-k, top-p and min-p drop; weights (R, V) with maximum 1.

    Every rule keeps a prefix of the tokens sorted by falling weight (ties: lower token id first), so the kept prefix is
    the shortest of the three.
    """
    vocab = weights.shape[1]
    top_k = batch.top_ks[owner].clamp(1, vocab)
    is_host = _sorts_on_host(weights)
    width = vocab if is_host else min(vocab, max(_PROBE, int(torch.where(top_k < vocab, top_k, 0).max())))
    total = weights.sum(-1, dtype=torch.float64)
    while True:
        if is_host:  # numpy's vectorised sort of everything is faster than torch's topk of 256
            ordered = torch.from_numpy(np.sort(weights.numpy(), axis=-1)[:, ::-1].copy())
        else:
            ordered = weights.topk(width, dim=-1).values
        num = _num_kept(ordered, total, owner, batch, vocab)
        if width == vocab or bool(_suffices(num, width, owner, batch, vocab).all()):
            break
        width = vocab
    kept, surplus = _kept(weights, ordered, num)
    if bool((surplus > 0).any()):
        kept = _without_surplus(weights, ordered, num, kept, surplus)
    # a row of which all stays may have more tokens than were looked at
    return weights * (kept | (num >= vocab)[:, None])


def _sorts_on_host(weights: torch.Tensor) -> bool:
    return weights.device.type == "cpu"


def _num_kept(
    ordered: torch.Tensor, total: torch.Tensor, owner: torch.Tensor, batch: SamplingBatch, vocab: int
) -> torch.Tensor:
    """How many tokens of each row stay, (R,) int64, V of a row without filters; right where `_suffices` says so.

    ordered: (R, width) weights, falling, as many as were looked at. total: (R,) of all weights.
    """
    width, top_k = ordered.shape[1], batch.top_ks[owner].clamp(1, vocab)
    top_p = batch.top_ps[owner]
    cum = ordered.cumsum(-1, dtype=torch.float64)
    # top-p renormalises over what top-k kept
    kept_total = torch.where(top_k <= width, cum.gather(1, (top_k.clamp(max=width) - 1)[:, None])[:, 0], total)
    num_p = 1 + (cum < (top_p * kept_total)[:, None]).sum(-1)  # the token that crosses top_p is kept
    num_p = torch.where(top_p >= 1.0, vocab, num_p)
    num_min = (ordered >= batch.min_ps[owner][:, None]).sum(-1)
    num_min = torch.where(batch.min_ps[owner] > 0, num_min, vocab)
    return torch.minimum(torch.minimum(num_p, num_min), top_k).clamp(1, vocab)


def _suffices(num: torch.Tensor, width: int, owner: torch.Tensor, batch: SamplingBatch, vocab: int) -> torch.Tensor:
    """Whether the `width` likeliest tokens tell which stay, (R,) bool. num: (R,) of `_num_kept`."""
    top_k = batch.top_ks[owner].clamp(1, vocab)
    is_off = (top_k >= vocab) & (batch.top_ps[owner] >= 1.0) & (batch.min_ps[owner] <= 0)
    is_settled = (num < width) | (num == top_k) | (width >= vocab)
    return is_off | (is_settled & ((top_k <= width) | (top_k >= vocab)))


def _kept(weights: torch.Tensor, ordered: torch.Tensor, num: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens weigh as much as the last that stays (R, V), and how many too many those are (R,)."""
    kept = weights >= _threshold(ordered, num)
    return kept, kept.sum(-1) - num


def _without_surplus(
    weights: torch.Tensor, ordered: torch.Tensor, num: torch.Tensor, kept: torch.Tensor, surplus: torch.Tensor
) -> torch.Tensor:
    """Of ties at the threshold the lower token ids stay."""
    tied = weights == _threshold(ordered, num)
    num_tied = tied.sum(-1) - surplus
    return kept & (~tied | (tied.cumsum(-1) <= num_tied[:, None]))


def _threshold(ordered: torch.Tensor, num: torch.Tensor) -> torch.Tensor:
    return ordered.gather(1, (num.clamp(max=ordered.shape[1]) - 1)[:, None])


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """First token whose cumulative weight exceeds uniform x total, in float64, by chunk and then inside the chunk."""
    num_rows, vocab = weights.shape
    if vocab % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, _CHUNK - vocab % _CHUNK))
    chunks = weights.view(num_rows, -1, _CHUNK)
    cum = chunks.sum(-1, dtype=torch.float64).cumsum(-1)  # (N, V / 64)
    goal = uniforms.clamp(max=_BELOW_ONE) * cum[:, -1]
    index = (cum <= goal[:, None]).sum(-1)  # < number of chunks because goal < cum[-1]
    before = torch.where(index > 0, cum.gather(1, (index - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = chunks.gather(1, index[:, None, None].expand(-1, 1, _CHUNK))[:, 0].cumsum(-1, dtype=torch.float64)
    # rounding must not step past the chunk's last possible token
    goal = torch.minimum(goal - before, inside[:, -1] * _BELOW_ONE)
    return index * _CHUNK + (inside <= goal[:, None]).sum(-1)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unprocessed log-probabilities at temperature 1.

    logits (N, V) float32, token_ids (N,) int64. Returns those of the given tokens (N,) float32, and the top k:
    ids (N, k) int64 and values (N, k) float32, falling.
    """
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(min(k, logits.shape[1]), dim=-1)
    return logprobs.gather(1, token_ids[:, None])[:, 0], top.indices, top.values


def token_ranks(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """(N,) int64, how many tokens of a row (N, V) are at least as likely as its given one (N,), itself included."""
    return (logits >= logits.gather(1, token_ids[:, None])).sum(-1)
