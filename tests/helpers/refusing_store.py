"""Refusing store: an object store at refusing:// whose client raises an error of its own kind at whatever it is asked."""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

URL = "refusing://bucket/prefix"


class NoCredentials(Exception):
    """As botocore has one, which is no OSError."""


class RefusingStore(MemoryFileSystem):
    """Takes nothing and tells nothing."""

    protocol = "refusing"

    def _refuse(self, *args: Any, **options: Any) -> Any:
        raise NoCredentials("unable to locate credentials")

    ls = cat_file = pipe_file = _refuse


fsspec.register_implementation(RefusingStore.protocol, RefusingStore, clobber=True)
