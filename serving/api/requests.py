"""Engine requests of an HTTP request: id, labels, limits, deadline, one request a choice."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import uuid
from collections.abc import Sequence

from fastapi import Request
from starlette.exceptions import HTTPException

from paceline.contracts import Group
from paceline.names import LABEL_RULE, REQUEST_ID_RULE, is_label, is_request_id
from paceline.serving.api.access_log import access_record
from paceline.serving.api.bodies import MAX_SCORES, MAX_TIMEOUT_S, ChatBody, CompletionBody, GenerateBody
from paceline.serving.api.generation import ApiParts, EngineInfo, default_group
from paceline.serving.engine.buckets import OTHER_BUCKET
from paceline.serving.sampling.request import GenerationRequest, GrammarSpec
from paceline.serving.wire.accounts import Visit
from paceline.serving.wire.fields import FieldError

CONTEXT_CODE = "context_length_exceeded"
"""OpenAI's code, on which clients cut their history."""
_MILLISECONDS = re.compile(r"[0-9]{1,8}")


class UnknownModel(HTTPException):
    """Another model is asked for than the one served."""

    code = "model_not_found"
    """OpenAI's."""


def engine_requests(
    request: Request,
    body: GenerateBody,
    prompts: Sequence[Sequence[int]],
    *,
    parts: ApiParts,
    info: EngineInfo,
    request_id: str,
    arrived_s: float,
    visit: Visit,
    grammar: GrammarSpec | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    kept_token_ids: tuple[int, ...] = (),
) -> list[GenerationRequest]:
    """One engine request for each choice of each prompt, those of a prompt side by side and equal but for id and seed.

    Args:
        prompts: token ids of each prompt.
        request_id: the service's own.
        arrived_s: when the HTTP request came, in the engine's clock; the time limit counts from there.
        visit: says whose requests they are.
        grammar: in place of the body's own.
        bad_words: token sequences of the body's own.
        kept_token_ids: special tokens that are text to a reader of calls.
    Raises: FieldError where a header or field cannot be honoured, RequestError where a value is out of range,
        HTTPException 403 where the tenant is not the client's.
    """
    for token_ids in prompts:
        check_token_ids(token_ids, info, "prompt")
    _check_biases(body, info)
    check_token_ids(body.allowed_token_ids or (), info, "allowed_token_ids")
    tenant = visit.tenant(
        _label(request, body.metadata.paceline_tenant if body.metadata else None, "tenant", "paceline_tenant")
    )
    bucket = _label(request, body.metadata.bucket if body.metadata else None, "bucket", "bucket")
    own_buckets = visit.account.limits.buckets
    if bucket is not None and own_buckets is not None and bucket not in own_buckets:
        bucket = OTHER_BUCKET
    timeout_s = _timeout_s(request, body)
    asked, is_traced = _asked_group(request, body), _is_traced(request)
    scored = (body.prompt_logprobs, body.logprobs if isinstance(body, CompletionBody) and body.echo else None)
    num_scored = max((k for k in scored if k is not None), default=None)
    found: list[GenerationRequest] = []
    for prompt in prompts:
        token_ids = tuple(_last_tokens(body, prompt, info))
        params = body.sampling(max_tokens=_max_tokens(body, len(token_ids), info))
        if grammar is not None or bad_words or kept_token_ids:
            params = dataclasses.replace(
                params, grammar=grammar or params.grammar, bad_words=bad_words, kept_token_ids=kept_token_ids
            )
        for choice in range(body.num_choices):
            seed = None if params.seed is None else choice_seed(params.seed, choice)
            index = len(found)
            found.append(
                GenerationRequest(
                    request_id=request_id if body.num_choices * len(prompts) == 1 else f"{request_id}~c{index}",
                    prompt_token_ids=token_ids,
                    params=params if seed == params.seed else dataclasses.replace(params, seed=seed),
                    bucket=bucket,
                    group=default_group(request_id, parts.holdback_percent()) if asked is None else asked,
                    is_asked=asked is not None and not parts.trusts_groups,
                    is_traced=is_traced and tenant not in parts.opt_out_tenants,
                    tenant=tenant,
                    is_own=visit.keeps_to_itself(tenant),
                    priority=body.priority or 0,
                    deadline_s=None if timeout_s is None else arrived_s + timeout_s,
                    prompt_logprobs=num_scored,
                    traceparent=access_record(request).traceparent,
                )
            )
    if num_scored is not None and sum(len(r.prompt_token_ids) for r in found) * (num_scored + 1) > MAX_SCORES:
        raise FieldError(
            f"the log-probabilities of prompts must be at most {MAX_SCORES}, that is tokens * n * (alternatives + 1): "
            "send fewer prompts at once",
            "logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
        )
    return found


