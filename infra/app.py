"""Service: the Serve application, the one-computer service, and `paceline serve` that keeps it in the foreground."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from ray._private import ray_constants
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray._raylet import Config as RaySettings  # type: ignore[attr-defined]
from ray.serve import Application
from ray.serve.context import _disconnect, _get_global_client
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus
from rich.console import Console

from paceline.adapt.data.blob_io import check_store
from paceline.config import (
    DEFAULT_PORT,
    VARIABLES,
    AttachOptions,
    ServiceConfig,
    build_service,
    most_replicas,
    override,
    to_dict,
    with_absolute_paths,
    with_environment,
)
from paceline.errors import ConfigError, PacelineError
from paceline.infra.controller.actor import NAMESPACE, stop_controller
from paceline.infra.replica.serve_clock import CONTROLLER_CALLBACK, CONTROLLER_VARIABLE
from paceline.infra.replica.span_target import SpanTarget
from paceline.infra.service.claim import application_name, check_claim
from paceline.infra.service.deployment import DeploymentLimits, bind_replicas, replica_values
from paceline.infra.service.front import PROXY_CALLBACK, PROXY_VARIABLE
from paceline.infra.service.ingress import bind_resuming
from paceline.infra.service.preflight import cluster_address, preflight, warn_of_end
from paceline.infra.service.stop_signals import StopSignals, kept_sigterm
from paceline.infra.service.stores import StorePaths, is_adaptive
from paceline.infra.state.desired import ensure_first_version
from paceline.infra.state.layout import make_home
from paceline.infra.state.log import keep_audit
from paceline.infra.state.redis_clients import Keys, patient_client, redact
from paceline.infra.state.redis_clock import deployment_time
from paceline.infra.state.redis_server import EmbeddedRedis, resolve_redis
from paceline.infra.web.access import Access
from paceline.machine import SystemClock, claim_port, free_port
from paceline.paths import keep_private, resolve_drafter, resolve_model
from paceline.serving.wire.credentials import Tokens

log = logging.getLogger(__name__)

FACTORY = "paceline.infra.service.parts:replica_parts"
OBJECT_STORE_BYTES = 150 * 2**20
LOCAL_GRACE_S = 30.0
"""Drain of a service on one computer; a cluster's Serve configuration sets its own."""
STREAM_GRACE_S = 900.0
"""At least the longest stream: drain of a replica that goes while the service stays."""
_REACH_S = 5.0
_SLOW_START = "timed out during startup"
"""What Ray says of it."""
_LEFT_OUT = ("start_log_monitor", "start_monitor", "start_api_server")
"""Of Ray's processes on a computer: those that print workers' lines at drivers, ask for more nodes, and serve its dashboard."""
_LOOK_S = 0.1
_ANSWERS_S = 10.0
_CLOSING_S = 30.0
"""For what a replica does behind its drain: last feedback, last traces."""
SERVE_SETTINGS = {
    PROXY_VARIABLE: PROXY_CALLBACK,
    CONTROLLER_VARIABLE: CONTROLLER_CALLBACK,
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
}
"""What every Ray that serves has in its environment. Serve replaces a proxy after three failed looks, and nobody is served
meanwhile: a dead one fails each at once, one that is only busy after RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S, 10 s."""
METRICS_INTERVAL_S = 5.0
"""Seconds between two counts of requests that Serve's autoscaling is sent, at most; Serve's own are 10 s."""


@dataclass(kw_only=True, slots=True)
class Service:
    """A running service on this computer; give it to stop_service."""

    url: str
    config: ServiceConfig
    """As given, with redis_url and port filled in."""
    handle: DeploymentHandle
    redis: EmbeddedRedis | None
    owns_ray: bool


