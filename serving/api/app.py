"""HTTP app: OpenAI-compatible routes over a small engine protocol."""

from __future__ import annotations

import asyncio
import uuid
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response

from paceline import __version__
from paceline.errors import CapacityError, EngineStoppedError
from paceline.serving.api.access_log import AccessLog, access_record
from paceline.serving.api.bodies import ChatBody, CompletionBody, GenerateBody, ResponsesBody
from paceline.serving.api.chat_page import chat_page
from paceline.serving.api.generation import ApiParts, EngineInfo, EventStream, Generation, begun, events, whole
from paceline.serving.api.http import (
    FinishRate,
    QueueFull,
    answer_errors,
    enter,
    json_response,
    on_loop,
    read_body,
    visit_of,
)
from paceline.serving.api.openapi import openapi_document, openapi_page
from paceline.serving.api.prompts import Prompts, TokenRoutes, parsed, with_tokens
from paceline.serving.api.requests import check_model, engine_requests, request_id_of
from paceline.serving.sampling.request import GenerationRequest
from paceline.serving.sampling.text_stream import TextStream, TokenText
from paceline.serving.wire.calls import CallParser
from paceline.serving.wire.choice import Choice, ChoiceStyle, make_echo
from paceline.serving.wire.exchange import Exchange
from paceline.serving.wire.format import Answer, WireAnswer
from paceline.serving.wire.response import ResponseAnswer
from paceline.serving.wire.tools import CallPlan, plan_calls


