"""Names: which ones models, buckets, tenants, participants, requests and tokens may have, and who gives up a place for one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.contracts import CLASS_PREFIX

ENGINE, INGRESS = "engine", "ingress"
"""Kinds of a service's processes, and their deployments: what makes text, and what stands before it where answers outlive a replica."""
_OWN = "@"
OWN_PREFIX = "~"
"""First character of the tenant that a token without one is; no client can name such a tenant."""
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OF_TENANT = re.compile(rf"{_OWN}{OWN_PREFIX}?{_LABEL.pattern}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}")
_ROUTE = re.compile(r"/|(/[A-Za-z0-9][A-Za-z0-9._~-]*){1,8}")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SPEAKER = re.compile(r"[^\s<|\\/>\x00-\x1f\x7f]{1,64}")

LABEL_RULE = "must be 1 to 64 letters, digits, '.', '_' or '-', not beginning with a sign"
CLASS_RULE = (
    f"must be the name of a bucket (code, code@TENANT) or of one of the service's own classes ({CLASS_PREFIX}class-3)"
)
MODEL_RULE = "must be 1 to 128 letters, digits, '.', '_', '-', '/', ':', '@' or '+', not beginning with a sign"
ROUTE_RULE = "must be '/' or like '/name', without a '/' at its end, of letters, digits, '.', '_', '~' and '-'"
REQUEST_ID_RULE = "must be 1 to 128 printable ASCII characters without spaces"
TOKEN_RULE = "must be ASCII, without spaces around it"
SPEAKER_RULE = "must be 1 to 64 characters without spaces, '<', '>', '|', '/' and '\\'"


def is_label(name: str) -> bool:
    """Whether a bucket or a tenant may have this name."""
    return _LABEL.fullmatch(name) is not None


def is_request_id(text: str) -> bool:
    """Whether a client may call its request this, in headers and logs."""
    return _REQUEST_ID.fullmatch(text) is not None


def is_token(text: str) -> bool:
    """Whether a service may take this as a bearer token."""
    return text.isascii() and text.strip() == text != ""


def is_class(name: str) -> bool:
    """Whether requests can be counted under this name: a client's bucket, a tenant's own, or a class of those without one."""
    bucket, sign, tenant = name.partition(_OWN)
    return is_label(bucket.removeprefix(CLASS_PREFIX)) and (not sign or is_label(tenant.removeprefix(OWN_PREFIX)))


def own_bucket(bucket: str, tenant: str) -> str:
    """The bucket of a tenant alone that its requests under this name belong to."""
    return f"{bucket}{_OWN}{tenant}"


def tenant_of(bucket: str) -> str:
    """The tenant whose own a bucket is; '' = it is anybody's."""
    return bucket.partition(_OWN)[2]


def without_tenants(text: str) -> str:
    """A bucket, or a sentence about buckets, without the tenants whose own they are."""
    return _OF_TENANT.sub("", text)


def is_model_name(name: str) -> bool:
    """Whether a service may serve a model under this name."""
    return _MODEL.fullmatch(name) is not None


def is_route(prefix: str) -> bool:
    """Whether a service may have its routes below this path."""
    return _ROUTE.fullmatch(prefix) is not None


def is_speaker(name: str) -> bool:
    """Whether a message may carry this name of who speaks (OpenAI's rule for `name`): no marker of a chat template fits."""
    return _SPEAKER.fullmatch(name) is not None


def donors(held: Mapping[str, float], tenant: str) -> list[str]:
    """Tenants that owe another one a place where all are taken: they hold more than one more. Who holds most comes first.

    So every tenant can have an even part of the places, however many the others had taken while they were free (max-min
    fairness): were none two ahead of a tenant below its part, there would be more places than there are. Parts of places,
    which are estimates, must differ by one and a half, so that a place does not go back and forth.
    """
    due = held.get(tenant, 0.0) + 1.5
    return sorted((t for t in held if held[t] >= due), key=lambda t: (-held[t], t))