def build(args: Mapping[str, Any]) -> Application:
    """The Serve application for the plain values of a ServiceConfig: `import_path: paceline.infra.app:build`.

    Raises: ConfigError on an unknown key, and on a certificate, which Serve's proxies would not see. Without redis_url (or PACELINE_REDIS_URL) replicas serve their first drafter and nothing adapts.
    """
    given = build_service(args)
    if shown := [name for name in VARIABLES if name != "token_file" and _is_secret(getattr(given, name))]:
        log.warning(
            "%s in args can be read by `serve config` and in Ray's dashboard; give %s to `ray start` on every node instead, "
            "or the same with _FILE",
            " and ".join(shown), " and ".join(VARIABLES[name] for name in shown),
        )  # fmt: skip
    config = with_environment(given)
    if config.tls_cert is not None:
        raise ConfigError(
            "tls_cert must not stand in args: the proxies of `serve deploy` take it from http_options, as ssl_certfile and ssl_keyfile"
        )
    if config.num_replicas == 1:
        log.warning(
            "num_replicas is 1: a redeployment stops the replica before the new one starts, and until that has loaded clients "
            "get 503 with Retry-After. Without a gap: 2 replicas or more, or max_surge_percent 100 for the deployment `engine` "
            "where the devices of another replica are free"
        )
    SpanTarget.of(config)
    _check_device(config)
    return _bind(config, deployment_limits(config))


def _check_device(config: ServiceConfig) -> None:
    """Raise ConfigError where a replica might find a GPU that Ray was not told of: several would load onto the same one."""
    if config.device == "auto" and ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0:
        raise ConfigError("device (--device) must be cuda or cpu in a Ray cluster with GPUs, got 'auto'")


def _is_secret(value: str | None) -> bool:
    """Whether a token, or a URL with a password, is given."""
    return bool(value) and ("://" not in str(value) or "@" in str(value))


def _bind(config: ServiceConfig, limits: DeploymentLimits) -> Application:
    values = replica_values(config, deployment_time(config.redis_url))
    if config.resume:
        return bind_resuming(FACTORY, values, to_dict(config), limits)
    return bind_replicas(FACTORY, values, limits)


def deployment_limits(config: ServiceConfig, *, grace_s: float = STREAM_GRACE_S) -> DeploymentLimits:
    """What Serve is told for a configuration; the engine's own queue answers 429 before Serve's does."""
    return DeploymentLimits(
        num_replicas=config.num_replicas,
        max_replicas=most_replicas(config),
        autoscaling=serve_autoscaling(config),
        max_ongoing_requests=config.engine.max_running + config.engine.max_waiting + 48,
        graceful_shutdown_timeout_s=grace_s,
        num_gpus=float(config.engine.tensor_parallel) if config.device == "cuda" else 0.0,
    )


def serve_autoscaling(config: ServiceConfig) -> dict[str, Any] | None:
    """Serve's `autoscaling_config`, None where the number of replicas is fixed.

    Serve counts the requests that its proxies (with `resume` the ingresses) have sent to replicas and those that wait there;
    what waits in an engine's queue is among the former.
    """
    wanted = config.autoscaling
    if most_replicas(config) == config.num_replicas:
        return None
    return {
        "min_replicas": config.num_replicas,
        "max_replicas": most_replicas(config),
        "target_ongoing_requests": wanted.target_ongoing_requests or float(config.engine.max_running),
        "look_back_period_s": wanted.look_back_period_s,
        "metrics_interval_s": min(METRICS_INTERVAL_S, wanted.look_back_period_s / 4),
        "upscale_delay_s": wanted.upscale_delay_s,
        "downscale_delay_s": wanted.downscale_delay_s,
    }


def local_grace_s(config: ServiceConfig) -> float:
    """Longest drain of a replica of a service on one computer.

    One that is drained while the others go on must not cut answers off, unless another replica takes them over.
    """
    return LOCAL_GRACE_S if config.resume or serve_autoscaling(config) is None else STREAM_GRACE_S


