"""Settings of the plugin: `--additional-config '{"paceline": {...}}'` of vLLM, which every one of its processes sees."""

from __future__ import annotations

import functools
import socket
from pathlib import Path
from typing import Any

import msgspec

from paceline.contracts import SPAN_S
from paceline.errors import ConfigError
from paceline.paths import DATA_DIR, REGISTRY, TRACES, model_version, service_home


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a vLLM replica takes part in a service."""

    redis_url: str
    service: str = "paceline"
    """Name of the service: the prefix of its keys in Redis, and its folder below data_dir."""
    data_dir: str = DATA_DIR
    """Where registry and traces lie; the same for all replicas and for `paceline attach`."""
    replica_id: str = ""
    """'' = host and vLLM's own instance id, so that a restart is another replica."""
    trusts_groups: bool = False
    """Requests with `group: plain` count as the comparison that they are; false: as traffic without evidence."""
    window_s: float = 30.0
    """One drafter serves all requests at a time; which one is drawn anew so often, by the shares of hold-back and canary."""
    stale_prefix: str = "asked"
    """Requests that begin with cached blocks of another drafter: 'asked' = evidence of nothing, 'count' = like others,
    'reset' = as 'asked', and a switch empties the prefix cache where no request runs: vLLM refuses otherwise."""
    adapts_length: bool = True
    """Drafts are cut to what is worth verifying (infra/engines/draft_length.py); false: always the whole chain."""
    trace_share: float = 1.0
    """Share of requests that leave training text."""
    topk: int = 8
    """Target log-probabilities kept with it per output token."""
    max_trace_tokens: int = 4096
    """Longer requests leave none: their features would wait in memory."""
    shard_rows: int = 1024
    """Rows of a file of training text."""

    @property
    def home(self) -> Path:
        return service_home(self.data_dir, self.service)

    @property
    def traces(self) -> Path:
        return self.home / TRACES

    @property
    def registry(self) -> Path:
        return self.home / REGISTRY


def settings_of(vllm_config: Any) -> Settings | None:
    """None where vLLM was started without. Raises: ConfigError where they are wrong."""
    values = (vllm_config.additional_config or {}).get("paceline")
    if values is None:
        return None
    try:
        found = msgspec.convert(values, Settings)
    except msgspec.ValidationError as e:
        raise ConfigError(f"additional_config.paceline: {e}") from e
    for ok, rule, value in (
        (found.window_s > 0 and found.window_s % SPAN_S == 0, f"window_s must be a multiple of {SPAN_S:g}", found.window_s),
        (found.stale_prefix in ("asked", "count", "reset"), "stale_prefix must be asked, count or reset", found.stale_prefix),
        (0 <= found.trace_share <= 1, "trace_share must be in [0, 1]", found.trace_share),
    ):  # fmt: skip
        if not ok:
            raise ConfigError(f"additional_config.paceline.{rule}, got {value!r}")
    own = found.replica_id or f"{socket.gethostname()}-{vllm_config.instance_id}"
    return msgspec.structs.replace(found, replica_id=own)


@functools.cache
def target_version_of(model: str) -> str:
    """The target's version as the registry's manifests have it. Raises: ConfigError unless `model` is a folder."""
    if not Path(model).is_dir():
        raise ConfigError(f"model must be a folder, got {model!r}; download it and name the folder")
    return model_version(Path(model))
