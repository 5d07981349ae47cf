"""How do clients talk to a replica over HTTP? OpenAI-compatible routes over a small engine protocol."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException

from paceline.contracts import Group
from paceline.errors import CapacityError, EngineStoppedError, RequestError
from paceline.serving.api_format import Answer, error_body, to_json
from paceline.serving.api_generation import (
    ApiParts,
    Cutoff,
    EngineInfo,
    EventStream,
    Generation,
    default_group,
    events,
    whole,
)
from paceline.serving.api_models import ChatBody, CompletionBody, FieldError, GenerateBody, parse_body
from paceline.serving.request import GenerationRequest
from paceline.serving.text_stream import TextStream, TokenText

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LONG_TEXT_CHARS = 16_384  # tokenised in a thread, so that the event loop stays free


class Api:
    """The handlers of one replica."""

    def __init__(self, parts: ApiParts) -> None:
        self.parts = parts
        self.tokens = TokenText(parts.tokenizer)

    # ---- generation ---------------------------------------------------------------------------------------------
    async def completions(self, request: Request) -> Response:
        body: CompletionBody = parse_body(await _read_body(request), CompletionBody)
        prompt = body.prompt
        if isinstance(prompt, str):
            token_ids = await self._tokenize(prompt, special=True)
        else:
            token_ids = [t for t in prompt if isinstance(t, int)]  # the validator leaves one flat prompt
        return await self._answer(request, body, token_ids, is_chat=False)

    async def chat(self, request: Request) -> Response:
        body: ChatBody = parse_body(await _read_body(request), ChatBody)
        if not getattr(self.parts.tokenizer, "chat_template", None):
            raise FieldError("this model has no chat template; use /v1/completions", "messages")
        try:
            text = self.parts.tokenizer.apply_chat_template(
                [m.for_template() for m in body.messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as e:  # templates raise whatever their author chose, for instance on the order of roles
            raise FieldError(f"the model's chat template refuses these messages: {e}", "messages") from e
        token_ids = await self._tokenize(text, special=False)
        return await self._answer(request, body, token_ids, is_chat=True)

    async def _tokenize(self, text: str, *, special: bool) -> list[int]:
        def encode() -> list[int]:
            return self.parts.tokenizer.encode(text, add_special_tokens=special)

        return await asyncio.to_thread(encode) if len(text) > _LONG_TEXT_CHARS else encode()

    async def _answer(self, request: Request, body: GenerateBody, token_ids: list[int], *, is_chat: bool) -> Response:
        info = self.parts.client.info()
        if body.model is not None and body.model != info.model_name:
            raise HTTPException(404, f"model {body.model!r} is not served here; this service has {info.model_name!r}")
        request_id, tenant = _request_id(request), _tenant(request, body)
        generation = Generation(
            self.parts,
            GenerationRequest(
                request_id=request_id,
                prompt_token_ids=tuple(token_ids),
                params=body.sampling(max_tokens=_max_tokens(body, len(token_ids), info)),
                bucket=_bucket(request, body),
                group=self._group(request, body, request_id),
                is_traced=_is_traced(request) and tenant not in self.parts.opt_out_tenants,
                tenant=tenant,
            ),
            self._new_answer(body, token_ids, request_id, info, is_chat),
        )
        _check_token_ids(token_ids, info)
        headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache"}
        if self.parts.sends_request_id:
            headers["x-request-id"] = request_id
        await generation.submit()
        if body.stream:
            return EventStream(generation, events(generation), headers)
        return Response(await whole(request, generation), media_type="application/json", headers=headers)

    def _new_answer(
        self, body: GenerateBody, token_ids: list[int], request_id: str, info: EngineInfo, is_chat: bool
    ) -> Answer:
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        stream = TextStream(self.tokens, prompt_token_ids=token_ids, stop=stop, skip_special=body.skip_special_tokens)
        num_top = body.num_logprobs()
        return Answer(
            tokens=self.tokens,
            stream=stream,
            answer_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            model_name=info.model_name,
            is_chat=is_chat,
            prompt_token_ids=token_ids,
            has_logprobs=num_top is not None,
            num_top=num_top or 0,
            with_token_ids=body.return_token_ids,
            with_usage=bool(body.stream_options and body.stream_options.include_usage),
        )

    def _group(self, request: Request, body: GenerateBody, request_id: str) -> Group:
        label = body.metadata.paceline_group if body.metadata else None
        name = _one_of("x-paceline-group", request.headers.get("x-paceline-group"), "metadata.paceline_group", label)
        if name is None:
            return default_group(request_id, self.parts.holdback_percent())
        try:
            return Group(name)
        except ValueError:
            known = ", ".join(g.value for g in Group)
            raise FieldError(f"x-paceline-group must be one of {known}, got {name!r}", "x-paceline-group") from None

    # ---- the rest -----------------------------------------------------------------------------------------------
    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        card = self._model_card()
        if name != card["id"]:
            raise HTTPException(404, f"model {name!r} is not served here; this service has {card['id']!r}")
        return _json(card)

    def _model_card(self) -> dict[str, Any]:
        info = self.parts.client.info()
        card = {"id": info.model_name, "object": "model", "created": info.created, "owned_by": "paceline"}
        return {**card, "max_model_len": info.context_tokens, "target_version": info.target_version}

    async def healthz(self) -> Response:
        age_s = self.parts.client.heartbeat_age_s()
        is_alive = age_s <= self.parts.max_silence_s
        body = {"status": "ok" if is_alive else "engine silent", "heartbeat_age_s": round(age_s, 3)}
        return _json(body, status=200 if is_alive else 503)

    async def metrics(self) -> Response:
        body, content_type = await asyncio.to_thread(self.parts.metrics)
        return Response(body, media_type=content_type)

    async def state(self) -> Response:
        return _json(await self.parts.run_state(self.parts.state))

    async def swap(self) -> Response:
        return _json(await asyncio.to_thread(self.parts.swap))


def make_router(parts: ApiParts) -> APIRouter:
    """Every route of a replica.

    /v1 and the extra routers ask for the API token when there is one. State, swap and metrics ask for it too, unless
    `parts` brings rules of their own. /healthz asks for nothing; the open routers check what they want themselves.
    """
    api = Api(parts)
    router = APIRouter()
    check_token = _token_check(parts.api_token)
    locked = APIRouter(dependencies=[Depends(_on_loop(check_token))])
    locked.add_api_route("/v1/completions", api.completions, methods=["POST"])
    locked.add_api_route("/v1/chat/completions", api.chat, methods=["POST"])
    locked.add_api_route("/v1/models", api.models, methods=["GET"])
    locked.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"])
    for extra in parts.extra_routers:
        locked.include_router(extra)
    router.add_api_route("/healthz", api.healthz, methods=["GET"])
    for extra in parts.open_routers:
        router.include_router(extra)
    for path, handler, check in (
        ("/metrics", api.metrics, parts.check_metrics),
        ("/paceline/state", api.state, parts.check_state),
        ("/paceline/swap", api.swap, parts.check_state),
    ):
        router.add_api_route(path, handler, methods=["GET"], dependencies=[Depends(_on_loop(check or check_token))])
    router.include_router(locked)
    return router


def build_api(parts: ApiParts) -> FastAPI:
    """The ASGI application of one replica."""
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(make_router(parts))
    for kind in (RequestError, CapacityError, EngineStoppedError, Cutoff, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    return app


# ---- helpers ----------------------------------------------------------------------------------------------------
async def _read_body(request: Request) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body must be at most {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _token_check(api_token: str | None) -> Callable[[Request], None]:
    wanted = None if api_token is None else api_token.encode()

    def check(request: Request) -> None:
        if wanted is None:
            return
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode("latin-1"), wanted):
            message = "a valid token must be sent as 'Authorization: Bearer TOKEN'"
            raise HTTPException(401, message, headers={"WWW-Authenticate": "Bearer"})

    return check


def _on_loop(check: Callable[[Request], None]) -> Callable[[Request], Awaitable[None]]:
    """A check that does no I/O as a coroutine: FastAPI would send a plain function through its thread pool."""

    async def checked(request: Request) -> None:
        check(request)

    return checked


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id")
    if given is None:
        return uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(given):
        raise FieldError("x-request-id must be 1 to 128 printable ASCII characters without spaces", "x-request-id")
    return given


def _bucket(request: Request, body: GenerateBody) -> str:
    label = body.metadata.bucket if body.metadata else None
    name = _one_of("x-paceline-bucket", request.headers.get("x-paceline-bucket"), "metadata.bucket", label)
    if name is None:
        return "default"
    if not _LABEL.fullmatch(name):
        raise FieldError("bucket must be 1 to 64 letters, digits, '.', '_' or '-', not beginning with a sign", "bucket")
    return name


def _tenant(request: Request, body: GenerateBody) -> str:
    label = body.metadata.paceline_tenant if body.metadata else None
    name = _one_of("x-paceline-tenant", request.headers.get("x-paceline-tenant"), "metadata.paceline_tenant", label)
    if name is None:
        return ""
    if not _LABEL.fullmatch(name):
        raise FieldError("tenant must be 1 to 64 letters, digits, '.', '_' or '-', not beginning with a sign", "tenant")
    return name


def _one_of(name_a: str, a: str | None, name_b: str, b: str | None) -> str | None:
    if a is not None and b is not None and a != b:
        raise FieldError(f"{name_a} ({a!r}) and {name_b} ({b!r}) differ; give one of them", name_b)
    return a if a is not None else b


def _is_traced(request: Request) -> bool:
    value = request.headers.get("x-paceline-trace", "on").lower()
    if value not in ("on", "off"):
        raise FieldError(f"x-paceline-trace must be on or off, got {value!r}", "x-paceline-trace")
    return value == "on"


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


def _check_token_ids(token_ids: list[int], info: EngineInfo) -> None:
    bad = next((t for t in token_ids if not 0 <= t < info.vocab_size), None)
    if bad is not None:
        raise FieldError(f"prompt token ids must lie in [0, {info.vocab_size}), got {bad}", "prompt")


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(to_json(body), status_code=status, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    """Every error as OpenAI's error object; only errors raised on purpose show their message."""
    headers: dict[str, str] = {}
    param, code = getattr(error, "param", None), None
    if isinstance(error, RequestError):
        status, kind = 400, "invalid_request_error"
    elif isinstance(error, CapacityError):
        status, kind, code, headers = 429, "rate_limit_error", "queue_full", {"Retry-After": "1"}
    elif isinstance(error, EngineStoppedError | Cutoff):
        status, kind, code, headers = 503, "server_error", "incomplete", {"Retry-After": "2"}
    elif isinstance(error, HTTPException):
        status, kind, headers = error.status_code, "invalid_request_error", dict(error.headers or {})
        code = {401: "invalid_api_key", 404: "not_found"}.get(status)
    else:
        log.error("request to %s failed", request.url.path, exc_info=error)
        status, kind, code = 500, "server_error", "internal_error"
    message = "internal error; see the server's log" if status == 500 else str(getattr(error, "detail", error))
    response = _json(error_body(message, kind=kind, param=param, code=code), status)
    response.headers.update(headers)
    return response
