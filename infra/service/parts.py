"""Replica parts: target, drafter slots, engine, feedback, traces, watcher and routes put together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from paceline.adapt.data.storage_calls import StorageCalls
from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.data.trace_writer import TraceWriter
from paceline.adapt.versions.first_drafter import drafter_taps, make_slots
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bandit.beliefs.arms import default_arms
from paceline.config import ServiceConfig, most_replicas
from paceline.contracts import HttpMeters
from paceline.errors import PacelineError, StorageHangsError
from paceline.infra.controller.actor import ControllerSpec, code_digest, ensure_controller, stop_controller
from paceline.infra.controller.snapshot import state_json
from paceline.infra.controller.store import HostConfig
from paceline.infra.engines.agent import start_agent
from paceline.infra.engines.paceline_driver import PacelineDriver
from paceline.infra.replica.capture_progress import capture_progress
from paceline.infra.replica.exchange import NumbersExchange, ReplicaNumbers
from paceline.infra.replica.feedback import FeedbackPublisher
from paceline.infra.replica.span_target import SpanTarget
from paceline.infra.replica.watcher import ReplicaWatcher
from paceline.infra.service.claim import claim, own_application
from paceline.infra.service.deployment import DEPLOYED_AT, ReplicaParts
from paceline.infra.service.stores import StorePaths, is_adaptive
from paceline.infra.state.layout import prepare_home
from paceline.infra.state.log import configure_logging, delete_gone_logs, num_dropped_lines
from paceline.infra.state.redis_clients import Keys
from paceline.infra.state.redis_clock import RedisClock
from paceline.infra.web.access import Access
from paceline.infra.web.dashboard_routes import dashboard_router
from paceline.infra.web.feed import DashboardFeed
from paceline.infra.web.metrics import render_metrics, speculation_rows
from paceline.infra.web.state_routes import ServiceView, service_router
from paceline.names import ENGINE, INGRESS
from paceline.paths import keep_private, resolve_model
from paceline.records import build
from paceline.serving.api.client import LocalEngineClient
from paceline.serving.api.generation import ApiParts
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.thread import EngineThread
from paceline.serving.engine.traces import TRACES
from paceline.serving.loading.target import read_target
from paceline.serving.loading.tensor_parallel import Ranks, load_parallel
from paceline.serving.target_model.model import TargetModel
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens

log = logging.getLogger(__name__)

CONTROLLER_CHECK_S = 10.0
STORAGE_PATIENCE_S = 20.0
"""Longest wait of a replica for the data folder: drafters of 1 GB come in less from a file server that is well, and what takes
longer is waited for by its own thread and used then."""


def controller_spec(
    config: ServiceConfig, target_version: str, *, first_version: str = "", deployed_at: float = 0.0
) -> ControllerSpec:
    """What the controller actor is built from; config.redis_url must be resolved."""
    assert config.redis_url is not None
    paths = StorePaths.configured(config)  # replicas whose nodes differ must ask for the same controller
    host = HostConfig(
        redis_url=config.redis_url,
        model=config.model_name,
        data_dir=paths.home,
        snapshots=paths.snapshots,
        policy=config.policy,
        rollout=config.rollout,
        trace=config.trace,
        max_classes=config.engine.max_classes,
        arms=default_arms(config.engine.delta_rank if config.engine.max_class_deltas else 0),
        target_version=target_version,
        first_version=first_version,
        start_s=config.trainer_resources.start_timeout_s,
        keep_rows=config.feedback.keep_rows,
    )
    return ControllerSpec(
        host=host,
        trace_root=paths.traces,
        registry_root=paths.registry,
        learner_root=paths.learners,
        target=config.model,
        trainer_threads=config.trainer_threads,
        trainer_resources=config.trainer_resources,
        gate_chain=config.gate_chain,
        spans=SpanTarget.of(config),
        deployed_at=deployed_at,
        application=own_application(),
        release=code_digest(),
    )


def replica_parts(values: dict[str, Any], replica_id: str) -> ReplicaParts:
    """Build one replica from `deployment.replica_values`; its engine thread runs when this returns."""
    config = build(ServiceConfig, {k: v for k, v in values.items() if k != DEPLOYED_AT})
    deployed_at = float(values.get(DEPLOYED_AT, 0.0))
    claim(config, own_application())  # before anything of the service's state is touched
    paths = StorePaths.of(config)
    keep_private()
    storage = StorageCalls(f"the data folder {paths.home}", STORAGE_PATIENCE_S)
    try:
        storage.run(prepare_home, paths.home)
        storage.run(delete_gone_logs, paths.home, time.time())
    except StorageHangsError as e:
        log.error("%s; the replica starts without it", e)
    configure_logging(
        file=paths.home / f"replica-{replica_id}.log",
        access_file=paths.home / f"access-{replica_id}.log" if config.access_log else None,
        audit_file=paths.home / f"audit-{replica_id}.log",
    )
    span_target = SpanTarget.of(config)
    limit_threads(config.engine.num_threads)
    registry = DrafterRegistry(paths.registry)
    needs_taps = is_adaptive(config)
    target, ranks = load_target(config, tap_layers=drafter_taps(config))
    slots = make_slots(config, target, registry, storage)
    keys = Keys(config.model_name)
    feedback = traces = None
    clock = RedisClock()
    if config.redis_url is not None:
        feedback = FeedbackPublisher(
            config.redis_url, keys, replica_id=replica_id, target_version=target.version, config=config.feedback,
            clock=clock,
        )  # fmt: skip
        if needs_taps and config.trace.share > 0:
            traces = TraceWriter(TraceStore(paths.traces, clock=clock), config.trace, clock=clock)
    elif needs_taps:
        log.warning("no redis_url: this replica serves its first drafter for ever (no feedback, no swaps)")
    spans = None if span_target is None else span_target.open(replica_id)
    engine = Engine(
        target, slots, config.engine, feedback=feedback, traces=traces, prompts=feedback,
        ends=None if spans is None else spans.engine, trace_topk=config.trace.topk, trace_max_bytes=config.trace.max_bytes // TRACES,
        num_sharing=most_replicas(config),
    )  # fmt: skip
    thread = EngineThread(engine)
    with capture_progress() as progress:
        engine.warm_up(progress)
    thread.start(is_warmed_up=True)
    driver = PacelineDriver(
        slots, storage.guard(registry), engine, target.version, config.policy.holdback_percent if needs_taps else 0
    )
    watcher: ReplicaWatcher | None = None
    closers: list[Callable[[], None]] = [] if traces is None else [traces.close]
    if feedback is not None:
        feedback.tenant_of, feedback.draft_ratio = engine.tenant_of, engine.draft_ratio
        feedback.start()
        closers.append(feedback.close)
        if needs_taps:
            assert config.redis_url is not None, "feedback is sent to it"
            watcher = start_agent(
                driver, config.redis_url, keys, replica_id=replica_id, target_version=target.version, feedback=feedback, clock=clock,
                deeds=None if spans is None else spans.deeds,
            )  # fmt: skip
            spec = controller_spec(config, target.version, first_version=slots.first_version, deployed_at=deployed_at)
            supervisor = ControllerSupervisor(spec)
            supervisor.start()
            closers = [supervisor.stop, watcher.stop, *closers]
    if spans is not None:
        closers.append(spans.close)
    if ranks is not None:
        closers.append(ranks.close)

    process = psutil.Process()

    def counters() -> dict[str, Any]:
        out: dict[str, Any] = {"engine": engine.stats(), "training": engine.output.is_training}
        out["logs"] = {"lines_dropped": num_dropped_lines()}
        out["process"] = {
            "rss_bytes": process.memory_info().rss,
            "num_files": process.num_fds(),
            "host_kv_bytes": engine.config.kv_bytes if target.device.type == "cpu" else 0,
        }
        roles = {"live": slots.live_version, "canary": slots.canary_version, "first": slots.first_version}
        if engine.policy.text is not None:
            roles["text"] = engine.policy.text.caps.name
        failed = slots.failures()  # drafts for nobody, whatever it was found to be worth before
        roles = {role: version for role, version in roles.items() if version not in failed}
        out["speculation"] = speculation_rows(engine.policy.budget.states(), roles, slots.served())
        if feedback is not None:
            out["feedback"] = feedback.counters()
        if traces is not None:
            out["traces"] = traces.counters()
        if spans is not None:
            out["spans"] = spans.counters()
        return out

    meters = HttpMeters()

    def numbers() -> ReplicaNumbers:
        pauses = slots.swap_pause_ms
        return ReplicaNumbers(
            model=config.model_name,
            counters=counters(),
            swap_pause_ms=pauses[-1] if pauses else None,
            queue=engine.queue_times,
            http=None if config.resume else meters,
        )

    exchange = NumbersExchange(config.redis_url, keys, replica_id, numbers).start()
    closers = [exchange.close, *closers]
    view = ServiceView(
        model=config.model_name,
        target=config.model,
        replica_id=replica_id,
        target_version=target.version,
        slots=slots,
        counters=counters,
        watcher=watcher,
        is_adaptive=watcher is not None,
        processes=lambda: exchange.gather(ENGINE, INGRESS),
    )
    tokens = Tokens.of(config).start()
    access, dashboard = Access.of(config, tokens), DashboardFeed(view.state, view.traffic)
    return ReplicaParts(
        api=ApiParts(
            client=LocalEngineClient(engine, thread, model_name=config.model_name, aliases=config.served_model_names),
            tokenizer=target.tokenizer,
            has_access_log=config.access_log,
            clients=Clients.of(config, tokens, num_sharing=lambda: exchange.num_processes or config.num_replicas),
            meters=meters,
            spans=None if spans is None else spans.http,
            holdback_percent=lambda: driver.holdback_percent,
            trusts_groups=config.policy.trusts_groups,
            opt_out_tenants=frozenset(config.trace.opt_out_tenants),
            state=lambda: state_json(view.state()),
            run_state=dashboard.run,
            swap=view.swap,
            check_state=access.check_read,
            check_metrics=access.check_metrics,
            metrics=lambda: render_metrics(exchange.gather(ENGINE), view.controller()),
            open_routers=(service_router(view, access, dashboard.run), dashboard_router(view, access, dashboard)),
        ),
        thread=thread,
        closers=[tokens.close, dashboard.close, *closers],
    )


def load_target(config: ServiceConfig, *, tap_layers: tuple[int, ...] | None) -> tuple[TargetModel, Ranks | None]:
    """The replica's target, and the processes of its other ranks when it is split over several devices."""
    path, size = resolve_model(config.model), config.engine.tensor_parallel
    if size > 1:
        return load_parallel(path, size=size, device=config.device, dtype=config.dtype, tap_layers=tap_layers)
    return read_target(path, device=config.device, dtype=config.dtype, tap_layers=tap_layers), None


def limit_threads(num_threads: int | None) -> None:
    """torch threads of this process; staging and the engine share them."""
    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)


class ControllerSupervisor:
    """Keeps the one controller actor of the service alive; every replica has one, making it is idempotent."""

    def __init__(self, spec: ControllerSpec, check_s: float = CONTROLLER_CHECK_S) -> None:
        self._spec, self._check_s = spec, check_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controller-supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def remove(self, timeout_s: float = 5.0) -> None:
        """Stop, and the controller too, where it is this one's: a try that was on its way may have made it anew."""
        self.stop()
        stop_controller(self._spec.host.model, spec=self._spec)
        self._thread.join(timeout_s)
        stop_controller(self._spec.host.model, spec=self._spec)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                ensure_controller(self._spec, lambda: not self._stop.is_set())
            except PacelineError as e:
                log.warning("controller is not available: %s", e)
            except Exception:  # Ray raises many kinds while a cluster fails over; serving goes on
                log.exception("controller could not be ensured")
            self._stop.wait(self._check_s)