def run_service(config: ServiceConfig, *, check: Callable[[], None] = lambda: None) -> Service:
    """Start everything that `config` asks for on this computer and return when requests can be sent.

    check: called while something is waited for; may raise, and what was started is stopped again.

    Starts Ray (unless ray_address or RAY_ADDRESS names a cluster or this process is connected), an embedded Redis (unless
    redis_url is set), Serve's proxy (unless one runs in that cluster) and the replicas, which start the controller when the
    drafter can be trained. Port 0 takes a free one.
    Raises: ConfigError for settings, PacelineError when something does not come up; what was started is stopped again.
    """
    resolve_model(config.model)
    resolve_drafter(config.drafter, config.model)
    config = with_absolute_paths(with_environment(config))
    Tokens.of(config)  # files that cannot be used are refused before anything starts
    SpanTarget.of(config)  # and so is an exporter that is not installed
    http_options(config)
    check_store(config.store_url)
    name = application_name(config)
    redis: EmbeddedRedis | None = None
    owns_ray = owns_app = has_proxy = False
    try:
        if cluster_address(config) or ray.is_initialized():
            start_ray(config)
            _check_device(config)
            config, has_proxy = with_running_proxy(config)
            check_neighbours(config)
        if not has_proxy:
            config = replace(config, port=claim_port(config.host, config.port))
        found = preflight(config, check)
        check()
        config = replace(config, device=found.device)
        make_home(StorePaths.of(config).home)
        if is_adaptive(config) or config.redis_url is not None:
            url, redis = resolve_redis(config)
            config = replace(config, redis_url=url)
            log.info("redis url=%s", redact(url))
        owns_ray = start_ray(config)
        if owns_ray:
            config = with_threads(config)
            check_gpus(config, int(ray.cluster_resources().get("GPU", 0)))
        check()
        if not has_proxy:
            serve.start(proxy_location="HeadOnly", http_options=http_options(config))
        app = _bind(config, deployment_limits(config, grace_s=local_grace_s(config)))
        if is_adaptive(config):
            _write_first_version(config, found.first_version)
        owns_app = True
        (handle,) = serve.run_many(
            [serve.RunTarget(app, name=name, route_prefix=config.route_prefix)], wait_for_applications_running=False
        )
        _await_running(name, check)
        url = service_url(config)
        _await_answers(url, check)
    except BaseException as e:
        reason = _refusal(name) if owns_app else ""
        _stop(config, redis, owns_ray, owns_app=owns_app)
        if isinstance(e, PacelineError) or not isinstance(e, Exception):
            raise
        raise PacelineError(f"the service did not start: {reason or e}") from e
    log.info("service ready url=%s replicas=%d to %d", url, config.num_replicas, most_replicas(config))
    return Service(url=url, config=config, handle=handle, redis=redis, owns_ray=owns_ray)


