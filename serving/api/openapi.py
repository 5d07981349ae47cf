"""OpenAPI: what the routes take, described by the models that check the bodies; /openapi.json and a page without scripts."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from paceline import __version__
from paceline.serving.api.bodies import ChatBody, CompletionBody, ResponsesBody
from paceline.serving.api.http import json_response
from paceline.serving.api.prompts import DetokenizeBody, TokenizeChat, TokenizePrompt

BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/completions": (CompletionBody,),
    "/v1/chat/completions": (ChatBody,),
    "/v1/responses": (ResponsesBody,),
    "/tokenize": (TokenizePrompt, TokenizeChat),
    "/v1/tokenize": (TokenizePrompt, TokenizeChat),
    "/detokenize": (DetokenizeBody,),
    "/v1/detokenize": (DetokenizeBody,),
}
"""Path -> the models that its POST body is checked by; any one of them."""
_TOKEN_PATHS = ("/v1/", "/token", "/detokenize")
_REFUSALS = {
    400: "a field is wrong, unknown, not supported, or does not fit with the others",
    401: "no valid token",
    403: "another tenant's name, or another site's page",
    404: "no such model",
    408: "the body did not come in time",
    413: "the body is too large",
    415: "the body is not sent as application/json",
    429: "the queue is full, or the tenant's limit is reached: Retry-After",
    500: "a fault of the service",
    503: "no engine can answer now: Retry-After",
    504: "the time limit passed",
}
"""Status -> what a refusal with it means."""
_MEDIA_TYPES = {"/chat": "text/html", "/docs": "text/html", "/metrics": "text/plain"}
"""Of routes that answer with something else than JSON."""
_HEALTH = ("/healthz", "/health", "/ping", "/readyz")
_PAGES = "/dashboard"
"""What the dashboard's page asks for is nobody else's."""
_STREAMING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_ERROR = {
    "type": "object",
    "description": "Why a request was refused.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The OpenAPI document of an application's routes."""
    document = get_openapi(title="Paceline", version=__version__, routes=list(routes))
    kinds = list(dict.fromkeys(kind for each in BODIES.values() for kind in each))
    refs, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas.get("$defs", {}))
    components["schemas"]["Error"] = _ERROR
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    document["paths"] = {path: each for path, each in document["paths"].items() if not path.startswith(_PAGES)}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path.startswith(_TOKEN_PATHS):
                operation["security"] = [{"bearer": []}, {}]
            if method == "post" and path in BODIES:
                options = [refs[(kind, "validation")] for kind in BODIES[path]]
                schema = options[0] if len(options) == 1 else {"anyOf": options}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            _describe_answers(method, path, operation["responses"])
    return document


def _describe_answers(method: str, path: str, responses: dict[str, Any]) -> None:
    """Add what a route may answer besides what its function declares."""
    content = responses.setdefault("200", {"description": "OK"}).setdefault("content", {})
    if path in _MEDIA_TYPES:
        content.clear()
        content[_MEDIA_TYPES[path]] = {"schema": {"type": "string"}}
    if path in _STREAMING:
        content["text/event-stream"] = {"schema": {}}
    if path in _HEALTH:
        ill = {"application/json": {"schema": {"type": "object"}}}
        responses["503"] = {"description": "the engine is silent, or no requests are taken", "content": ill}
        return
    statuses = [401, 403, 404, 500, 503]
    if path.startswith(_TOKEN_PATHS):
        statuses += [400, 408, 413, 429, 504]
        responses.pop("422", None)  # FastAPI's own, whose place 400 has
    elif method == "post":
        statuses += [400, 413, 415]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status in statuses:
        responses.setdefault(str(status), {"description": _REFUSALS[status], "content": error})


async def openapi_document(request: Request) -> Response:
    """This service's OpenAPI document."""
    return json_response(_description(request.app))


async def openapi_page(request: Request) -> Response:
    """The same document as a page."""
    headers = {
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(page(_description(request.app)), media_type="text/html", headers=headers)


def _description(app: FastAPI) -> dict[str, Any]:
    """`describe`, once an application: it takes long, and nobody has to show a token for it."""
    if app.openapi_schema is None:
        app.openapi_schema = describe(app.routes)
    return app.openapi_schema


def page(document: dict[str, Any]) -> str:
    """HTML of an OpenAPI document: routes, then the fields of their bodies."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{_text(document['info']['title'])} API</title><style>body{{font:15px/1.5 system-ui;max-width:60em;"
        "margin:2em auto;padding:0 1em;color-scheme:light dark}td,th{text-align:left;vertical-align:top;padding:.2em 1em "
        ".2em 0}code{white-space:pre-wrap}</style>",
        f"<h1>{_text(document['info']['title'])} {_text(document['info']['version'])}</h1>",
        "<p>The document for programs: <a href=openapi.json>openapi.json</a>.</p><h2>Routes</h2><table>",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            words = operation.get("description") or operation.get("summary") or ""
            ref = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            names = [r["$ref"].rsplit("/", 1)[-1] for r in ref.get("anyOf", [ref]) if "$ref" in r]
            links = " or ".join(f"<a href='#{_text(n)}'>{_text(n)}</a>" for n in names)
            parts.append(f"<tr><td><code>{method.upper()} {_text(path)}</code><td>{_text(words)}<td>{links}")
    parts.append("</table>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f"<h3 id='{_text(name)}'>{_text(name)}</h3><p>{_text(schema.get('description', ''))}</p><table>")
        for field, rule in schema.get("properties", {}).items():
            words = _text(rule.get("description", ""))
            parts.append(f"<tr><td><code>{_text(field)}</code><td><code>{_text(_kind(rule))}</code><td>{words}")
        parts.append("</table>")
    return "".join(parts)


def _kind(rule: dict[str, Any]) -> str:
    """The type that a schema allows, in words."""
    if "$ref" in rule:
        return str(rule["$ref"]).rsplit("/", 1)[-1]
    for key in ("anyOf", "oneOf"):
        if key in rule:
            return " | ".join(dict.fromkeys(_kind(each) for each in rule[key]))
    if "enum" in rule or "const" in rule:
        return " | ".join(repr(v) for v in rule.get("enum", [rule.get("const")]))
    if rule.get("type") == "array":
        return f"list of {_kind(rule.get('items', {}))}"
    return str(rule.get("type", "any"))


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
