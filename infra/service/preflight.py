"""Preflight: what must be known of the models before a service starts: they are checked, the first drafter is registered.

It needs torch, some 250 MiB that the process which keeps a service running would hold for nothing: there it runs in a
process of its own, which ends again.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass

import msgspec

from paceline import errors
from paceline.config import ServiceConfig, to_dict
from paceline.errors import ConfigError, PacelineError
from paceline.infra.service.stores import StorePaths, is_adaptive
from paceline.infra.state.layout import prepare_home
from paceline.paths import resolve_model
from paceline.records import build


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


def preflight(config: ServiceConfig) -> Preflight:
    """Check target, drafter and policy, and register a drafter that can be trained.

    Raises: ConfigError, DrafterMismatchError.
    """
    if "torch" in sys.modules:
        return _look(config)
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=msgspec.json.encode(to_dict(config)), stdout=subprocess.PIPE, check=False
    )  # fmt: skip
    try:
        answer = msgspec.json.decode(done.stdout, type=_Answer)
    except msgspec.DecodeError as e:
        raise PacelineError(f"the models could not be checked: that process ended with code {done.returncode}") from e
    if answer.found is None:
        raise getattr(errors, answer.error, PacelineError)(answer.reason)
    return answer.found


def _look(config: ServiceConfig) -> Preflight:
    from paceline.bandit.policies.table import make_policy
    from paceline.serving.loading.target import check_target

    device = _device(config)
    if is_adaptive(config):  # else the controller would end by it again and again beside a service that never trains
        with contextlib.redirect_stdout(sys.stderr):  # a foreign module may print; the answer has this stream to itself
            make_policy(config.policy.policy)
    if config.model != "bundled":  # a replica would refuse it too, but later and three times
        check_target(resolve_model(config.model))
    return Preflight(device=device, first_version=_register(config) if is_adaptive(config) else "")


def _device(config: ServiceConfig) -> str:
    """The device of the replicas. Raises: ConfigError when this computer should have a GPU and torch finds none."""
    if config.device == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if config.device == "cuda" and not (
        config.ray_address or os.environ.get("RAY_ADDRESS")
    ):  # a cluster's nodes have their own
        raise ConfigError(
            f"device must be cpu or auto where torch {torch.__version__} finds no GPU, got 'cuda'; `nvidia-smi` shows the "
            f"driver, and torch {'was built without CUDA' if torch.version.cuda is None else f'wants CUDA {torch.version.cuda}'}"
        )
    return "cuda" if config.device == "cuda" else "cpu"


def _register(config: ServiceConfig) -> str:
    from paceline.adapt.families.target_handle import load_target_handle
    from paceline.adapt.versions.registry import DrafterRegistry
    from paceline.infra.service.parts import drafter_taps, make_slots

    paths = StorePaths.of(config)
    prepare_home(paths.home)
    target = load_target_handle(resolve_model(config.model), tap_layers=drafter_taps(config), dtype=config.dtype)
    return make_slots(config, target, DrafterRegistry(paths.registry)).first_version


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