def choice_seed(seed: int, index: int) -> int:
    """The seed of a choice: the request's own for the first, so that it is the answer of n = 1, hashes for the others."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8]) >> 1


def request_id_of(request: Request) -> str:
    """The client's x-request-id, or a new one; raises FieldError for one that cannot be logged.

    It is for logs and for the client; the engine's id of a request is another (`engine_requests`).
    """
    given = request.headers.get("x-request-id")
    if given is None:
        return uuid.uuid4().hex
    if not is_request_id(given):
        raise FieldError(f"x-request-id {REQUEST_ID_RULE}", "x-request-id")
    return given


def check_model(name: str | None, info: EngineInfo) -> None:
    """Raise UnknownModel when a request names another model than the one served; '' is no name."""
    names = (info.model_name, *info.aliases)
    if name and name not in names:
        served = " and ".join(repr(each) for each in names)
        raise UnknownModel(404, f"model {name[:128]!r} is not served here; this service has {served}")


def check_token_ids(token_ids: Sequence[int], info: EngineInfo, param: str) -> None:
    """Raise FieldError at the first id that is not in the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < info.vocab_size):
        bad = next(t for t in token_ids if not 0 <= t < info.vocab_size)
        raise FieldError(f"{param} token ids must lie in [0, {info.vocab_size}), got {bad}", param)


def _check_biases(body: GenerateBody, info: EngineInfo) -> None:
    bad = next((k for k in body.logit_bias or () if int(k) >= info.vocab_size), None)
    if bad is not None:
        raise FieldError(f"logit_bias token ids must lie in [0, {info.vocab_size}), got {bad}", "logit_bias")


def _label(request: Request, field: str | None, what: str, field_name: str) -> str | None:
    """A label given as header x-paceline-<what> or as a field of the metadata; None when neither is there."""
    header = f"x-paceline-{what}"
    name = _one_of(header, request.headers.get(header), f"metadata.{field_name}", field)
    if name is not None and not is_label(name):
        raise FieldError(f"{what} {LABEL_RULE}", what)
    return name


def _asked_group(request: Request, body: GenerateBody) -> Group | None:
    """The group that a request asks for; None: it is drawn."""
    label = body.metadata.paceline_group if body.metadata else None
    name = _one_of("x-paceline-group", request.headers.get("x-paceline-group"), "metadata.paceline_group", label)
    if name is None:
        return None
    try:
        return Group(name)
    except ValueError:
        known = ", ".join(g.value for g in Group)
        raise FieldError(f"x-paceline-group must be one of {known}, got {name!r}", "x-paceline-group") from None


def _one_of(name_a: str, a: str | None, name_b: str, b: str | None) -> str | None:
    if a is not None and b is not None and a != b:
        raise FieldError(f"{name_a} ({a!r}) and {name_b} ({b!r}) differ; give one of them", name_b)
    return a if a is not None else b


def _is_traced(request: Request) -> bool:
    value = request.headers.get("x-paceline-trace", "on").lower()
    if value not in ("on", "off"):
        raise FieldError(f"x-paceline-trace must be on or off, got {value!r}", "x-paceline-trace")
    return value == "on"


def _timeout_s(request: Request, body: GenerateBody) -> float | None:
    """Seconds that the request may take from its arrival; None = as long as it needs."""
    name = "x-request-timeout-ms"
    header = request.headers.get(name)
    if header is None:
        return body.timeout_s
    if not _MILLISECONDS.fullmatch(header) or not 0 < int(header) <= MAX_TIMEOUT_S * 1e3:
        raise FieldError(f"{name} must be a whole number in [1, {MAX_TIMEOUT_S * 1e3:.0f}], got {header!r}", name)
    timeout_s = int(header) / 1e3
    if body.timeout_s is not None and body.timeout_s != timeout_s:
        raise FieldError(f"{name} ({header}) and timeout_s ({body.timeout_s}) differ; give one of them", "timeout_s")
    return timeout_s


def _last_tokens(body: GenerateBody, token_ids: Sequence[int], info: EngineInfo) -> Sequence[int]:
    """The part of a prompt that is read."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return token_ids
    if limit == -1:
        limit = info.context_tokens - max(body.num_wanted() or 1, 1)
    if not 1 <= limit < info.context_tokens:
        raise FieldError(
            f"truncate_prompt_tokens must be in [1, {info.context_tokens}) or -1 and leave room for the answer, got "
            f"{body.truncate_prompt_tokens}",
            "truncate_prompt_tokens",
        )
    return token_ids[-limit:]


def _max_tokens(body: GenerateBody, num_prompt: int, info: EngineInfo) -> int:
    """The length limit of the answer; raises FieldError where the context cannot hold it."""
    room = info.context_tokens - num_prompt
    what = "messages" if isinstance(body, ChatBody) else "prompt"
    limit = f"this model's maximum context length is {info.context_tokens} tokens"
    if num_prompt == 0:
        raise FieldError("the prompt must have at least one token", what)
    if room < 1:
        raise FieldError(f"{limit}, but the prompt has {num_prompt} tokens; shorten it", what, CONTEXT_CODE)
    wanted = body.num_wanted()
    if wanted is not None and wanted > room and (body.max_tokens or isinstance(body, ChatBody)):
        raise FieldError(
            f"max_tokens must be at most {room} ({limit}, of which the prompt has {num_prompt}), got {wanted}",
            "max_tokens",
            CONTEXT_CODE,
        )
    return room if wanted is None else min(wanted, room)