class Api:
    """The handlers of one replica."""

    def __init__(self, parts: ApiParts) -> None:
        self.parts = parts
        self.tokens = TokenText(parts.tokenizer)
        self.prompts = Prompts(parts.tokenizer)
        self._finishes = FinishRate()

    # ---- generation ---------------------------------------------------------------------------------------------
    async def completions(self, request: Request) -> Response:
        """Continue texts or token ids."""
        arrived_s = self._arrive(request)
        body: CompletionBody = await parsed(await read_body(request), CompletionBody)
        return await self._answer(
            request, body, await self.prompts.encode_each(body.prompts, special=body.add_special_tokens), arrived_s
        )

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        arrived_s = self._arrive(request)
        return await self._chat(request, await parsed(await read_body(request), ChatBody), arrived_s)

    async def responses(self, request: Request) -> Response:
        """Answer a conversation in the words of the Responses API."""
        arrived_s = self._arrive(request)
        body: ResponsesBody = await parsed(await read_body(request), ResponsesBody)
        chat = body.as_chat()
        with body.own_names():
            return await self._chat(request, chat, arrived_s, body)

    async def _chat(
        self, request: Request, body: ChatBody, arrived_s: float, asked: ResponsesBody | None = None
    ) -> Response:
        """asked: what the client sent, where that was not the chat itself."""
        plan = plan_calls(
            body, body.form, self.prompts.tool_style, self.tokens.special_texts,
            is_parallel=body.parallel_tool_calls is not False,
        )  # fmt: skip
        token_ids = await self.prompts.encode_chat(body, self.parts.client.info().context_tokens)
        return await self._answer(request, body, [token_ids], arrived_s, plan, asked)

    def _arrive(self, request: Request) -> float:
        """The time in the engine's clock; raises EngineStoppedError while the replica drains."""
        access_record(request).request_id = request_id_of(request)
        if self.parts.client.is_draining():
            raise EngineStoppedError("this replica is shutting down; send the request again")
        return self.parts.client.now()

    async def _answer(
        self, request: Request, body: GenerateBody, prompts: list[list[int]], arrived_s: float,
        plan: CallPlan | None = None, asked: ResponsesBody | None = None,
    ) -> Response:  # fmt: skip
        info, record, visit = self.parts.client.info(), access_record(request), visit_of(request)
        check_model(body.model, info)
        # never the client's own: by it requests are held back, tried on a canary and traced
        record.answer_id = answer_id = uuid.uuid4().hex
        special = self.tokens.special_texts
        requests = engine_requests(
            request, body, prompts, parts=self.parts, info=info, request_id=answer_id, arrived_s=arrived_s,
            visit=visit, grammar=None if plan is None else plan.grammar,
            bad_words=await self.prompts.spellings(body.bad_words or ()),
            kept_token_ids=() if plan is None else tuple(special[text] for text in plan.form.marks if text in special),
        )  # fmt: skip
        first = requests[0]
        record.prompt_tokens = num_prompt = sum(len(r.prompt_token_ids) for r in requests[:: body.num_choices])
        record.labels = {
            "bucket": first.bucket, "group": first.group.value, "tenant": first.tenant or None, "n": len(requests),
            "stream": bool(body.stream), "priority": first.priority or None,
        }  # fmt: skip
        own = await self._new_answer(body, requests, answer_id, info.model_name, plan)
        answer: WireAnswer = own
        if asked is not None:
            answer = ResponseAnswer(own, answer_id=answer_id, told=asked.told())
        visit.account.charge_prompt(num_prompt)
        generation = Generation(
            self.parts, requests, answer, record, self._finishes.note,
            on_close=lambda: visit.account.charge_answer(answer.num_completion_tokens),
        )  # fmt: skip
        try:
            await generation.submit()
        except BaseException as e:  # also a client that hangs up meanwhile
            visit.account.charge_answer(-num_prompt)
            if isinstance(e, CapacityError):
                raise QueueFull(str(e), self._finishes.retry_after_s(self.parts.client.num_waiting())) from e
            raise
        headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache"}
        ignored = body.ignored if asked is None else asked.ignored
        if ignored:
            headers["x-paceline-ignored"] = ", ".join(ignored)
        if self.parts.sends_request_id:
            headers["x-request-id"] = record.request_id
        if body.stream:
            if first.deadline_s is not None:  # so that one that expires in the queue has a status of its own
                await begun(request, generation)
            return EventStream(generation, events(generation, record), headers)
        return Response(await whole(request, generation), media_type="application/json", headers=headers)

    async def _new_answer(
        self, body: GenerateBody, requests: list[GenerationRequest], answer_id: str, model_name: str,
        plan: CallPlan | None,
    ) -> Answer:  # fmt: skip
        is_chat, skip, params = isinstance(body, ChatBody), body.skip_special_tokens, requests[0].params
        style = ChoiceStyle(
            is_chat=is_chat,
            num_top=body.num_logprobs(),
            num_prompt_top=body.prompt_logprobs,
            with_token_ids=bool(body.return_token_ids),
            stop_token_ids=frozenset(params.stop_token_ids),
            with_segments=body.return_segments,
            with_own_stats=len(requests) > 1,
        )
        choices: list[Choice] = []
        echo = None
        for i, request in enumerate(requests):
            prompt = request.prompt_token_ids
            if isinstance(body, CompletionBody) and body.echo and i % body.num_choices == 0:
                echo = await with_tokens(partial(make_echo, self.tokens, prompt, skip_special=skip), prompt)
            stream = TextStream(
                self.tokens, prompt_token_ids=prompt, stop=params.stop, min_tokens=params.min_tokens, skip_special=skip,
                kept_ids=params.kept_token_ids,
            )  # fmt: skip
            parser = None
            if plan is not None:
                parser = CallParser(
                    plan.form, plan.functions, is_parallel=plan.is_parallel, is_forced=plan.is_forced,
                    keeps_form=plan.grammar is not None,
                )  # fmt: skip
            choices.append(Choice(i, self.tokens, stream, style, prompt_token_ids=prompt, echo=echo, parser=parser))
        options = body.stream_options
        return Answer(
            choices,
            answer_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{answer_id}",
            model_name=model_name,
            is_chat=is_chat,
            num_prompts=len(requests) // body.num_choices,
            with_usage=options is not None and options.wants_usage,
            with_running_usage=options is not None and bool(options.continuous_usage_stats),
        )

    # ---- the rest -----------------------------------------------------------------------------------------------
    async def models(self) -> Response:
        """The model under each of its names."""
        info = self.parts.client.info()
        cards = [self._model_card(info, name) for name in (info.model_name, *info.aliases)]
        return json_response({"object": "list", "data": cards})

    async def model(self, name: str) -> Response:
        """The model under one of its names; the list where there is none, behind a slash."""
        if not name:
            return await self.models()
        info = self.parts.client.info()
        check_model(name, info)
        return json_response(self._model_card(info, name))

    def _model_card(self, info: EngineInfo, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": info.created, "owned_by": "paceline", "root": info.model_name}
        return {**card, "max_model_len": info.context_tokens, "target_version": info.target_version}

    async def version(self) -> Response:
        """The release of the service."""
        return json_response({"version": __version__})

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
        """Prometheus's text format."""
        body, content_type = await asyncio.to_thread(self.parts.metrics)
        return Response(body, media_type=content_type)

    async def state(self) -> Response:
        """What the service decides and serves."""
        return json_response(await self.parts.run_state(self.parts.state))

    async def swap(self) -> Response:
        """The drafter slots of this replica."""
        return json_response(await asyncio.to_thread(self.parts.swap))


def make_router(parts: ApiParts) -> APIRouter:
    """Every route of a replica.

    /v1, the routes of tokens and the extra routers are locked: `parts.clients` says who may use them. State, swap and
    metrics are too, unless `parts` brings rules of their own. Health, version, the API's description and /chat ask for
    nothing; the open routers check what they want themselves.
    """
    api = Api(parts)
    tokens = TokenRoutes(parts, api.prompts, api.tokens)
    router = APIRouter()
    check_client = enter(parts.clients)
    locked = APIRouter(dependencies=[Depends(on_loop(check_client))])
    locked.add_api_route("/v1/completions", api.completions, methods=["POST"])
    locked.add_api_route("/v1/chat/completions", api.chat, methods=["POST"])
    locked.add_api_route("/v1/responses", api.responses, methods=["POST"])
    for prefix in ("", "/v1"):
        locked.add_api_route(f"{prefix}/tokenize", tokens.tokenize, methods=["POST"])
        locked.add_api_route(f"{prefix}/detokenize", tokens.detokenize, methods=["POST"])
        locked.add_api_route(f"{prefix}/tokenizer_info", tokens.tokenizer_info, methods=["GET"])
    locked.add_api_route("/v1/models", api.models, methods=["GET"])
    locked.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"])
    for extra in parts.extra_routers:
        locked.include_router(extra)
    for path in ("/healthz", "/health", "/ping"):
        router.add_api_route(path, api.healthz, methods=["GET"])
    router.add_api_route("/readyz", api.readyz, methods=["GET"])
    router.add_api_route("/version", api.version, methods=["GET"])
    router.add_api_route("/chat", chat_page, methods=["GET"])
    router.add_api_route("/openapi.json", openapi_document, methods=["GET"])
    router.add_api_route("/docs", openapi_page, methods=["GET"])
    for extra in parts.open_routers:
        router.include_router(extra)
    for path, handler, check in (
        ("/metrics", api.metrics, parts.check_metrics),
        ("/paceline/state", api.state, parts.check_state),
        ("/paceline/swap", api.swap, parts.check_state),
    ):
        router.add_api_route(path, handler, methods=["GET"], dependencies=[Depends(on_loop(check or check_client))])
    router.include_router(locked)
    return router


def build_api(parts: ApiParts) -> FastAPI:
    """The ASGI application of one replica."""
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(make_router(parts))
    answer_errors(app, sends_request_id=parts.sends_request_id)
    app.add_middleware(AccessLog, meters=parts.meters, is_written=parts.has_access_log, spans=parts.spans)
    # outermost but for what answers errors
    app.add_middleware(Exchange, body_grace_s=parts.body_grace_s, write_s=parts.write_s)
    return app