def service_url(config: ServiceConfig) -> str:
    """Where a service is reached from this computer, without a slash at the end."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    where = f"[{host}]" if ":" in host else host
    return f"{'http' if config.tls_cert is None else 'https'}://{where}:{config.port}{config.route_prefix.rstrip('/')}"


def http_options(config: ServiceConfig) -> dict[str, Any]:
    """What the HTTP server is told about its port. Raises: ConfigError when certificate and key cannot be used."""
    options: dict[str, Any] = {"host": config.host, "port": config.port}
    if config.tls_cert is None or config.tls_key is None:
        return options
    files = [str(Path(p).expanduser().resolve()) for p in (config.tls_cert, config.tls_key)]
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(*files)
    except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"tls_cert and tls_key must be PEM files of one certificate and its key without a password, got {files}: {e}"
        ) from e
    return {**options, "ssl_certfile": files[0], "ssl_keyfile": files[1]}


def with_threads(config: ServiceConfig) -> ServiceConfig:
    """The CPU's cores over the most replicas as the engine's threads where nobody chose: Ray gives an actor one."""
    if config.device != "cpu" or config.engine.num_threads is not None or "OMP_NUM_THREADS" in os.environ:
        return config
    cores = psutil.cpu_count(logical=False) or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    num_cores = math.floor(min(cores, mine, granted_cpus()))
    return override(config, {"engine.num_threads": max(1, num_cores // most_replicas(config))})


def granted_cpus(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """CPUs' worth of time that the control groups of this process (a container's, a unit's) leave it; inf = no limit.

    root: where control groups are mounted. own: names of this process' groups.
    """
    if not own.is_file():
        return math.inf
    limits = [math.inf]
    for line in own.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        group = top / name.lstrip("/")
        for folder in (group, *group.parents):  # the narrowest counts; in a container the root is its own group
            if folder.is_relative_to(top):
                limits.append(_quota(folder))
    return min(limits)


def _quota(group: Path) -> float:
    """CPUs of one control group, of version 2 or 1; inf = no limit, or none that can be read."""
    try:
        if (group / "cpu.max").is_file():
            time, period = (group / "cpu.max").read_text().split()
        else:
            time, period = ((group / f"cpu.cfs_{part}_us").read_text() for part in ("quota", "period"))
        return float(time) / float(period) if float(time) > 0 else math.inf
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf


def stop_service(service: Service) -> None:
    """Stop what run_service started, in reverse order; safe to call twice."""
    _stop(service.config, service.redis, service.owns_ray)
    service.redis, service.owns_ray = None, False


def _write_first_version(config: ServiceConfig, version: str) -> None:
    assert config.redis_url is not None
    keys, now = Keys(config.model_name), SystemClock().now()
    with patient_client(config.redis_url) as client:
        ensure_first_version(client, keys, version, config.policy.holdback_percent, now)


def start_ray(config: ServiceConfig) -> bool:
    """Connect to the cluster of ray_address or RAY_ADDRESS, or start Ray here; True when it was started here.

    Whoever reaches Ray's ports with its token runs code as the service's user: a Ray of our own listens on loopback only
    and wants a token (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, else a new one that only this user's processes know).
    Raises: PacelineError when there is no such cluster, or when Ray does not keep to loopback.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Serve tells a client of another cluster by its job's number, and the first job of each cluster has the same
    _disconnect()
    if address := cluster_address(config):
        try:
            _reach(address)
            with kept_sigterm():
                ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
        except (OSError, RuntimeError, ValueError) as e:
            raise PacelineError(
                f"ray_address (--ray-address, RAY_ADDRESS) must name a Ray cluster that runs and whose token this process has, "
                f"got {address!r}: {e}; start one by `ray start --head`, or leave it out for a Ray of the service's own"
            ) from e
        return False
    _want_token()
    # Ray's workers run at nice 15: whatever else the computer does would come before an answer that somebody waits for,
    # and the trainer, which is nicer by itself, would get a third of a core that a replica needs
    os.environ.setdefault("RAY_worker_niceness", "0")
    # a trainer's process that waits for its next order has imported everything; Ray would end it after a second
    os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "600000")
    for name, value in SERVE_SETTINGS.items():
        os.environ.setdefault(name, value)
    # on a busy computer a proxy takes longer to start than Serve's 5 s, and Serve would kill it for that
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    # ten looks a second at replicas that change once a day, and as many exports of figures that Ray collects every 10 s,
    # would be a quarter of what an idle service computes
    os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")
    os.environ.setdefault("RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "10000")
    settings: dict[str, Any] = {
        "address": "local",
        "_node_ip_address": "127.0.0.1",
        "namespace": NAMESPACE,
        # logical CPUs: replicas book one each, a training task what it was given, everything else next to nothing
        "num_cpus": max(
            os.cpu_count() or 1,
            most_replicas(config) * 2 + math.ceil(config.trainer_resources.num_cpus),
        ),
        "resources": dict(config.trainer_resources.resources) or None,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "log_to_driver": False,
        "configure_logging": False,
    }
    with kept_sigterm(), _closed_off():
        _start_patiently(lambda: ray.init(**settings, _metrics_export_port=free_port()))
    address = ray.util.get_node_ip_address()
    if address not in ("127.0.0.1", "::1"):
        ray.shutdown()
        raise PacelineError(
            f"Ray {ray.__version__} listens on {address} instead of loopback and was stopped; install the release that "
            "Paceline asks for, or start a closed-off Ray yourself and name it by --ray-address"
        )
    return True


def _want_token() -> None:
    """Let the Ray that this process starts refuse clients without the token; RAY_AUTH_MODE=disabled is obeyed and reported."""
    if os.environ.setdefault("RAY_AUTH_MODE", "token").lower() == "disabled":
        log.warning("RAY_AUTH_MODE=disabled lets every user of this computer run code as this service; unset it")
    elif not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        # in the environment, which other users cannot read: Ray would write a file that they can, ~/.ray/auth_token
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    RaySettings.initialize("")  # Ray has read the mode when it was imported, and the token if it was used before
    AuthenticationTokenLoader.instance().reset_cache()


def _start_patiently(start: Callable[[], object]) -> None:
    """Start Ray, once more where a busy computer takes longer than Ray's fixed 30 s to start its processes."""
    before = set(psutil.Process().children(recursive=True))
    try:
        start()
    except Exception as e:  # Ray raises no kind of its own
        if _SLOW_START not in str(e):
            raise
        log.warning("Ray did not start within 30 s, as on a busy computer; trying once more")
        left = [p for p in set(psutil.Process().children(recursive=True)) - before if _is_of_ray(p)]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        start()


def _is_of_ray(process: psutil.Process) -> bool:
    """Whether a process is one of Ray's own: what else this one has started meanwhile is not Ray's to end."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return command.startswith("ray::") or str(Path(ray.__file__).parent) in command


@contextmanager
def lean_nodes() -> Iterator[None]:
    """Let nodes that this process starts leave _LEFT_OUT out: they take 4 s of a core to start, and 260 MiB."""
    started = {name: getattr(Node, name) for name in _LEFT_OUT}
    for name in _LEFT_OUT:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in started.items():
            setattr(Node, name, method)


@contextmanager
def _closed_off() -> Iterator[None]:
    """Let `ray.init` take 127.0.0.1 as its node's address, and start nothing that serves nobody here.

    Where clusters are enabled it puts the computer's outer address instead, and then everything listens on all interfaces.
    """
    variable, enabled = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    before = os.environ.get(variable)
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[variable] = "0"  # for Ray's own processes and the workers
    try:
        with lean_nodes():
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def check_gpus(config: ServiceConfig, num_gpus: int) -> None:
    """Raise ConfigError when replicas and a training task together ask for more GPUs than this computer has."""
    serving = most_replicas(config) * config.engine.tensor_parallel if config.device == "cuda" else 0
    wanted = config.trainer_resources.num_gpus
    if wanted > 0 and serving + wanted > num_gpus:
        raise ConfigError(
            f"trainer_resources.num_gpus must leave the replicas their {serving} GPUs (this computer has {num_gpus}), "
            f"got {wanted:g}; use 0 to train on the CPU"
        )


def _reach(address: str) -> None:
    """Raise OSError when nobody answers at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" not in address and host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()


def with_running_proxy(config: ServiceConfig) -> tuple[ServiceConfig, bool]:
    """`config` with host, port and TLS of the Serve proxies that run in the cluster; whether there are any.

    Raises: ConfigError when another port or TLS is asked for: all applications of a cluster share them.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return config, False
    found = client.http_config
    if config.port not in (0, DEFAULT_PORT, found.port):
        raise ConfigError(
            f"port must be left out or be {found.port}: Serve's proxies of this Ray cluster listen there, got {config.port}"
        )
    if config.tls_cert is not None and http_options(config).get("ssl_certfile") != found.ssl_certfile:
        raise ConfigError(
            f"tls_cert must be {found.ssl_certfile or 'left out'}: Serve's proxies of this Ray cluster run "
            f"{'with that' if found.ssl_certfile else 'without TLS'}, and all its applications share them, got {config.tls_cert}"
        )
    tls = {"tls_cert": found.ssl_certfile, "tls_key": found.ssl_keyfile}
    return replace(config, host=found.host or config.host, port=found.port, **tls), True


def check_neighbours(config: ServiceConfig) -> None:
    """Raise ConfigError when another application of the cluster has the service's name or its routes."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return
    own = application_name(config)
    applications = client.get_serve_details()["applications"]
    if own in applications:
        raise ConfigError(
            f"model_name (--model-name) must be another one than {config.model_name!r}, under which a service runs in this Ray "
            "cluster; give this one another, and a --route-prefix of its own, or stop the other one. Where its process is gone: "
            f"""python -c "import ray; from ray import serve; ray.init('auto'); serve.delete('{own}')\""""
        )
    check_claim(config, own)
    for name, found in applications.items():
        if found["route_prefix"] == config.route_prefix:
            raise ConfigError(
                f"route_prefix (--route-prefix) must be another one than {config.route_prefix!r}, which application {name!r} "
                f"of this Ray cluster has; '/{own}', for instance"
            )


def _running_apps() -> set[str]:
    try:
        return set(serve.status().applications)
    except Exception as e:  # Serve has not been started in this cluster
        log.debug("no Serve instance: %s", e)
        return set()


def _await_running(name: str, check: Callable[[], None]) -> None:
    """Return when an application runs. check: called between two looks. Raises: RuntimeError when it cannot."""
    client = _get_global_client()
    assert client is not None
    # serve.status() tells more, for 70 ms of this core and as much of the controller's
    while (app := client.get_serve_status(name).app_status).status != ApplicationStatus.RUNNING:
        # what was deleted meanwhile counts as not started
        if app.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.NOT_STARTED):
            raise RuntimeError(app.message)
        check()
        time.sleep(_LOOK_S)


