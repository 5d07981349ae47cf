"""Claim: which Serve application of a Ray cluster has a service's name, so that no two share state, controller and figures."""

from __future__ import annotations

import logging
from urllib.parse import quote

from ray import serve
from ray.experimental import internal_kv
from ray.serve.exceptions import RayServeException

from paceline.config import ServiceConfig
from paceline.errors import ConfigError

log = logging.getLogger(__name__)

_SPACE = "paceline"


def application_name(config: ServiceConfig) -> str:
    """Name of the Serve application that `paceline serve` makes: the service's own, as one part of a path."""
    return quote(config.model_name, safe="")


def own_application() -> str:
    """Name of the Serve application that this process is a replica of; '' outside one."""
    try:
        return serve.get_replica_context().app_name
    except RayServeException:
        return ""


def check_claim(config: ServiceConfig, application: str) -> None:
    """Raise ConfigError where another application, which is still there, has the service's name."""
    _check(config, application, _latest(config)[1])


def claim(config: ServiceConfig, application: str) -> None:
    """Take the service's name for an application, from the first of its replicas on; '' = outside Serve, nothing is taken.

    Claims are numbered and none is ever deleted, so that of several applications one alone comes after one that is gone.
    Raises: ConfigError where another one has it.
    """
    while application:
        number, holder = _latest(config)
        if holder == application:
            return
        _check(config, application, holder)
        if holder:
            log.info("the name %s was of application %s, which is gone", config.model_name, holder)
        internal_kv._internal_kv_put(_key(config, number + 1), application, overwrite=False, namespace=_SPACE)


def _check(config: ServiceConfig, application: str, holder: str) -> None:
    if holder not in ("", application) and holder in serve.status().applications:
        raise ConfigError(
            f"model_name (--model-name) must be another one than {config.model_name!r}, which application {holder!r} of this Ray "
            "cluster has: the name is that of the service's state, controller and figures; served_model_names "
            "(--served-model-name) may be the same"
        )


def _latest(config: ServiceConfig) -> tuple[int, str]:
    """Number of the latest claim and the application that made it; (0, '') where there is none."""
    number, holder = 0, ""
    while (held := internal_kv._internal_kv_get(_key(config, number + 1), namespace=_SPACE)) is not None:
        number, holder = number + 1, held.decode()
    return number, holder


def _key(config: ServiceConfig, number: int) -> str:
    return f"service/{config.model_name}/{number}"
