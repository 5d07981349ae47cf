"""Banned words: no answer has one, tokens are drawn by the target's law without what would complete one, drafted or not."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from paceline.errors import RequestError
from paceline.serving.engine.graphed import draw_kind
from paceline.serving.sampling.bans import Bans, spellings
from paceline.serving.sampling.draw import SamplingBatch, TokenLimits, draw_tokens
from paceline.serving.sampling.request import MAX_BANS, GenerationRequest, GrammarSpec, SamplingParams
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import accept, draw_all, verify
from tests.helpers.constrained import PROMPT, VOCAB, Answers, factory, ids, make_drafter, make_engine, run, submit
from tests.helpers.fakes import tiny_tokenizer

FREE = {"ignore_eos": True, "max_tokens": 40}
KINDS: dict[str, dict] = {
    "greedy": {**FREE, "temperature": 0.0},
    "sampled": {**FREE, "temperature": 1.0, "seed": 5},
    "filtered": {**FREE, "temperature": 1.0, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.5},
    "few": {**FREE, "temperature": 1.0, "seed": 7, "allowed_token_ids": tuple(range(10, 16)), "min_tokens": 3},
}


def answer(drafter=None, **params) -> list[int]:
    engine, answers = make_engine(drafter), Answers()
    submit(engine, answers, "r", **params)
    run(engine)
    return answers.tokens["r"]


def holds(tokens: Sequence[int], banned: Sequence[int]) -> bool:
    return any(tuple(tokens[i : i + len(banned)]) == tuple(banned) for i in range(len(tokens)))


def bans_of_answer(tokens: list[int]) -> tuple[tuple[int, ...], ...]:
    """Sequences of one to four tokens that an answer has, from its beginning, its midst and near its end."""
    cuts = [(tokens[5],), tuple(tokens[7:9]), tuple(tokens[12:15]), tuple(tokens[20:24]), tuple(tokens[30:32])]
    return tuple(dict.fromkeys(cuts))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_answer_has_a_banned_sequence(kind: str) -> None:
    free = answer(**KINDS[kind])
    for banned in bans_of_answer(free):
        got = answer(**KINDS[kind], bad_words=(banned,))
        first = next(i for i in range(len(free)) if tuple(free[i : i + len(banned)]) == banned) + len(banned) - 1
        assert holds(free, banned) and not holds(got, banned)
        if kind == "greedy":  # a mask moves other draws, too
            assert got[:first] == free[:first] and got[first] != free[first]
    assert answer(**KINDS[kind], bad_words=((60, 61, 62, 63, 60, 61, 62, 63, 60),)) == free, (
        "what is not met is not missed"
    )


@pytest.mark.parametrize("drafter", ["random", "oracle", "lookup"])
def test_drafting_batching_preemption_and_resuming_change_nothing(drafter: str) -> None:
    kinds = {
        name: {**params, "bad_words": bans_of_answer(answer(**params))}
        for name, params in KINDS.items()
        if name != "few"
    }
    kinds["few"] = {**KINDS["few"], "bad_words": ((11, 12), (13,), (10, 14, 15), (15, 15))}
    kinds["free"] = KINDS["greedy"]
    want = {name: answer(**params) for name, params in kinds.items()}
    texts = {name: [*PROMPT, *tokens] for name, tokens in want.items()}
    for config in ({"max_running": 1}, {"max_running": 6}, {"max_running": 6, "num_pages": 18}):
        engine, answers = make_engine(make_drafter(drafter, texts), **config), Answers()
        for name, params in kinds.items():
            submit(engine, answers, name, **params)
        run(engine)
        assert answers.tokens == want
        assert "num_pages" not in config or engine.scheduler.num_preemptions > 0
        if drafter == "oracle":
            assert all(e.stats.num_accepted_tokens > 5 for e in answers.last.values())
    for cut in (1, 6, 21):
        engine, answers = make_engine(make_drafter(drafter, texts)), Answers()
        for name, params in kinds.items():
            own = GenerationRequest(
                request_id=name, prompt_token_ids=PROMPT, params=SamplingParams(**params),
                resumed_token_ids=tuple(want[name][:cut]),
            )  # fmt: skip
            engine.submit(own, answers)
        run(engine)
        assert {name: want[name][:cut] + tokens for name, tokens in answers.tokens.items()} == want


def test_what_the_prompt_begins_is_not_held_back_and_what_it_repeats_is() -> None:
    forced = {"temperature": 0.0, "max_tokens": 3, "logit_bias": ((7, 100.0),)}
    assert answer(**forced, bad_words=((PROMPT[-1], 7),)) == [7, 7, 7]
    got = answer(**forced, bad_words=((7, 7),))
    assert got[0] == 7 != got[1] and got[2] == 7


def random_tree(vocab: int, seed: int) -> TreeBatch:
    """A tree of one request, at most 16 nodes and some levels deep, whose siblings differ."""
    rng = np.random.default_rng(seed)
    tokens, parents, depths = [int(rng.integers(3, vocab))], [-1], [0]
    for _ in range(15):
        parent, token = int(rng.integers(max(0, len(tokens) - 4), len(tokens))), int(rng.integers(3, vocab))
        if all((p, t) != (parent, token) for p, t in zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    ancestors = np.eye(len(tokens), dtype=bool)
    for row in range(1, len(tokens)):
        ancestors[row] |= ancestors[parents[row]]
    return TreeBatch(
        token_ids=torch.tensor(tokens), parents=torch.tensor(parents), depths=torch.tensor(depths),
        scores=torch.zeros(len(tokens)), cu_nodes=torch.tensor([0, len(tokens)]), ancestors=torch.from_numpy(ancestors),
    )  # fmt: skip


def test_every_node_of_a_tree_is_masked_for_its_own_path() -> None:
    """All nodes at once, level by level, and a plain loop over every node's own history draw the same tokens."""
    vocab, rng = 12, torch.Generator().manual_seed(1)
    num_met = 0
    for trial in range(60):
        tree = random_tree(vocab, trial)
        output = torch.randint(3, vocab, (4,), generator=rng).tolist()
        output[-1] = int(tree.token_ids[0])
        logits = torch.randn(tree.token_ids.numel(), vocab, generator=rng)
        bans = tuple(tuple(torch.randint(3, vocab, (n,), generator=rng).tolist()) for n in (1, 2, 2, 2, 3, 3, 3, 4))
        how = {"temperature": (trial % 2) * 1.0, "seed": trial, "min_p": (trial % 2) * 1e-12}  # min_p: level by level
        params = SamplingParams(**how, bad_words=bans)
        limits = TokenLimits(params, prompt_len=3, stop_token_ids=(), vocab_size=vocab)
        for token in output:
            limits.add([token])
        batch = SamplingBatch.from_params([params], [trial], limits=[limits])
        assert batch.reads_paths and not batch.is_all_greedy and draw_kind(batch) is None
        context = torch.tensor([3 + len(output) - 1])
        drawn = draw_all(tree, logits, batch, context).tolist()
        for row in range(len(drawn)):
            path = [int(tree.token_ids[j]) for j in tree.ancestors[row].nonzero()[1:, 0].tolist()]
            history = [*output, *path]
            bad = {b[-1] for b in bans if len(b) == 1 or tuple(history[1 - len(b) :]) == b[:-1]}
            num_met += len(bad) > 1
            masked = logits[row : row + 1].clone()
            masked[0, sorted(bad)] = -math.inf
            one = SamplingBatch.from_params([SamplingParams(**how)], [trial])
            at = context + int(tree.depths[row]) + 1
            assert draw_tokens(masked, torch.zeros(1, dtype=torch.int64), at, one).tolist() == [drawn[row]]
        assert verify(tree, logits, batch, context).on_host() == accept(tree, torch.tensor(drawn)).on_host()
    assert num_met > 30