def _await_answers(url: str, check: Callable[[], None]) -> None:
    """Return when the proxy lets requests through: it hears of a replica up to a second after Serve does, see Presence.

    Returns after _ANSWERS_S in any case, and at once where the proxy is not on this computer.
    """
    deadline = time.monotonic() + _ANSWERS_S
    with httpx.Client(
        verify=False, timeout=_REACH_S
    ) as client:  # nothing is sent, and but the status nothing is believed
        while time.monotonic() < deadline:
            try:
                if client.get(f"{url}/healthz").status_code != 503:
                    return
            except httpx.TransportError:
                return
            check()
            time.sleep(_LOOK_S)


def _refusal(name: str) -> str:
    """The sentence with which a replica refused to start; Serve itself only says that none came up."""
    try:
        deployments = serve.status().applications[name].deployments.values()
    except Exception as e:  # whatever it was that failed, this is no further help
        log.debug("no Serve status: %s", e)
        return ""
    found = re.findall(r"paceline\.errors\.\w+: ([^\n]+)", "\n".join(d.message for d in deployments))
    return found[-1] if found else ""


def _stop(config: ServiceConfig, redis: EmbeddedRedis | None, owns_ray: bool, *, owns_app: bool = True) -> None:
    """Stop Redis and, as far as this process started them, the application with its controller, and Ray.

    Serve ends with Ray: shut down by itself it takes seconds, and Ray reports its controller's end as a failed task.
    """
    if ray.is_initialized():
        for name, step in (
            ("application", lambda: _delete(application_name(config)) if owns_app else None),
            ("controller", lambda: stop_controller(config.model_name) if owns_app else None),
            ("Ray", ray.shutdown if owns_ray else lambda: None),
        ):
            try:
                step()
            except Exception:  # the next must still be stopped
                log.exception("stopping the %s failed", name)
    if redis is not None:
        redis.stop()


