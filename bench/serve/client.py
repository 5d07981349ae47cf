"""Streaming client of any OpenAI-compatible server, and what can go wrong with an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from paceline.bench.common.event_lines import event_lines
from paceline.errors import PacelineError

REFUSED = "refused"
"""HTTP 429: the server said that it is full. Counted, but not an error of the stream."""
LOST = ("connection", "timeout")
"""Problems that a server has which is gone, or whose machine is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRequest:
    """What one client asks for."""

    prompt: str
    bucket: str
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFeatures:
    """Which extensions the server answers to, found by asking."""

    model: str
    has_token_ids: bool
    """`return_token_ids`: every chunk names its tokens."""
    has_usage: bool
    """`stream_options.include_usage`: a last chunk counts them."""
    has_done: bool = True
    """Streams end with `[DONE]`; of a server that never sends it, an answer is whole when it has a finish reason."""


@dataclass(kw_only=True, slots=True)
class StreamResult:
    """One answer as the client saw it."""

    request: StreamRequest
    began_s: float
    problem: str | None = None
    """None when the answer is whole; otherwise one word and details after a colon."""
    ttft_s: float | None = None
    ended_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between chunks with text or tokens."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(time, tokens) of each such chunk; one token each where the server does not name them."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    usage_tokens: int | None = None
    usage_prompt_tokens: int | None = None
    finish_reason: str | None = None
    retry_after_s: float | None = None
    """What a refusal asks to wait, where it says so in seconds."""
    server_stats: dict[str, Any] | None = None
    """Paceline's own account of the answer (the `paceline` object)."""

    @property
    def kind(self) -> str | None:
        """The problem's one word."""
        return None if self.problem is None else self.problem.split(":", 1)[0]

    @property
    def is_lost(self) -> bool:
        """Whether the connection failed or fell silent, as with a server that is gone."""
        return self.kind in LOST


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def words(self) -> str | None:
        """Text of a chat chunk; models that think aloud stream that part under another name."""
        return self.content or self.reasoning_content or self.reasoning


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class _Event(msgspec.Struct):
    """The fields of an event that are read; others may be anything."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    paceline: dict[str, Any] | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class StreamClient:
    """Sends requests to one server; usable by many tasks of one event loop."""

    def __init__(
        self, http: httpx.AsyncClient, *, is_chat: bool, features: ServerFeatures, timer: Callable[[], float] = time.perf_counter,
        extra: Mapping[str, Any] | None = None, names_buckets: bool = False,
    ) -> None:  # fmt: skip
        """extra: body fields that are added to every request; None as a value leaves the field of that name out.
        names_buckets: send each request's bucket as `x-paceline-bucket`, which other servers ignore."""
        self._http, self._is_chat, self._features, self._timer = http, is_chat, features, timer
        self._extra, self._names_buckets = extra or {}, names_buckets

    async def stream(self, request: StreamRequest, result: StreamResult | None = None) -> StreamResult:
        """One streamed answer; never raises for what a server or the network does, `problem` says it.

        result: a new one to be filled, so that who gives the answer up has what came of it.
        """
        result = result or StreamResult(request=request, began_s=0.0)
        result.began_s = self._timer()
        try:
            await self._read(request, result)
        except httpx.TimeoutException as e:
            result.problem = f"timeout: {type(e).__name__}"
        except httpx.HTTPError as e:
            result.problem = f"connection: {type(e).__name__}: {e}"
        result.ended_s = self._timer()
        return result

    async def top_two(self, request: StreamRequest, num_tokens: int) -> tuple[list[int], list[float]] | None:
        """Ask without streaming: (token ids, log-probability of the best less that of the second best token, each).

        None where the server gives no log-probabilities or no token ids.
        Raises: httpx.HTTPError when it does not answer.
        """
        body = self._body(request, is_stream=False, max_tokens=num_tokens)
        body |= {"logprobs": True, "top_logprobs": 2} if self._is_chat else {"logprobs": 2}
        response = await self._http.post(self._path, json=body)
        if response.status_code != 200:
            return None
        try:
            choice = response.json()["choices"][0]
            found = choice.get("logprobs") or {}
            if self._is_chat:
                tops = [[t["logprob"] for t in c["top_logprobs"]] for c in found.get("content") or []]
            else:
                tops = [list(t.values()) for t in found.get("top_logprobs") or []]
            ids = choice.get("token_ids") or []
            ordered = [sorted(map(float, t), reverse=True) for t in tops]
        except (ValueError, LookupError, TypeError, AttributeError):  # no answer in OpenAI's form
            return None
        if not tops or not ids:
            return None
        return ids, [t[0] - t[1] if len(t) > 1 else float("inf") for t in ordered]

    async def answers(self) -> bool:
        """Whether anything answers at the server's address."""
        try:
            await self._http.get("/v1/models")
        except httpx.HTTPError:
            return False
        return True

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self._is_chat else "/v1/completions"

    def _body(self, request: StreamRequest, *, is_stream: bool, max_tokens: int | None = None) -> dict[str, Any]:
        is_chat, features = self._is_chat, self._features
        body: dict[str, Any] = {
            "model": features.model,
            "max_tokens": max_tokens or request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stream": is_stream,
            "messages": [{"role": "user", "content": request.prompt}] if is_chat else None,
            "prompt": None if is_chat else request.prompt,
            "return_token_ids": features.has_token_ids or None,
            "stream_options": {"include_usage": True} if features.has_usage and is_stream else None,
        }
        return {k: v for k, v in {**body, **self._extra}.items() if v is not None}

    async def _read(self, request: StreamRequest, result: StreamResult) -> None:
        is_done = False
        headers = {"x-paceline-bucket": request.bucket} if self._names_buckets else None
        body = self._body(request, is_stream=True)
        async with self._http.stream("POST", self._path, json=body, headers=headers) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", errors="replace")
                kind = REFUSED if response.status_code == 429 else f"http_{response.status_code}"
                result.problem = f"{kind}: {text[:200]}"
                result.retry_after_s = _seconds(response.headers.get("retry-after"))
                return
            async for line in event_lines(response):
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    is_done = True
                    continue
                self._take(data, result)
                if result.problem is not None:
                    return
        if not is_done and (self._features.has_done or result.finish_reason is None):
            result.problem = "no_done: the stream ended without [DONE]"
        elif result.finish_reason not in ("stop", "length"):
            result.problem = f"no_end: finish reason {result.finish_reason!r}"
        elif self._features.has_token_ids and self._features.has_usage and len(result.token_ids) != result.usage_tokens:
            result.problem = f"lost_tokens: {len(result.token_ids)} token ids arrived, usage says {result.usage_tokens}"

    def _take(self, data: str, result: StreamResult) -> None:
        """Fold one event."""
        now = self._timer()
        try:
            event = _decode_event(data)
        except msgspec.ValidationError as e:
            result.problem = f"bad_event: {e}: {data[:100]}"
            return
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            result.problem = f"bad_json: {data[:100]}"
            return
        if event.error is not None:
            result.problem = f"error_event: {msgspec.json.encode(event.error).decode()[:200]}"
            return
        if event.usage is not None:
            result.usage_tokens, result.usage_prompt_tokens = event.usage.completion_tokens, event.usage.prompt_tokens
        result.server_stats = event.paceline or result.server_stats
        for choice in event.choices or []:
            text = choice.text
            if self._is_chat:
                text = choice.delta.words if choice.delta is not None else None
            ids = choice.token_ids or []
            result.finish_reason = choice.finish_reason or result.finish_reason
            if not text and not ids:
                continue
            if result.ttft_s is None:
                result.ttft_s = now - result.began_s
            else:
                result.gaps_s.append(now - result.arrivals[-1][0])
            result.arrivals.append((now, len(ids) if self._features.has_token_ids else 1))
            result.text += text or ""
            result.token_ids += ids


