"""SGLang as an engine with one drafter, driven over HTTP from outside.

What it is asked, and where that is written: docs/api/sglang.md.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import pickle
import time
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch

from paceline.contracts import EngineFacts
from paceline.errors import ConfigError, DrafterMismatchError, EngineAwayError
from paceline.infra.engines.agent import start_agent
from paceline.infra.engines.one_drafter import Looked, OneDrafterDriver, Staged, hold
from paceline.infra.engines.sglang_rows import (
    Loads,
    RecordTail,
    bucket_of,
    is_ours,
    label_of,
    label_of_request,
    rounds_of,
    weight_version,
)
from paceline.infra.engines.weights import read_checked
from paceline.infra.engines.windows import RecentRows
from paceline.infra.replica.feedback import FeedbackPublisher
from paceline.infra.state.redis_clients import Keys, producer_client
from paceline.infra.state.redis_clock import RedisClock
from paceline.machine import Clock, SystemClock
from paceline.paths import model_version

log = logging.getLogger(__name__)

CALL_TIMEOUT_S, LOOK_TIMEOUT_S, CONNECT_TIMEOUT_S = 60.0, 10.0, 5.0
_WEIGHTS = "model.safetensors"
_VOCABULARY = ("d2t", "t2d")
"""Read at SGLang's start alone."""
_RESUMES = 3


class SglangServer:
    """The HTTP routes of one SGLang."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """key: its admin API key, or the API key where it has only that one."""
        self.url = url.rstrip("/")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._client = httpx.Client(
            base_url=self.url, headers=headers, timeout=httpx.Timeout(CALL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        )

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, **query: str) -> dict[str, Any]:
        timeout = httpx.Timeout(LOOK_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        return self._answer(path, "GET", params=query, timeout=timeout)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises: EngineAwayError; DrafterMismatchError with SGLang's reason; ConfigError where it is another release
        or wants a key."""
        return self._answer(path, "POST", json=body)

    def must(self, path: str, body: dict[str, Any]) -> None:
        """`post` of what is no version's fault where it is refused. Raises: EngineAwayError, ConfigError."""
        try:
            self.post(path, body)
        except DrafterMismatchError as e:
            raise EngineAwayError(str(e)) from e

    def _answer(self, path: str, method: str, **values: Any) -> dict[str, Any]:
        try:
            answer = self._client.request(method, path, **values)
        except httpx.HTTPError as e:
            raise EngineAwayError(f"SGLang at {self.url} must answer {path}: {e or type(e).__name__}") from e
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"engine_key (--engine-key, PACELINE_ENGINE_KEY) must be the --admin-api-key of SGLang at {self.url}, or its "
                f"--api-key where it has only that: it answered {answer.status_code}"
            )
        if answer.status_code in (404, 405, 422):
            raise ConfigError(
                f"SGLang at {self.url} must be of a release with {method} {path} as 0.5.23 has it, got {answer.status_code}: "
                f"{answer.text[:300]}"
            )
        try:
            body = answer.json()
        except ValueError:
            body = None
        if answer.status_code == 400 or (isinstance(body, dict) and body.get("success") is False):
            message = body.get("message") if isinstance(body, dict) else answer.text[:300]
            raise DrafterMismatchError(f"SGLang at {self.url} refused {path}: {message}")
        if answer.status_code != 200 or not isinstance(body, dict):
            raise EngineAwayError(
                f"SGLang at {self.url} must answer {path}, got {answer.status_code}: {answer.text[:300]}"
            )
        return body


