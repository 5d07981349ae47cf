"""Demo client: sends one planned request over HTTP, reads the service's state."""

from __future__ import annotations

import time

import httpx

from paceline.errors import PacelineError
from paceline.infra.controller.snapshot import Snapshot, parse_state
from paceline.infra.demo.diary import Answer
from paceline.infra.demo.scenario import PlannedRequest

MAX_TOKENS = 144


class DemoClient:
    """Talks to one service; not thread-safe."""

    def __init__(
        self, url: str, model_name: str, began: float, bucket: str | None = None, *, adds_special_tokens: bool = True
    ) -> None:
        """bucket: the class that it names in every request, None to name none. adds_special_tokens: to prompts; a chat template
        has written them."""
        headers = {} if bucket is None else {"x-paceline-bucket": bucket}
        self._http = httpx.Client(base_url=url, timeout=httpx.Timeout(120.0, connect=10.0), headers=headers)
        self._model, self._adds_special_tokens = model_name, adds_special_tokens
        self._began = began

    def close(self) -> None:
        self._http.close()

    def send(self, plan: PlannedRequest, phase: str) -> Answer:
        """Send one completion and return what came back; raises PacelineError when it was refused or cut off."""
        start = time.monotonic()
        response = self._http.post(
            "/v1/completions",
            json={
                "model": self._model,
                "prompt": plan.prompt.text,
                "max_tokens": MAX_TOKENS,
                "temperature": plan.temperature,
                "seed": plan.seed,
                "return_token_ids": True,
                "add_special_tokens": self._adds_special_tokens,
            },
            headers={"x-paceline-group": plan.group.value},
        )
        if response.status_code != 200:
            raise PacelineError(
                f"request {plan.place} of {plan.prompt.bucket} got HTTP {response.status_code}: {response.text[:200]}"
            )
        body = response.json()
        choice, stats = body["choices"][0], body["paceline"]
        if choice["finish_reason"] not in ("stop", "length"):
            raise PacelineError(f"request {plan.place} of {plan.prompt.bucket} ended with {choice['finish_reason']}")
        return Answer(
            phase=phase,
            place=plan.place,
            bucket=plan.prompt.bucket,
            traffic_class=stats["bucket"],
            group=plan.group,
            temperature=plan.temperature,
            num_tokens=body["usage"]["completion_tokens"],
            num_rounds=stats["num_rounds"],
            num_accepted_tokens=stats["num_accepted_tokens"],
            device_s=stats["round_ms"] / 1e3,
            latency_s=time.monotonic() - start,
            ended=time.monotonic() - self._began,
            drafter_version=stats["drafter_version"],
            prompt_token_ids=tuple(choice["prompt_token_ids"]),
            output_token_ids=tuple(choice["token_ids"]),
        )

    def context_tokens(self) -> int:
        """Most tokens of a prompt and its answer. Raises: PacelineError."""
        response = self._http.get("/v1/models")
        if response.status_code != 200:
            raise PacelineError(f"/v1/models answered HTTP {response.status_code}: {response.text[:200]}")
        return int(response.json()["data"][0]["max_model_len"])

    def state(self) -> Snapshot | None:
        """What the service knows about itself, None while it cannot be had."""
        try:
            response = self._http.get("/paceline/state", timeout=5.0)
            return parse_state(response.content) if response.status_code == 200 else None
        except httpx.HTTPError:
            return None
