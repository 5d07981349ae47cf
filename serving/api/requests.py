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
from paceline.serving.api.bodies import MAX_TIMEOUT_S, ChatBody, CompletionBody, FieldError, GenerateBody
from paceline.serving.api.generation import ApiParts, EngineInfo, default_group
from paceline.serving.sampling.request import GenerationRequest

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REQUEST_ID = re.compile(r"[\x21-\x7d]{1,128}")
"""Without '~': what follows it in an engine's request id is a choice (`~c1`) or another try (`~1`, splice.py)."""
_MILLISECONDS = re.compile(r"[0-9]{1,8}")


def engine_requests(
    request: Request,
    body: GenerateBody,
    prompt_token_ids: Sequence[int],
    *,
    parts: ApiParts,
    info: EngineInfo,
    request_id: str,
    arrived_s: float,
) -> list[GenerationRequest]:
    """One engine request for each choice, equal but for id and seed.

    Args:
        arrived_s: when the HTTP request came, in the engine's clock; the time limit counts from there.
    Raises: FieldError where a header or field cannot be honoured, RequestError where a value is out of range.
    """
    check_token_ids(prompt_token_ids, info, "prompt")
    _check_biases(body, info)
    tenant = _label(request, body.metadata.paceline_tenant if body.metadata else None, "tenant", "paceline_tenant")
    bucket = _label(request, body.metadata.bucket if body.metadata else None, "bucket", "bucket")
    timeout_s = _timeout_s(request, body)
    first = GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        params=body.sampling(max_tokens=_max_tokens(body, len(prompt_token_ids), info)),
        bucket=bucket or "default",
        group=_group(request, body, request_id, parts),
        is_traced=_is_traced(request) and (tenant or "") not in parts.opt_out_tenants,
        tenant=tenant or "",
        priority=body.priority or 0,
        deadline_s=None if timeout_s is None else arrived_s + timeout_s,
        prompt_logprobs=body.logprobs if isinstance(body, CompletionBody) and body.echo else None,
    )
    if body.num_choices == 1:
        return [first]
    return [_choice_request(first, i) for i in range(body.num_choices)]


def _choice_request(first: GenerationRequest, index: int) -> GenerationRequest:
    params = first.params
    if params.seed is not None:
        params = dataclasses.replace(params, seed=choice_seed(params.seed, index))
    return dataclasses.replace(first, request_id=f"{first.request_id}~c{index}", params=params)


def choice_seed(seed: int, index: int) -> int:
    """The seed of a choice: the request's own for the first, so that it is the answer of n = 1, hashes for the others."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8]) >> 1


def request_id_of(request: Request) -> str:
    """The client's x-request-id, or a new one; raises FieldError for one that cannot be logged."""
    given = request.headers.get("x-request-id")
    if given is None:
        return uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(given):
        raise FieldError(
            "x-request-id must be 1 to 128 printable ASCII characters without spaces and without '~'", "x-request-id"
        )
    return given


def check_model(name: str | None, info: EngineInfo) -> None:
    """Raise HTTPException 404 when a request names another model than the one served."""
    if name is not None and name != info.model_name:
        raise HTTPException(404, f"model {name!r} is not served here; this service has {info.model_name!r}")


def check_token_ids(token_ids: Sequence[int], info: EngineInfo, param: str) -> None:
    """Raise FieldError at the first id that is not in the vocabulary."""
    bad = next((t for t in token_ids if not 0 <= t < info.vocab_size), None)
    if bad is not None:
        raise FieldError(f"{param} token ids must lie in [0, {info.vocab_size}), got {bad}", param)


def _check_biases(body: GenerateBody, info: EngineInfo) -> None:
    bad = next((k for k in body.logit_bias or () if int(k) >= info.vocab_size), None)
    if bad is not None:
        raise FieldError(f"logit_bias token ids must lie in [0, {info.vocab_size}), got {bad}", "logit_bias")


def _label(request: Request, field: str | None, what: str, field_name: str) -> str | None:
    """A label given as header x-paceline-<what> or as a field of the metadata; None when neither is there."""
    header = f"x-paceline-{what}"
    name = _one_of(header, request.headers.get(header), f"metadata.{field_name}", field)
    if name is not None and not _LABEL.fullmatch(name):
        raise FieldError(f"{what} must be 1 to 64 letters, digits, '.', '_' or '-', not beginning with a sign", what)
    return name


def _group(request: Request, body: GenerateBody, request_id: str, parts: ApiParts) -> Group:
    label = body.metadata.paceline_group if body.metadata else None
    name = _one_of("x-paceline-group", request.headers.get("x-paceline-group"), "metadata.paceline_group", label)
    if name is None:
        return default_group(request_id, parts.holdback_percent())
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


def _max_tokens(body: GenerateBody, num_prompt: int, info: EngineInfo) -> int:
    """The length limit of the answer; raises FieldError where the context cannot hold it."""
    room = info.context_tokens - num_prompt
    what = "messages" if isinstance(body, ChatBody) else "prompt"
    if num_prompt == 0:
        raise FieldError("the prompt must have at least one token", what)
    if room < 1:
        raise FieldError(
            f"the prompt has {num_prompt} tokens but the context holds {info.context_tokens}; shorten it", what
        )
    wanted = body.num_wanted()
    if wanted is not None and wanted > room and (body.max_tokens or isinstance(body, ChatBody)):
        raise FieldError(
            f"max_tokens must be at most {room} (context {info.context_tokens} minus prompt {num_prompt}), got {wanted}",
            "max_tokens",
        )
    return room if wanted is None else min(wanted, room)