def facts_of(info: dict[str, Any], url: str, window_s: float) -> EngineFacts:
    """What an SGLang can do, by its `/server_info`. Raises: ConfigError with the option that it must be started with."""
    folder, records = info.get("speculative_draft_model_path"), info.get("export_metrics_to_file_dir")
    for ok, option, value in (
        (info.get("speculative_algorithm") in ("EAGLE3", "DFLASH"), "--speculative-algorithm EAGLE3 or DFLASH", info.get("speculative_algorithm")),
        (folder and Path(folder, _WEIGHTS).is_file(), "--speculative-draft-model-path with a folder of `paceline export-drafter --format sglang` that can be read here", folder),
        (info.get("speculative_eagle_topk") in (None, 1), "--speculative-eagle-topk 1: the gate replays chains", info.get("speculative_eagle_topk")),
        (not info.get("speculative_adaptive"), "no --speculative-adaptive: it does not tell how much was drafted", True),
        ((info.get("dp_size") or 1) == 1, "--dp-size 1: it takes weights for one; run several and name each", info.get("dp_size")),
        (info.get("enable_metrics"), "--enable-metrics: requests tell their times with it alone", info.get("enable_metrics")),
        (info.get("export_metrics_to_file") and records and Path(records).is_dir(), "--export-metrics-to-file-dir with a folder that can be read here, and --export-metrics-to-file", records),
    ):  # fmt: skip
        if not ok:
            raise ConfigError(f"SGLang at {url} must be started with {option}, got {value!r}")
    return EngineFacts(
        kind="sglang", engine_version=str(info.get("version", "")), draft_shape="chain",
        max_draft_tokens=int(info["speculative_num_draft_tokens"]) - 1, group_unit="time", window_s=window_s,
        timing="request", has_features=False,
    )  # fmt: skip