def _delete(name: str) -> None:
    """Delete an application; running requests get LOCAL_GRACE_S to end, whatever a replica's own drain may take."""
    serve.delete(name, _blocking=False)
    deadline = time.monotonic() + LOCAL_GRACE_S + _CLOSING_S
    while name in _running_apps():
        if time.monotonic() > deadline:
            log.warning("application %s still drains; requests that run are left to Serve", name)
            return
        time.sleep(0.2)


def curl_words(url: str, config: ServiceConfig, access: Access) -> str:
    """A first request, as typed in a shell; TOKEN and CERT stand for the reader's own."""
    body = json.dumps({"model": config.model_name, "prompt": "Hello", "max_tokens": 32})
    cert = " --cacert CERT" if config.tls_cert else ""
    token = " -H 'Authorization: Bearer TOKEN'" if access.tokens.guards_api else ""
    return f"curl {url}/v1/completions{cert}{token} -H 'content-type: application/json' -d '{body}'"


def dashboard_words(url: str, access: Access) -> str:
    """Where the dashboard is and who may use it, or why nobody may."""
    if (reason := access.closed()) is not None:
        return f"dashboard {reason}"
    if access.has_admin:
        return f"dashboard {url}/dashboard (with controls)"
    who = "with the API token" if access.tokens.guards_api else "this computer only"
    return f"dashboard {url}/dashboard (read-only, {who}: --admin-token adds controls)"