def test_the_law_is_the_targets_renormalised_over_what_completes_no_word() -> None:
    """Integer weights: with the midpoints of a grid of sum(w) uniforms, w of them draw each token. Exact, two tokens deep."""
    vocab, bans = 6, ((3,), (4, 4), (4, 5), (5, 4))
    weights = torch.tensor([0, 0, 1, 2, 3, 2])
    params = SamplingParams(temperature=1.0, bad_words=bans)
    law: Counter[tuple[int, ...]] = Counter()

    def draws(history: list[int]) -> list[int]:
        limits = TokenLimits(params, prompt_len=1, stop_token_ids=(), vocab_size=vocab)
        batch = SamplingBatch.from_params([params], [0], limits=[limits])
        bad = {b[-1] for b in bans if len(b) == 1 or history[-1:] == [b[0]]}
        total = int(sum(w for t, w in enumerate(weights.tolist()) if t not in bad))
        points = (torch.arange(total, dtype=torch.float64) + 0.5) / total
        rows, path = (
            weights.float().log().expand(total, -1),
            torch.tensor([history] * total, dtype=torch.int64).reshape(total, len(history)),
        )
        owner = torch.zeros(total, dtype=torch.int64)
        return draw_tokens(rows, owner, owner + 1 + len(history), batch, path, points).tolist()

    for first in draws([]):
        law.update((first, second) for second in draws([first]))
    allowed = [p for p in itertools.product((2, 4, 5), repeat=2) if p not in bans]
    assert set(law) == set(allowed)
    for first in (2, 4, 5):
        own = {p: n for p, n in law.items() if p[0] == first}
        ratio = {n / int(weights[p[1]]) for p, n in own.items()}
        assert len(ratio) == 1, "in the proportions of the target"


