"""Purge: deletes captured traces on demand, those of one tenant or all of a service."""

from __future__ import annotations

from pathlib import Path

from paceline.adapt.data.trace_store import TraceStore
from paceline.errors import ConfigError


def purge(data_dir: Path, *, tenant: str | None, everything: bool) -> int:
    """Delete the shards that hold a trace of `tenant`, or all of them; returns how many.

    Raises: ConfigError unless exactly one of the two is asked for, or when the folder has no trace store.
    """
    if (tenant is None) == (not everything):
        raise ConfigError("purge-traces needs either --tenant NAME or --all")
    root = data_dir.expanduser().resolve() / "traces"
    if not root.is_dir():
        raise ConfigError(f"data_dir must be the data folder of a service, but {root} does not exist")
    store = TraceStore(root)
    if tenant is not None:
        return store.delete_tenant(tenant)
    shards = store.list_shards()
    for shard in shards:
        store.delete_shard(shard.shard_id)
    return len(shards)
