"""Every field of a request body is honoured or refused with a reason."""

import json

import pytest

from paceline.serving.api.bodies import ChatBody, CompletionBody
from paceline.serving.wire.fields import IGNORED, REFUSED, FieldError, parse_body


def completion(**fields: object) -> CompletionBody:
    return parse_body(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody)


def chat(**fields: object) -> ChatBody:
    return parse_body(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode(), ChatBody)


def test_every_sampling_field_reaches_the_engine() -> None:
    body = completion(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=-0.4, seed=-5, stop=["a", "b"], stop_token_ids=[3], ignore_eos=True, logprobs=2, max_tokens=9,
    )  # fmt: skip
    params = body.sampling(max_tokens=9)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.3, -0.4)
    assert (params.seed, params.stop, params.stop_token_ids) == (-5, ("a", "b"), (3,))
    assert (params.ignore_eos, params.logprobs, params.max_tokens) == (True, 2, 9)


def test_defaults_are_openais() -> None:
    assert completion().num_wanted() == 16
    assert chat().num_wanted() is None
    assert completion().sampling(max_tokens=1).temperature == 1.0


def test_what_other_languages_make_of_json_is_read() -> None:
    """A mark of the byte order, whole numbers with a point, and null for what is not there."""
    raw = b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 100.0, "n": 1e0, "temperature": 1.0, "top_p": 0.5, "seed": -3.0}'
    body = parse_body(raw, CompletionBody)
    assert (body.max_tokens, body.n, body.temperature, body.top_p, body.seed) == (100, 1, 1.0, 0.5, -3)
    for wrong in (b"1.5", b"1e300", b'"100"', b"true"):
        with pytest.raises(FieldError) as e:
            parse_body(b'{"prompt": "x", "max_tokens": ' + wrong + b"}", CompletionBody)
        assert e.value.param == "max_tokens"
    nulls = {"response_format": {"type": "json_object", "json_schema": None}, "return_token_ids": None}
    assert chat(**nulls, stream=True, stream_options={"include_usage": None}).response_format.type == "json_object"
    with pytest.raises(FieldError):
        chat(response_format={"type": "json_schema", "json_schema": None})


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_unsupported_fields_are_refused_unless_they_ask_for_nothing(field: str) -> None:
    neutral, reason = REFUSED[field]
    body = chat if field in CompletionBody.model_fields else completion
    body(**{field: neutral[0]})
    with pytest.raises(FieldError, match=reason[:20]) as e:
        body(**{field: {"something": "else"}})
    assert e.value.param == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"temperature": "0.5"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [[1], [True]]}, "prompt"),
        ({"prompt": [[[1]], [[2]]]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 3}, "n"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, "a"] * 9999}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"metadata": {"color": 3}}, "metadata.color"),
        ({"metadata": {"paceline_tenent": "x"}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"x" * 65: "x"}}, "metadata"),
        ({"metadata": {"x": "x" * 513}}, "metadata"),
        ({"metadata": {"paceline_group": "x"}}, "metadata.paceline_group"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_malformed_completions_name_the_field(fields: dict, param: str | None) -> None:
    with pytest.raises(FieldError) as e:
        completion(**fields)
    assert e.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": "x", "name": "<|system|>"}]},
        {"messages": [{"role": "user", "content": "x", "name": ""}]},
        {"messages": [{"role": "user", "content": "x", "refusal": "no"}]},
        {"messages": [{"role": "user", "content": None, "reasoning": "x"}]},
        {"echo": True},
        {"kv_transfer_params": {"do_remote_decode": True}},
        {"top_logprobs": 2},
        {"logprobs": False, "top_logprobs": 2},
        {"logprobs": 3},
        {"max_tokens": 3, "max_completion_tokens": 4},
        {"tools": [{"type": "function"}]},
    ],
)
def test_malformed_chats_are_refused(fields: dict) -> None:
    with pytest.raises(FieldError):
        chat(**fields)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"3", b"\xff", b"[" * 200_000, b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": -Infinity}', b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}', b'{"prompt": "a", "model": "\\uDC00x"}', b'{"prompt": "a", "\\udc00": 1}',
    ],
)  # fmt: skip
def test_bodies_that_are_no_json_object_are_refused(raw: bytes) -> None:
    with pytest.raises(FieldError):
        parse_body(raw, CompletionBody)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0}, {"top_p": -0.1}, {"min_p": 2.0}, {"presence_penalty": 3.0}, {"top_k": 2**31},
        {"repetition_penalty": 0.0}, {"min_tokens": 2}, {"frequency_penalty": -3.0}, {"stop_token_ids": [-1]},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_with_the_rule_and_the_field(fields: dict) -> None:
    with pytest.raises(FieldError, match="must be") as e:
        completion(**fields).sampling(max_tokens=1)
    assert e.value.param == next(iter(fields)) and str(e.value).startswith(e.value.param)


