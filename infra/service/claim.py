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
    held = internal_kv._internal_kv_get(_key(config), namespace=_SPACE)
    holder = application if held is None else held.decode()
    if holder != application and holder in serve.status().applications:
        raise ConfigError(
            f"model_name (--model-name) must be another one than {config.model_name!r}, which application {holder!r} of this Ray "
            "cluster has: the name is that of the service's state, controller and figures; served_model_names "
            "(--served-model-name) may be the same"
        )


def claim(config: ServiceConfig, application: str) -> None:
    """Take the service's name for an application, from the first of its replicas on; '' = outside Serve, nothing is taken.

    Raises: ConfigError where another one has it.
    """
    while application:
        is_taken = internal_kv._internal_kv_put(_key(config), application, overwrite=False, namespace=_SPACE)
        if not is_taken or internal_kv._internal_kv_get(_key(config), namespace=_SPACE) == application.encode():
            return
        check_claim(config, application)
        log.info("the name %s was of an application that is gone", config.model_name)
        internal_kv._internal_kv_del(_key(config), namespace=_SPACE)


def _key(config: ServiceConfig) -> str:
    return f"service/{config.model_name}"