def attach_forever(config: ServiceConfig, console: Console, options: AttachOptions | None = None) -> None:
    """Be the control plane of engines that others run, until Ctrl-C or SIGTERM; waits for the first of them to report.

    options: which engines; None: those that report.
    Raises: ConfigError without a Redis or a drafter with weights, or where an SGLang was started without what it needs;
    PacelineError when something does not come up.
    """
    from paceline.infra.service.attached import (  # loads torch
        Attached,
        SglangReplicas,
        put_first_drafter,
        wait_for_engine,
    )

    config = with_absolute_paths(with_environment(config))
    if config.redis_url is None:
        raise ConfigError("redis_url (--redis-url, PACELINE_REDIS_URL) must name the Redis of the engines")
    check_store(config.store_url)
    if config.store_url is not None and (options or AttachOptions()).engine == "vllm":
        raise ConfigError("store_url must not be set with engine vllm: its plugin reads versions from the data folder")
    warn_of_end(config)
    keep_private()
    access = Access.of(config, Tokens.of(config))  # files that cannot be used are refused before anything starts
    http_options(config)
    resolve_redis(config)
    claim_port(config.host, config.port)  # a second one must not touch the engine
    first, attached, owns_ray = put_first_drafter(config), None, False
    keep_audit(StorePaths.of(config).home / "audit-attached.log")
    with StopSignals() as signals, SglangReplicas(config, options or AttachOptions(), first) as driven:
        try:
            with console.status("waiting for SGLang to answer"):
                driven.wait(signals.stop.wait)
            with console.status(f"waiting for an engine of service {config.model_name!r} in Redis"):
                facts = wait_for_engine(config, signals.stop.wait)
            if facts is None:
                return
            config = replace(config, port=claim_port(config.host, config.port))
            owns_ray = start_ray(config)
            check_claim(config, "")
            attached = Attached(config, first, facts, http_options(config))
            console.print(
                f"Paceline decides for {config.model_name!r}, engines are {facts.kind} {facts.engine_version}; first drafter "
                f"{first.version}; data in {StorePaths.of(config).home}; Ctrl-C stops it, the engines go on",
                highlight=False,
            )  # fmt: skip
            console.print(f"  {dashboard_words(service_url(config), access)}", highlight=False)
            while not signals.stop.wait(0.5):
                pass
        finally:
            if attached is not None:
                attached.close()
            if owns_ray:
                ray.shutdown()


def serve_forever(config: ServiceConfig, console: Console) -> None:
    """Start the service, print how to reach it, and stop everything cleanly on Ctrl-C or SIGTERM.

    Raises: PacelineError when the service cannot start.
    """
    service = None
    keep_private()
    with StopSignals() as signals:
        try:
            with console.status("starting Ray, Redis, the replicas and the controller (about 30 s)"):
                service = run_service(config, check=signals.check)
            console.print(
                f"Paceline serves {config.model_name!r} at {service.url}/v1 (drafter {config.drafter}, policy "
                f"{config.policy.policy}); data in {StorePaths.of(config).home}; Ctrl-C stops it",
                highlight=False,
            )
            access = Access.of(service.config, Tokens.of(service.config))
            words = (
                curl_words(service.url, service.config, access),
                f"chat {service.url}/chat",
                dashboard_words(service.url, access),
            )
            for line in words:
                console.print(f"  {line}", highlight=False, soft_wrap=True, markup=False)
            while not signals.stop.wait(0.5):
                pass
        finally:
            if service is not None:
                with console.status("stopping: running requests may finish"):
                    stop_service(service)
