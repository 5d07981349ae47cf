"""Event stream: carries a request's events from an engine's process to the one that holds the client's connection.

One item a round, or several rounds in one where they are ready together: a second hop is paid per item. The first item
says that the engine took the request, and an item without events is a sign of life.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, fields, replace
from typing import Literal

import msgspec

from paceline.errors import CapacityError, EngineStoppedError, PacelineError, RequestError
from paceline.serving.api.generation import EngineClient, EngineInfo, compile_in_thread
from paceline.serving.sampling.request import GenerationRequest, RoundEvent

SIGN_OF_LIFE_S = 3.0

Refusal = Literal["request", "capacity", "stopped"]
_ERRORS: dict[Refusal, type[PacelineError]] = {
    "request": RequestError,
    "capacity": CapacityError,
    "stopped": EngineStoppedError,
}


class StreamItem(msgspec.Struct, array_like=True, frozen=True):
    """What crosses at once."""

    events: tuple[RoundEvent, ...] = ()
    refusal: Refusal | None = None
    """Why the engine did not take the request; nothing follows."""
    message: str = ""
    target_version: str = ""
    """With the item that says that the engine took the request: of the target that it decodes with."""

    def raise_refusal(self) -> None:
        """Raise what the engine raised when it was given the request."""
        if self.refusal is not None:
            raise _ERRORS[self.refusal](self.message)


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the process in front must know of the engines."""

    info: EngineInfo
    holdback_percent: int
    model: str = ""
    """As it is configured; '' from older releases."""


@dataclass(frozen=True, kw_only=True)
class _SentRequest(GenerationRequest):
    left_s: float | None = None
    """Until its deadline when it was sent: the engine's clock may be another one. None from older releases, too."""
    model: str = ""
    """That whose tokens the prompt is made of, as it is configured; '' = unknown, from older releases."""
    target_version: str = ""
    """Of the target that the output so far is from; '' = there is none yet."""


encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(_SentRequest).decode
decode_item = msgspec.msgpack.Decoder(StreamItem).decode
decode_facts = msgspec.msgpack.Decoder(EngineFacts).decode


def encode_request(request: GenerationRequest, now_s: float, *, model: str = "", target_version: str = "") -> bytes:
    """A request as it crosses. now_s: of the clock that its deadline is of; model, target_version: as in _SentRequest."""
    left_s = None if request.deadline_s is None else request.deadline_s - now_s
    values = {f.name: getattr(request, f.name) for f in fields(request)}
    return encode(_SentRequest(**values, left_s=left_s, model=model, target_version=target_version))


async def stream_events(
    client: EngineClient,
    raw: bytes,
    *,
    model: str = "",
    max_silence_s: float = 30.0,
    sign_of_life_s: float = SIGN_OF_LIFE_S,
) -> AsyncGenerator[bytes, None]:
    """Submit a request of `encode_request` and yield encoded StreamItems; closing it early aborts the request.

    A request for another model than `model`, as while one replaces the other, or behind output of another target, is refused.

    Raises: EngineStoppedError when the engine's thread has shown no life for max_silence_s.
    """
    request, own = _decode_request(raw), client.info().target_version
    is_other = "" not in (request.model, model) and request.model != model
    if is_other or request.target_version not in ("", own):
        yield encode(StreamItem(refusal="stopped", message="the model was replaced by another one"))
        return
    if request.left_s is not None:
        request = replace(request, deadline_s=client.now() + request.left_s)
    queue: asyncio.Queue[RoundEvent] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def on_event(event: RoundEvent) -> None:  # engine thread
        try:
            loop.call_soon_threadsafe(queue.put_nowait, event)
        except RuntimeError:  # the loop is closed: nobody listens any more
            client.abort(request.request_id)

    try:
        held: object = None
        if request.params.grammar is not None:  # compiling must not hold up the event loop, whatever others compile
            held = await compile_in_thread(lambda: client.prepare(request), request.tenant)
        client.submit_all([request], on_event)
        del held
    except (RequestError, CapacityError, EngineStoppedError) as e:
        kind: Refusal = next(k for k, error in _ERRORS.items() if isinstance(e, error))
        yield encode(StreamItem(refusal=kind, message=str(e)))
        return
    is_finished = False
    try:
        yield encode(StreamItem(target_version=own))
        while not is_finished:
            try:
                async with asyncio.timeout(sign_of_life_s):
                    events = [await queue.get()]
            except TimeoutError:
                age_s = client.heartbeat_age_s()
                if age_s > max_silence_s:
                    raise EngineStoppedError(f"the engine has been silent for {age_s:.0f} s") from None
                yield encode(StreamItem())
                continue
            while not queue.empty():
                events.append(queue.get_nowait())
            is_finished = events[-1].finish_reason is not None
            yield encode(StreamItem(tuple(events)))
    finally:
        if not is_finished:
            client.abort(request.request_id)