def _seconds(header: str | None) -> float | None:
    """A Retry-After header that is a number of seconds; None for a date or nothing."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None


async def find_features(
    http: httpx.AsyncClient,
    url: str,
    *,
    is_chat: bool,
    model: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> ServerFeatures:
    """Ask which model is served (unless `model` names it) and which extensions it takes.

    Raises: PacelineError when nothing answers there, the server wants a token, or it refuses a plain request.
    """
    model = model or await _served_model(http, url)
    probe = StreamRequest(prompt="Hello", bucket="default", max_tokens=1, temperature=0.0, seed=0)
    said = ""
    for has_token_ids, has_usage in ((True, True), (False, True), (False, False)):
        wanted = ServerFeatures(model=model, has_token_ids=has_token_ids, has_usage=has_usage)
        result = await StreamClient(http, is_chat=is_chat, features=wanted, extra=extra).stream(probe)
        said = result.problem or ""
        ends_without_done = said.startswith("no_done") and result.finish_reason is not None
        if not said or ends_without_done or said.startswith("lost_tokens"):
            # a server may also let an unknown field pass without doing what it asks
            return ServerFeatures(
                model=model, has_token_ids=bool(result.token_ids), has_usage=result.usage_tokens is not None,
                has_done=not ends_without_done,
            )  # fmt: skip
        if said.startswith("http_401"):
            raise PacelineError(_wants_token(url))
    raise PacelineError(f"the server at {url} refuses a plain streaming request: {said}")


async def _served_model(http: httpx.AsyncClient, url: str) -> str:
    try:
        response = await http.get("/v1/models")
    except httpx.HTTPError as e:
        raise PacelineError(
            f"no server answers at {url} ({type(e).__name__}); start one with `paceline serve`, or give --serve to have "
            "one started for this run"
        ) from e
    if response.status_code == 401:
        raise PacelineError(_wants_token(url))
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise PacelineError(f"url must be an OpenAI-compatible server, but {url}/v1/models answered HTTP {response.status_code}") from e  # fmt: skip


def _wants_token(url: str) -> str:
    return f"the server at {url} wants a token; give --api-token or set PACELINE_API_TOKEN"
