"""Which tokens a grammar allows next follows the answer, forwards and back."""

from __future__ import annotations

from paceline.serving.sampling.request import GrammarSpec
from tests.helpers.constrained import DEAD_END, REGEX, allowed_text, factory, ids
from tests.helpers.fakes import EOS_ID


def test_masks_follow_the_answer_and_end_with_it() -> None:
    state = factory().start(REGEX)
    assert allowed_text(state) == {"a", "c"}
    for token in ids("ab12"):
        state.advance(token)
    assert allowed_text(state) == {*"0123456789z"}
    state.advance(*ids("z"))
    assert allowed_text(state) == {"<|end|>"}
    state.advance(EOS_ID)
    assert state.allowed() is None and state.error is None


def test_tokens_that_are_cut_are_taken_back() -> None:
    state = factory().start(REGEX)
    for token in ids("ab12"):
        state.advance(token)
    state.keep(2)
    assert allowed_text(state) == {"a", "c", *"0123456789"}
    for token in [*ids("12z"), EOS_ID]:
        state.advance(token)
    state.rewind()
    assert allowed_text(state) == {"a", "c", *"0123456789"}
    for token in [*ids("12z"), EOS_ID]:
        state.advance(token)
    state.keep(3)  # the end is drawn again
    assert allowed_text(state) == {"<|end|>"}


def test_a_complete_answer_may_end_with_the_requests_stop_tokens() -> None:
    stop = ids("!")
    state = factory().start(GrammarSpec(kind="regex", text="ab?"), stop_token_ids=[*stop, 10**6])
    assert allowed_text(state) == {"a"}
    state.advance(*ids("a"))
    assert allowed_text(state) == {"b", "!", "<|end|>"}
    state.advance(*stop)
    assert state.allowed() is None


def test_ignoring_the_end_token_keeps_it_for_where_nothing_else_is_left() -> None:
    state = factory().start(GrammarSpec(kind="regex", text="ab?"), ignores_eos=True)
    state.advance(*ids("a"))
    assert allowed_text(state) == {"b"}
    state.advance(*ids("b"))
    assert allowed_text(state) == {"<|end|>"}


def test_states_of_one_grammar_are_independent() -> None:
    one, two = factory().start(REGEX), factory().start(REGEX)
    one.advance(*ids("a"))
    assert allowed_text(one) == {"b"} and allowed_text(two) == {"a", "c"}


def test_blanks_inside_json_are_bounded_unless_the_schema_says_how() -> None:
    state = factory().start(GrammarSpec(kind="json_object"))
    state.advance(*ids("{"))
    for token in ids("\n" + " " * 31):
        assert {" ", "}"} <= allowed_text(state)
        state.advance(token)
    assert " " not in allowed_text(state) and "}" in allowed_text(state)
    own = GrammarSpec(kind="json_schema", text='{"type":"object","x-guidance":{"whitespace_flexible":false}}')
    state = factory().start(own)
    state.advance(*ids("{"))
    assert allowed_text(state) == {'"', "}"}


def test_a_failure_behind_tokens_that_are_taken_back_is_forgotten_and_met_again() -> None:
    state = factory().start(DEAD_END)
    for token in ids("ababab"):
        state.advance(token)
    assert state.allowed() is None and state.error is not None
    state.keep(4)
    assert state.error is None and allowed_text(state) == {"a", "b"}
    for token in ids("bb"):
        state.advance(token)
    assert state.allowed() is None and state.error is not None
    state.keep(2)
    assert state.allowed() is None and state.error is not None, "nothing was taken back"