def test_an_answer_in_a_grammar_has_no_banned_word_either_and_drafting_changes_nothing() -> None:
    spec = GrammarSpec(kind="regex", text="(ab|cd|ef){12}z")
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "grammar": spec}
    free = answer(**params)
    banned = (tuple(free[5:9]), tuple(free[1:3]))  # each ends where another pair may begin
    got = answer(**params, bad_words=banned)
    assert not any(holds(got, b) for b in banned) and len(got) == len(free)
    texts = {"r": [*PROMPT, *got]}
    for name in ("random", "oracle", "lookup"):
        assert answer(make_drafter(name, texts), **params, bad_words=banned) == got
    engine, answers = make_engine(), Answers()
    own = GenerationRequest(
        request_id="r", prompt_token_ids=PROMPT, params=SamplingParams(**params, bad_words=banned),
        resumed_token_ids=tuple(got[:5]),
    )  # fmt: skip
    engine.submit(own, answers)
    run(engine)
    assert got[:5] + answers.tokens["r"] == got


def test_a_form_that_needs_a_banned_word_ends_as_the_requests_own_fault() -> None:
    spec = GrammarSpec(kind="regex", text="[cd]{2}ab")
    engine, answers = make_engine(), Answers()
    submit(engine, answers, "r", grammar=spec, bad_words=(tuple(ids("ab")),))
    run(engine)
    last = answers.last["r"]
    assert last.finish_reason == "error" and last.is_own_fault and "without a bad word" in str(last.error)
    state = factory().start(spec, bad_words=(tuple(ids("ab")),))
    for token in ids("cda"):
        state.advance(token)
    assert state.allowed() is None
    state.keep(2)
    assert state.error is None and state.allowed() is not None, "the failure lies behind the tokens that were kept"


def test_words_are_banned_as_they_are_written_at_the_beginning_and_behind_a_space() -> None:
    tokenizer = tiny_tokenizer(300)

    def written(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    assert spellings(tokenizer, ["ab", "ü"]) == tuple(map(written, ("ab", " ab", "ü", " ü")))
    assert spellings(tokenizer, [" ab", "ab"]) == tuple(map(written, ("ab", " ab")))
    assert spellings(tokenizer, [" ", "\n"]) == tuple(map(written, (" ", "  ", "\n", " \n")))
    assert spellings(tokenizer, ["<|end|>"])[0] == (1,)
    assert spellings(tiny_tokenizer(VOCAB), ["Q"]) == (), "no answer can have what cannot be written"


def test_what_completes_a_sequence_is_found_whatever_its_length() -> None:
    bans = Bans([(5,), (3, 4), (9, 3, 4), (9, 3, 6)], VOCAB)
    assert (bans.always, bans.completing, bans.reach) == ([5], [4, 6], 2)
    assert bans.behind([]) == bans.behind([9]) == [] and bans.behind([3]) == [4]
    assert sorted(bans.behind([1, 9, 3])) == [4, 4, 6]


@pytest.mark.parametrize(
    "params",
    [
        {"bad_words": ((VOCAB,),)},
        {"bad_words": ((3, -1),)},
        {"bad_words": ((),)},
        {"bad_words": ((3,),) * (MAX_BANS + 1)},
        {"bad_words": tuple((t,) for t in range(VOCAB))},
        {"bad_words": ((7,),), "allowed_token_ids": (7,)},
        {"bad_words": ((8, 7), (7, 8)), "allowed_token_ids": (7, 8)},
        {"bad_words": ((7,),), "allowed_token_ids": (7, 1), "min_tokens": 2},
        {"bad_words": ((VOCAB,),), "grammar": GrammarSpec(kind="json_object")},
    ],
)
def test_bans_that_leave_nothing_or_name_nothing_are_refused(params: dict) -> None:
    with pytest.raises(RequestError, match="must"):
        submit(make_engine(), Answers(), "r", **params)
