"""Purge: deletes captured traces on demand, those of one tenant or all of a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated as A

from paceline.adapt.data.blob_io import check_store, service_places
from paceline.adapt.data.trace_store import TraceStore
from paceline.errors import ConfigError
from paceline.paths import DATA_DIR, TRACES, all_homes
from paceline.records import Setting, record


@record()
class PurgeOptions:
    """List the tenant under trace.opt_out_tenants first, or a running service goes on capturing.

    Example: paceline purge-traces --tenant acme.
    """

    data_dir: A[Path, Setting("Data folder of the service.")] = Path(DATA_DIR)
    store_url: A[str | None, Setting("Object store of the service, where it has one, as s3://BUCKET/PREFIX.")] = None
    tenant: A[
        str | None, Setting("Tenant as in x-paceline-tenant: every shard with a trace of it goes.")
    ] = None  # fmt: skip
    is_all: A[bool, Setting("Delete every trace.", flag="all")] = False

    def __post_init__(self) -> None:
        if (self.tenant is None) == (not self.is_all):
            raise ConfigError("purge-traces needs either --tenant NAME or --all")
        check_store(self.store_url)


def purge(options: PurgeOptions) -> int:
    """Delete the shards of all services that hold a trace of the tenant, or all of them; returns how many.

    Raises: ConfigError when the store, or without one the folder, has no traces; nothing is deleted then.
    """
    local: list[str | Path] = [p for home in all_homes(options.data_dir) if (p := home / TRACES).is_dir()]
    stored = [] if options.store_url is None else service_places(options.store_url, TRACES)
    if not (local if options.store_url is None else stored):
        name = "data-dir must be the data folder" if options.store_url is None else "store-url must be the object store"
        raise ConfigError(f"{name} of a service, but there are no traces below {options.store_url or options.data_dir}")
    # the folder of one with a store has what was captured before
    return sum(_purge(TraceStore(place), options.tenant) for place in (*stored, *local))


def _purge(store: TraceStore, tenant: str | None) -> int:
    return store.delete_all() if tenant is None else store.delete_tenant(tenant)
