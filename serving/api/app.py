"""HTTP app: OpenAI-compatible routes over a small engine protocol."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException

from paceline.errors import CapacityError, EngineStoppedError, RequestError
from paceline.serving.api.access_log import AccessLog, access_record
from paceline.serving.api.bodies import ChatBody, CompletionBody, GenerateBody, parse_body
from paceline.serving.api.chat_page import chat_page
from paceline.serving.api.choice import Choice, ChoiceStyle, make_echo
from paceline.serving.api.format import Answer
from paceline.serving.api.generation import ApiParts, Cutoff, EventStream, Generation, begun, events, whole
from paceline.serving.api.http import (
    FinishRate,
    QueueFull,
    error_handler,
    json_response,
    on_loop,
    read_body,
    token_check,
)
from paceline.serving.api.prompts import Prompts, TokenRoutes, with_tokens
from paceline.serving.api.requests import check_model, engine_requests, request_id_of
from paceline.serving.sampling.request import GenerationRequest
from paceline.serving.sampling.text_stream import TextStream, TokenText


class Api:
    """The handlers of one replica."""

    def __init__(self, parts: ApiParts) -> None:
        self.parts = parts
        self.tokens = TokenText(parts.tokenizer)
        self.prompts = Prompts(parts.tokenizer)
        self._finishes = FinishRate()
        self._unfinished: set[str] = set()  # ids of HTTP requests; the engine knows those of single choices

    # ---- generation ---------------------------------------------------------------------------------------------
    async def completions(self, request: Request) -> Response:
        arrived_s = self._arrive(request)
        body: CompletionBody = parse_body(await read_body(request), CompletionBody)
        prompt = body.prompt
        if isinstance(prompt, str):
            token_ids = await self.prompts.encode(prompt, special=True)
        else:
            token_ids = [t for t in prompt if isinstance(t, int)]  # the validator leaves one flat prompt
        return await self._answer(request, body, token_ids, arrived_s)

    async def chat(self, request: Request) -> Response:
        arrived_s = self._arrive(request)
        body: ChatBody = parse_body(await read_body(request), ChatBody)
        token_ids = await self.prompts.encode(await self.prompts.render(body), special=False)
        return await self._answer(request, body, token_ids, arrived_s)

    def _arrive(self, request: Request) -> float:
        """The time in the engine's clock; raises EngineStoppedError while the replica drains."""
        access_record(request).request_id = request_id_of(request)
        if self.parts.client.is_draining():
            raise EngineStoppedError("this replica is shutting down; send the request again")
        return self.parts.client.now()

    async def _answer(self, request: Request, body: GenerateBody, token_ids: list[int], arrived_s: float) -> Response:
        info, record = self.parts.client.info(), access_record(request)
        check_model(body.model, info)
        requests = engine_requests(
            request, body, token_ids, parts=self.parts, info=info, request_id=record.request_id, arrived_s=arrived_s
        )
        first = requests[0]
        record.prompt_tokens = len(token_ids)
        record.labels = {
            "bucket": first.bucket, "group": first.group.value, "tenant": first.tenant or None, "n": len(requests),
            "stream": bool(body.stream), "priority": first.priority or None,
        }  # fmt: skip
        answer = await self._new_answer(body, requests, record.request_id, info.model_name)
        request_id = record.request_id
        if request_id in self._unfinished:
            raise RequestError(f"x-request-id must be unique among unfinished requests, got {request_id!r}")
        generation = Generation(
            self.parts,
            requests,
            answer,
            record,
            self._finishes.note,
            on_close=lambda: self._unfinished.discard(request_id),
        )
        self._unfinished.add(request_id)
        try:
            await generation.submit()
        except BaseException as e:  # also a client that hangs up meanwhile
            self._unfinished.discard(request_id)
            if isinstance(e, CapacityError):
                raise QueueFull(str(e), self._finishes.retry_after_s(self.parts.client.num_waiting())) from e
            raise
        headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache"}
        if self.parts.sends_request_id:
            headers["x-request-id"] = record.request_id
        if body.stream:
            if first.deadline_s is not None:  # so that one that expires in the queue has a status of its own
                await begun(request, generation)
            return EventStream(generation, events(generation, record), headers)
        return Response(await whole(request, generation), media_type="application/json", headers=headers)

    async def _new_answer(
        self, body: GenerateBody, requests: list[GenerationRequest], request_id: str, model_name: str
    ) -> Answer:
        prompt, is_chat = requests[0].prompt_token_ids, isinstance(body, ChatBody)
        skip, stop = body.skip_special_tokens, requests[0].params.stop
        echo = None
        if isinstance(body, CompletionBody) and body.echo:
            echo = await with_tokens(lambda: make_echo(self.tokens, prompt, skip_special=skip), prompt)
        style = ChoiceStyle(
            is_chat=is_chat,
            num_top=body.num_logprobs(),
            with_token_ids=body.return_token_ids,
            with_segments=body.return_segments,
            with_own_stats=len(requests) > 1,
        )
        choices = [
            Choice(
                i, self.tokens, TextStream(self.tokens, prompt_token_ids=prompt, stop=stop, skip_special=skip), style,
                prompt_token_ids=prompt, echo=echo,
            )
            for i in range(len(requests))
        ]  # fmt: skip
        options = body.stream_options
        return Answer(
            choices,
            answer_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            model_name=model_name,
            is_chat=is_chat,
            num_prompt_tokens=len(prompt),
            with_usage=options is not None and options.include_usage,
            with_running_usage=options is not None and options.continuous_usage_stats,
        )

    # ---- the rest -----------------------------------------------------------------------------------------------
    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        check_model(name, self.parts.client.info())
        return json_response(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        info = self.parts.client.info()
        card = {"id": info.model_name, "object": "model", "created": info.created, "owned_by": "paceline"}
        return {**card, "max_model_len": info.context_tokens, "target_version": info.target_version}

    async def healthz(self) -> Response:
        """Whether the engine lives; a replica that drains does."""
        return self._health("draining" if self.parts.client.is_draining() else "ok", is_ready=True)

    async def readyz(self) -> Response:
        """Whether new requests are taken."""
        is_draining = self.parts.client.is_draining()
        return self._health("draining" if is_draining else "ok", is_ready=not is_draining)

    def _health(self, status: str, *, is_ready: bool) -> Response:
        age_s = self.parts.client.heartbeat_age_s()
        is_alive = age_s <= self.parts.max_silence_s
        age = round(age_s, 3) if age_s != float("inf") else None
        body = {"status": status if is_alive else "engine silent", "heartbeat_age_s": age}
        return json_response(body, status=200 if is_alive and is_ready else 503)

    async def metrics(self) -> Response:
        body, content_type = await asyncio.to_thread(self.parts.metrics)
        return Response(body, media_type=content_type)

    async def state(self) -> Response:
        return json_response(await self.parts.run_state(self.parts.state))

    async def swap(self) -> Response:
        return json_response(await asyncio.to_thread(self.parts.swap))


def make_router(parts: ApiParts) -> APIRouter:
    """Every route of a replica.

    /v1, /tokenize, /detokenize and the extra routers ask for the API token when there is one. State, swap and metrics
    ask for it too, unless `parts` brings rules of their own. /healthz, /readyz and /chat ask for nothing; the open routers check
    what they want themselves.
    """
    api = Api(parts)
    tokens = TokenRoutes(parts, api.prompts, api.tokens)
    router = APIRouter()
    check_token = token_check(parts.api_token)
    locked = APIRouter(dependencies=[Depends(on_loop(check_token))])
    locked.add_api_route("/v1/completions", api.completions, methods=["POST"])
    locked.add_api_route("/v1/chat/completions", api.chat, methods=["POST"])
    for prefix in ("", "/v1"):
        locked.add_api_route(f"{prefix}/tokenize", tokens.tokenize, methods=["POST"])
        locked.add_api_route(f"{prefix}/detokenize", tokens.detokenize, methods=["POST"])
    locked.add_api_route("/v1/models", api.models, methods=["GET"])
    locked.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"])
    for extra in parts.extra_routers:
        locked.include_router(extra)
    router.add_api_route("/healthz", api.healthz, methods=["GET"])
    router.add_api_route("/readyz", api.readyz, methods=["GET"])
    router.add_api_route("/chat", chat_page, methods=["GET"])
    for extra in parts.open_routers:
        router.include_router(extra)
    for path, handler, check in (
        ("/metrics", api.metrics, parts.check_metrics),
        ("/paceline/state", api.state, parts.check_state),
        ("/paceline/swap", api.swap, parts.check_state),
    ):
        router.add_api_route(path, handler, methods=["GET"], dependencies=[Depends(on_loop(check or check_token))])
    router.include_router(locked)
    return router


def build_api(parts: ApiParts) -> FastAPI:
    """The ASGI application of one replica."""
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(make_router(parts))
    on_error = error_handler(parts)
    for kind in (RequestError, CapacityError, EngineStoppedError, Cutoff, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    if parts.has_access_log:
        app.add_middleware(AccessLog)
    return app
