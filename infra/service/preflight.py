"""Preflight: what must be known of the models before a service starts: they are checked, the first drafter is registered.

It needs torch, some 250 MiB that the process which keeps a service running would hold for nothing: there it runs in a
process of its own, which ends again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline import errors
from paceline.config import ServiceConfig, to_dict
from paceline.errors import ConfigError, PacelineError
from paceline.infra.service.stores import StorePaths, is_adaptive
from paceline.infra.state.layout import prepare_home
from paceline.machine import claim_port
from paceline.paths import check_private, resolve_drafter, resolve_model
from paceline.records import build

log = logging.getLogger(__name__)
_LOOK_S = 0.1
"""Between two looks at whether the start should end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """What a service is started with."""

    device: str
    """cpu | cuda."""
    first_version: str = ""
    """The first drafter's in the registry; '' where its weights cannot be trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What the process says on its standard output."""

    found: Preflight | None = None
    error: str = ""
    """Class of a PacelineError."""
    reason: str = ""


def cluster_address(config: ServiceConfig) -> str | None:
    """Of the Ray cluster that the service joins; None: it starts a Ray of its own."""
    found = config.ray_address or os.environ.get("RAY_ADDRESS")
    return None if not found or found == "local" else found  # "local": Ray's word for a new one


def check_early(config: ServiceConfig) -> None:
    """Refuse what can be refused before Ray or torch is loaded, which takes seconds; for a process without a Ray.

    Raises: ConfigError when a model or drafter is not there, its device has no driver, its data folder cannot be
    written, or its port is taken.
    """
    resolve_model(config.model)
    resolve_drafter(config.drafter, config.model)
    _check_driver(config)
    if cluster_address(config) is None or is_adaptive(config):  # else it may be a folder of the cluster's nodes alone
        check_private(Path(config.data_dir).expanduser(), "data_dir")
    warn_of_end(config)
    if cluster_address(config) is None and config.port:  # a cluster's proxy may have it, and be ours
        claim_port(config.host, config.port)


def warn_of_end(config: ServiceConfig) -> None:
    """Log it when the end that the policy was told of is over."""
    if config.policy.end_s <= time.time():
        log.warning("policy.ends_at=%s is over: payoff and thompson will learn nothing", config.policy.ends_at)


def preflight(config: ServiceConfig, check: Callable[[], None] = lambda: None) -> Preflight:
    """Check target, drafter and policy, and register a drafter that can be trained.

    check: raises when the start should end.
    Raises: ConfigError, DrafterMismatchError.
    """
    _check_driver(config)
    if "torch" in sys.modules:
        return _look(config)
    # out of the terminal's reach, whose Ctrl-C is this process's to answer
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    )
    given: bytes | None = msgspec.json.encode(to_dict(config))
    try:
        while True:
            try:
                output, _ = process.communicate(given, timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                given = None
                check()
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    try:
        answer = msgspec.json.decode(output, type=_Answer)
    except msgspec.DecodeError as e:
        code = process.returncode
        why = "it was killed, as where memory ends: see dmesg" if code == -signal.SIGKILL else "--verbose shows its log"
        raise PacelineError(f"the models could not be checked: that process ended with code {code}; {why}") from e
    if answer.found is None:
        raise getattr(errors, answer.error, PacelineError)(answer.reason)
    return answer.found


def _look(config: ServiceConfig) -> Preflight:
    from paceline.bandit.policies.table import make_policy

    device = _device(config)
    if is_adaptive(config):  # else the controller would end by it again and again beside a service that never trains
        with contextlib.redirect_stdout(sys.stderr):  # a foreign module may print; the answer has this stream to itself
            make_policy(config.policy.policy)
    if config.model != "bundled":  # a replica would refuse it too, but later and three times
        from paceline.serving.loading.target import check_target  # seconds of imports

        check_target(resolve_model(config.model))
    return Preflight(device=device, first_version=_register(config) if is_adaptive(config) else "")


def has_gpu_driver() -> bool:
    """Whether torch could find a GPU at all: CUDA's driver, or AMD's, is there."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True


def _check_driver(config: ServiceConfig) -> None:
    if config.device == "cuda" and cluster_address(config) is None and not has_gpu_driver():
        raise ConfigError(
            "device must be cpu or auto where no GPU has a driver (libcuda.so.1 cannot be loaded), got 'cuda'"
        )


def _device(config: ServiceConfig) -> str:
    """The device of the replicas. Raises: ConfigError when this computer should have a GPU and torch finds none."""
    if config.device == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if config.device == "cuda" and cluster_address(config) is None:  # a cluster's nodes have their own
        raise ConfigError(
            f"device must be cpu or auto where torch {torch.__version__} finds no GPU, got 'cuda'; `nvidia-smi` shows the "
            f"driver, and torch {'was built without CUDA' if torch.version.cuda is None else f'wants CUDA {torch.version.cuda}'}"
        )
    return "cuda" if config.device == "cuda" else "cpu"


def _register(config: ServiceConfig) -> str:
    from paceline.adapt.families.target_handle import load_target_handle
    from paceline.adapt.versions.first_drafter import drafter_taps, make_slots
    from paceline.adapt.versions.registry import DrafterRegistry

    paths = StorePaths.of(config)
    prepare_home(paths.home)
    target = load_target_handle(resolve_model(config.model), tap_layers=drafter_taps(config), dtype=config.dtype)
    try:
        return make_slots(config, target, DrafterRegistry(paths.registry)).first_version
    except OSError as e:
        name, place = ("data_dir", config.data_dir) if config.store_url is None else ("store_url", config.store_url)
        raise ConfigError(
            f"{name} must be where versions can be read and written, got {place!r}: {e.strerror or e}"
        ) from e


def main() -> None:
    """Answer for the configuration on the standard input, in one line on the standard output."""
    config = build(ServiceConfig, msgspec.json.decode(sys.stdin.buffer.read()))
    try:
        answer = _Answer(found=_look(config))
    except PacelineError as e:
        answer = _Answer(error=type(e).__name__, reason=str(e))
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
