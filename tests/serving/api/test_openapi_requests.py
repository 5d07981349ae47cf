"""What schemathesis makes of the published description: whatever fits it or does not, answers are those that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.api.openapi import BODIES
from tests.helpers.api_server import TOKENIZER, ScriptedEngine

PAGES = ("/healthz", "/health", "/ping", "/readyz", "/version", "/chat", "/docs", "/metrics", "/paceline/state", "/paceline/swap", "/v1/models", "/v1/models/{name}", "/tokenizer_info", "/v1/tokenizer_info")  # fmt: skip
NAMES = [*(f"get {path}" for path in PAGES), *(f"post {path}" for path in BODIES)]
TOO_STRICT = "positive_data_acceptance"
"""Fields that exclude each other, and prompts that do not fit, are valid by the description and are refused."""
Ask = Callable[[str, str, int], set[int]]


@pytest.fixture(scope="module")
def operations() -> dict[str, Any]:
    import schemathesis  # a second, which those who only collect the tests do without

    api = build_api(ApiParts(client=ScriptedEngine("hi"), tokenizer=TOKENIZER))
    found = [op.ok() for op in schemathesis.openapi.from_asgi("/openapi.json", api).get_all_operations()]
    return {f"{op.method} {op.path}": op for op in found}


@pytest.fixture(scope="module")
def ask(operations: dict[str, Any]) -> Ask:
    """Statuses of requests for one operation; raises what a check says of an answer."""
    from schemathesis import GenerationMode
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    (too_strict,) = [check for check in CHECKS.get_all() if check.__name__ == TOO_STRICT]

    def statuses(name: str, mode: str, num_requests: int) -> set[int]:
        seen: set[int] = set()

        @settings(max_examples=num_requests, deadline=None, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(case=operations[name].as_strategy(generation_mode=GenerationMode(mode)))
        def run(case: Any) -> None:
            response = case.call()
            seen.add(response.status_code)
            case.validate_response(response, excluded_checks=[too_strict])

        run()
        return seen

    return statuses


def test_every_operation_is_asked(operations: dict[str, Any]) -> None:
    assert set(operations) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_fits_the_description_is_answered_as_it_says(ask: Ask, name: str) -> None:
    assert ask(name, "positive", 30) <= {200, 400, 404}


def test_a_silent_engine_is_told_of_as_the_description_says() -> None:
    import schemathesis

    engine = ScriptedEngine("hi")
    engine.heartbeat_age_s = lambda: 1e9  # type: ignore[method-assign]
    schema = schemathesis.openapi.from_asgi("/openapi.json", build_api(ApiParts(client=engine, tokenizer=TOKENIZER)))
    for path in ("/healthz", "/health", "/ping"):
        case = schema[path]["GET"].Case()
        response = case.call()
        assert response.status_code == 503
        # that there are 5xx at all is what the one check left out is against
        case.validate_response(response, excluded_checks=[schemathesis.checks.not_a_server_error])


@pytest.mark.parametrize("path", BODIES)
def test_what_does_not_fit_it_is_refused(ask: Ask, path: str) -> None:
    assert ask(f"post {path}", "negative", 15) == {400}