@pytest.mark.parametrize("kind", [completion, chat])
@pytest.mark.parametrize(
    "neutral",
    [{"stop": []}, {"top_k": -1}, {"kv_transfer_params": None}, {"echo": False}, {"min_tokens": 1, "stop": ["x"]}],
)
def test_values_that_ask_for_nothing_change_nothing(kind, neutral: dict) -> None:
    usual = kind(**{k: v for k, v in neutral.items() if k == "min_tokens" or v == ["x"]})
    assert kind(**neutral).sampling(max_tokens=1) == usual.sampling(max_tokens=1) and kind(**neutral).ignored == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": ["x"]}, "messages.0"),
        ({"top_k": -2}, "top_k"),
        ({"stream_options": 3, "stream": True}, "stream_options"),
    ],
)
def test_errors_name_fields_as_they_were_sent(fields: dict, param: str) -> None:
    with pytest.raises(FieldError) as e:
        chat(**fields)
    assert e.value.param == param and str(e.value).startswith(param)
    assert not {"NamedTool", "StreamOptions", "Message"} & set(str(e.value).replace(".", " ").split())


def test_chat_logprobs_and_limits() -> None:
    assert chat().num_logprobs() is None
    assert chat(logprobs=True).num_logprobs() == 0
    assert chat(logprobs=True, top_logprobs=3).num_logprobs() == 3
    assert chat(logprobs=False, top_logprobs=0).num_logprobs() is None
    assert chat(max_completion_tokens=4).num_wanted() == 4


def test_messages_reach_the_template_as_plain_dicts() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "7", "tool_call_id": "c1"},
        ]
    )
    developer, assistant, tool = (m.for_template() for m in body.messages)
    assert developer == {"role": "system", "content": "a\nb"}
    called = {"type": "function", "function": {"name": "f", "arguments": {}}}  # templates write an object themselves
    assert assistant == {"role": "assistant", "content": "", "tool_calls": [called]}
    assert tool == {"role": "tool", "content": "7", "tool_call_id": "c1"}


def test_escaped_characters_outside_the_first_plane_are_text() -> None:
    assert parse_body(b'{"prompt": "\\ud83d\\ude00"}', CompletionBody).prompt == "\U0001f600"


def test_a_message_that_an_answer_brought_may_be_sent_back_as_it_came() -> None:
    own = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    (message,) = chat(messages=[{**own, "tool_calls": None, "parsed": {"a": 1}}]).messages
    assert message.for_template() == {"role": "assistant", "content": "x"}
    for name in ("reasoning", "reasoning_content"):
        (message,) = chat(messages=[{**own, "content": None, name: "hm"}]).messages
        assert message.for_template() == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    (message,) = chat(messages=[{**own, "content": None, "refusal": "no"}]).messages
    assert message.for_template() == {"role": "assistant", "content": "no"}
    parts = [{"type": "text", "text": "I"}, {"type": "refusal", "refusal": "will not"}]
    (message,) = chat(messages=[{**own, "content": parts}]).messages
    assert message.for_template() == {"role": "assistant", "content": "I\nwill not"}
    named = chat(messages=[{"role": "user", "content": "x", "name": "Ada-1"}]).messages[0]
    assert named.for_template() == {"role": "user", "content": "x", "name": "Ada-1"}


def test_marks_of_a_cache_change_nothing() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "f", **mark}, **mark}
    part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}, **mark}
    body = chat(messages=[{"role": "user", "content": [part], **mark}], tools=[tool])
    assert body.messages[0].for_template() == {"role": "user", "content": "a"}
    assert body.tools[0].for_template()["function"] == {
        "name": "f",
        "description": "",
        "parameters": {"type": "object"},
    }


def test_an_image_is_refused_with_the_reason() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(FieldError, match="only text is read") as e:
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, image]}])
    assert e.value.param == "messages.0.content"


@pytest.mark.parametrize("field", sorted(IGNORED))
def test_hints_are_taken_with_any_value_and_named_unless_they_ask_for_nothing(field: str) -> None:
    for value in ("x", 3, {"a": [1]}):
        assert completion(**{field: value}).ignored == [field]
    for value in IGNORED[field][0]:
        assert completion(**{field: value}).ignored == []
    both = completion(metadata={"color": "red", "bucket": "b"}, store=True)
    assert both.ignored == ["store", "metadata"] and completion(metadata={"bucket": "b"}).ignored == []


def test_one_prompt_in_a_list_is_one_prompt() -> None:
    assert completion(prompt=["hey"]).prompt == "hey"
    assert completion(prompt=[[1, 2]]).prompt == [1, 2]
    assert completion(prompt=[1, 2]).prompt == [1, 2]


def test_prompts_are_told_apart() -> None:
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[[0], [2, 3]]).prompts == [[0], [2, 3]]
