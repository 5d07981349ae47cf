"""Requests as the scheduler holds them."""

from __future__ import annotations

from paceline.serving.engine.running import RunningRequest
from paceline.serving.sampling.request import GenerationRequest, SamplingParams


def make_request(arrival: int, prompt_len: int, max_tokens: int = 8, tenant: str = "") -> RunningRequest:
    request = GenerationRequest(
        request_id=f"r{arrival}",
        prompt_token_ids=tuple(range(3, 3 + prompt_len)),
        params=SamplingParams(),
        tenant=tenant,
    )
    return RunningRequest(
        request=request,
        on_event=lambda e: None,
        arrival=arrival,
        seed=0,
        token_limit=prompt_len + max_tokens,
        stop_token_ids=frozenset(),
        stop_checker=None,
        counts=None,
        submitted_s=0.0,
    )


class NoDrafts:
    """Requests that no drafter knows."""

    def __init__(self, *, can_share: bool = False) -> None:
        self.can_share = can_share

    def may_share(self, request: RunningRequest) -> bool:
        return self.can_share

    def adopt_shared_rows(self, request: RunningRequest) -> None:
        pass

    def forget(self, request: RunningRequest) -> None:
        pass