class SglangEngine:
    """OneDrafterEngine of a running SGLang."""

    def __init__(
        self,
        server: SglangServer,
        info: dict[str, Any],
        publisher: FeedbackPublisher,
        *,
        max_stale_tokens: int,
        clock: Clock,
    ) -> None:
        """info: its `/server_info`, which `facts_of` was content with. clock: this computer's, which the publisher
        goes by; SGLang's may be another. Raises: EngineAwayError, ConfigError."""
        self._server, self._publisher, self._max_stale_tokens, self._clock = server, publisher, max_stale_tokens, clock
        self._folder, self._num_ranks = Path(info["speculative_draft_model_path"]), int(info.get("tp_size") or 1)
        self._tail = RecordTail(Path(info["export_metrics_to_file_dir"]))
        self._recent, self._loads, self._ahead_s = RecentRows(), Loads(), 0.0
        self._is_training = self._has_switched = False
        self._label = ("", "")
        own = self._folder / _WEIGHTS
        self._first = Staged(own, hashlib.sha256(own.read_bytes()).hexdigest())
        self._loaded: Staged | None = self._first
        """What it serves with; None = an earlier agent's, which is not known."""
        self._checksums: dict[str, str] = {}
        """sha256 of weights that were loaded -> SGLang's own checksum of them."""
        self._has_odd, self._said = False, ""
        self._recover()

    # ---- weights
    def _recover(self) -> None:
        """Find out what it serves, and end what an agent left that was killed in the midst of a publication."""
        name, is_open = str(self._server.get("/model_info").get("weight_version", "")), True
        try:
            self._server.post("/end_weight_update", {})
        except DrafterMismatchError:
            is_open = False
        if is_open or name == weight_version("", ""):  # a pause without either is an operator's
            self._resume()
            log.warning("an exchange of drafters in SGLang at %s was left open and is ended now", self._server.url)
        self._label, self._has_switched = label_of(name), is_ours(name)
        self._loaded = None if self._has_switched else self._first
        if self._loaded is not None:
            self._checksums[self._loaded.sha256] = self._checksum()

    def check(self, folder: Path) -> None:
        """Raise DrafterMismatchError unless the folder's tensors are those of the one that SGLang was started with, finite,
        and of its draft vocabulary."""
        file = folder / _WEIGHTS
        self._read(Staged(file, hashlib.sha256(file.read_bytes()).hexdigest()))

    def _read(self, staged: Staged) -> dict[str, torch.Tensor]:
        try:
            tensors = read_checked(staged.file, staged.sha256, self._folder)  # an OSError is the storage's
            if any(name in tensors for name in _VOCABULARY):
                first = read_checked(self._first.file, self._first.sha256, self._folder)
                bad = next((n for n in _VOCABULARY if n in tensors and not torch.equal(tensors[n], first[n])), None)
                if bad is not None:
                    raise ValueError(f"tensor {bad} must be that of {self._folder}: SGLang reads it at its start")
        except ValueError as e:
            raise DrafterMismatchError(f"SGLang at {self._server.url} cannot load {staged.file}: {e}") from e
        return {name: t for name, t in tensors.items() if name not in _VOCABULARY}

    def publish(self, staged: Staged | None, version: str, group: str) -> float:
        label = weight_version(group, version)
        if staged is None or (self._loaded is not None and staged.sha256 == self._loaded.sha256):
            self._tell(label)
            self._label = (group, version)
            return 0.0
        nobodys = weight_version("", "")  # until it is read back; and who starts later sees that one had begun
        body = self._update_of(staged, nobodys)
        self._tell(nobodys)
        began = time.perf_counter()
        try:
            self._server.must("/pause_generation", {"mode": "in_place"})  # one whose answer is lost has paused it, too
            self._update(body)
        finally:
            self._resume()
        pause_ms = 1e3 * (time.perf_counter() - began)
        before, self._loaded, self._label, self._has_switched = self._loaded, staged, ("", ""), True
        self._compare(staged, before)
        self._tell(label)
        self._label = (group, version)
        return pause_ms

    def _tell(self, label: str) -> None:
        """Have later tokens counted so."""
        self._server.must("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    def _update_of(self, staged: Staged, label: str) -> dict[str, Any]:
        """The request that loads a version and, with them, has the label of later tokens changed."""
        # whole tensors, no handles of memory: it may run on another computer
        payload = pickle.dumps(list(self._read(staged).items()), protocol=4)
        entry = base64.b64encode(payload).decode("ascii")
        return {
            "serialized_named_tensors": [entry] * self._num_ranks, "selector": "draft", "flush_cache": False,
            "weight_version": label,
        }  # fmt: skip

    def _update(self, body: dict[str, Any]) -> None:
        """Load weights while no step runs; those that were there come back where it refuses the new ones."""
        try:
            self._open()
            self._server.post("/update_weights_from_tensor", body)
        except DrafterMismatchError:
            if self._loaded is not None:
                self._server.post(
                    "/update_weights_from_tensor", self._update_of(self._loaded, weight_version(*self._label))
                )
            raise
        finally:
            with contextlib.suppress(DrafterMismatchError):  # none is open
                self._server.post("/end_weight_update", {})

    def _open(self) -> None:
        begin = "/begin_weight_update", {"selector": "draft"}
        try:
            self._server.post(*begin)
        except DrafterMismatchError:  # one is open, whose end did not come through
            self._server.must("/end_weight_update", {})
            self._server.must(*begin)

    def _resume(self) -> None:
        for attempt in range(_RESUMES):
            try:
                self._server.must("/continue_generation", {"torch_empty_cache": False})
                return
            except EngineAwayError as e:
                if attempt == _RESUMES - 1:
                    raise EngineAwayError(
                        f"{e}; it may be paused: POST {{}} to its /continue_generation, or start it again"
                    ) from e
                time.sleep(0.2)

    def _checksum(self) -> str:
        """SGLang's checksum of the drafter that it drafts with."""
        body = {"action": "checksum", "selector": "draft"}
        found = self._server.post("/weights_checker", body).get("per_engine_checksum")
        if not found:
            raise DrafterMismatchError(
                f"SGLang at {self._server.url} must have a draft model whose weights it can hash"
            )
        return str(found)

    def _compare(self, staged: Staged, before: Staged | None) -> None:
        """Raise DrafterMismatchError unless SGLang holds what it was given: it passes over names that it does not know."""
        found = self._checksum()
        known = self._checksums.setdefault(staged.sha256, found)
        is_kept = before is not None and before.sha256 != staged.sha256 and found == self._checksums.get(before.sha256)
        if found == known and not is_kept:
            return
        self._loaded = before if is_kept else None
        if is_kept:
            del self._checksums[staged.sha256]
        raise DrafterMismatchError(
            f"SGLang at {self._server.url} must draft with {staged.file} after its update, but its checksum is "
            + ("that of the drafter before it" if is_kept else f"{found}, and was {known} before")
        )

    # ---- rows
    def look(self) -> Looked:
        name = str(self._server.get("/model_info").get("weight_version", ""))
        if self._has_switched and not is_ours(name):  # it was started again
            self._loaded, self._has_switched = self._first, False
        self._label = label_of(name)
        loads = self._server.get("/v1/loads", include="core")
        try:
            at = datetime.fromisoformat(loads["timestamp"]).timestamp()
            self._loads.add(at, sum(int(load["num_running_reqs"]) for load in loads["loads"]))
            self._ahead_s = at - self._clock.now()
        except (KeyError, TypeError, ValueError) as e:
            raise ConfigError(
                f"SGLang at {self._server.url} must be of a release with GET /v1/loads as 0.5.23 has it: {e!r}"
            ) from e
        try:
            records, self._said = self._tail.read(), ""
        except OSError as e:  # rounds are not told; what serves whom goes on
            records = []
            if self._said != str(e):
                self._said = str(e)
                log.warning("records of SGLang at %s cannot be read: %s", self._server.url, e)
        for record in records:
            try:
                self._record(record)
            except (KeyError, TypeError, ValueError, AttributeError) as e:
                level, self._has_odd = logging.DEBUG if self._has_odd else logging.WARNING, True
                log.log(level, "a record of SGLang at %s is left out, as such ones are: %r", self._server.url, e)
        return Looked(self._recent.now(time.monotonic()), self._label)

    def _record(self, record: dict[str, Any]) -> None:
        label = label_of_request(record, self._max_stale_tokens, has_switched=self._has_switched)
        bucket = self._recent.bucket(bucket_of(record))
        rows = rounds_of(
            record, bucket=bucket, label=label, loads=self._loads, is_training=self._is_training, ahead_s=self._ahead_s
        )
        if rows is not None:
            self._recent.add(bucket, rows.num_rows, time.monotonic())
            self._publisher.record_rounds(rows)

    def tell_training(self, is_training: bool) -> None:
        self._is_training = is_training

    def counters(self) -> dict[str, Any]:
        return self._publisher.counters()


class SglangReplica:
    """A running SGLang as a replica of a service: its agent, here."""

    def __init__(
        self, url: str, *, key: str | None, redis_url: str, service: str, home: Path, registry: str, target: Path,
        target_version: str, window_s: float, max_stale_tokens: int, taken: Collection[Path] = (),
    ) -> None:  # fmt: skip
        """Ask it what it is.

        Args:
            taken: folders of records of others.
        Raises: EngineAwayError while it does not answer; ConfigError where it serves another target or cannot be driven.
        """
        self._server = SglangServer(url, key)
        info = self._server.get("/server_info")
        self.facts = facts_of(info, url, window_s)
        model = Path(str(info.get("model_path", "")))
        is_target = model.exists() and (model.resolve() == target.resolve() or model_version(model) == target_version)
        if not is_target:
            raise ConfigError(
                f"SGLang at {url} must be started with --model-path and the target of this service, {target}, which can be "
                f"read here, got {info.get('model_path')!r}"
            )
        self.records = Path(info["export_metrics_to_file_dir"]).resolve()
        if self.records in taken:
            raise ConfigError(
                f"SGLang at {url} must be started with an --export-metrics-to-file-dir of its own, got another one's, "
                f"{self.records}"
            )
        where = urlsplit(self._server.url)
        self.replica_id = f"sglang-{where.hostname}-{where.port or where.scheme}"
        folder = home / "sglang" / self.replica_id
        clock, keys = RedisClock(), Keys(service)
        with producer_client(redis_url) as client:
            clock.try_to_look(client)
        self._publisher = FeedbackPublisher(
            redis_url, keys, replica_id=self.replica_id, target_version=target_version, clock=clock
        )
        held = hold(folder)  # before it is told anything: another agent may be in the midst of an exchange
        try:
            self._engine = SglangEngine(
                self._server, info, self._publisher, max_stale_tokens=max_stale_tokens, clock=SystemClock()
            )
        except Exception:  # the next try holds it anew
            held.close()
            raise
        self._driver = OneDrafterDriver(
            engine=self._engine, facts=self.facts, replica_id=self.replica_id, folder=folder, target=str(target),
            registry=registry, clock=clock, held=held,
        )  # fmt: skip
        self._start = lambda: start_agent(
            self._driver, redis_url, keys, replica_id=self.replica_id, target_version=target_version, feedback=self._engine,
            clock=clock,
        )  # fmt: skip

    def start(self) -> SglangReplica:
        self._publisher.start()
        self._watcher = self._start()
        self._driver.on_pause = self._watcher.note_pause
        self._driver.start()
        return self

    def close(self) -> None:
        """End the agent; SGLang goes on with what it has."""
        self._driver.stop()
        self._watcher.stop()
        self._publisher.close()
        self._server.close()
