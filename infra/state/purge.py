"""Purge: deletes captured traces on demand, those of one tenant or all of a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated as A

from paceline.adapt.data.trace_store import TraceStore
from paceline.errors import ConfigError
from paceline.records import Setting, record


@record()
class PurgeOptions:
    """List the tenant under trace.opt_out_tenants first, or a running service goes on capturing.

    Example: paceline purge-traces --tenant acme.
    """

    data_dir: A[Path, Setting("Data folder of the service.")] = Path("~/.cache/paceline")
    tenant: A[
        str | None, Setting("Tenant as in x-paceline-tenant: every shard with a trace of it goes.")
    ] = None  # fmt: skip
    is_all: A[bool, Setting("Delete every trace.", flag="all")] = False

    def __post_init__(self) -> None:
        if (self.tenant is None) == (not self.is_all):
            raise ConfigError("purge-traces needs either --tenant NAME or --all")


def purge(options: PurgeOptions) -> int:
    """Delete the shards that hold a trace of the tenant, or all of them; returns how many.

    Raises: ConfigError when the folder has no trace store.
    """
    root = options.data_dir.expanduser().resolve() / "traces"
    if not root.is_dir():
        raise ConfigError(f"data-dir must be the data folder of a service, but {root} does not exist")
    store = TraceStore(root)
    if options.tenant is not None:
        return store.delete_tenant(options.tenant)
    shards = store.list_shards()
    for shard in shards:
        store.delete_shard(shard.shard_id)
    return len(shards)
