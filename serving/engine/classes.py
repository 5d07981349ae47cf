"""Prompt classes: the buckets of requests that name none, told by the target's hidden states of their prompts.

The vector of a prompt is the mean of the tapped hidden states of its rows, each row and layer brought to unit
root-mean-square, in a fixed random projection. A request belongs to the nearest centroid within whose radius its vector
lies, once its prompt is in the KV and for life. Nothing is learnt here: vectors go to a sink, centroids come from outside.

Shape legend: B requests whose prompt is complete, S rows of each, m tapped layers, Dm hidden size, d numbers of a vector,
K classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from paceline.contracts import TrafficClasses
from paceline.serving.engine.running import RunningRequest
from paceline.serving.target_model.device import upload

NUM_DIMS = 48
"""Distances between vectors are then off by 1 / sqrt(2 * 48) = 10%, which is less than prompts of one kind differ by."""
NUM_ROWS = 128
"""Rows of a prompt that count, evenly spread: a bound of the work, not of the prompt."""
_GROUP = 8
"""Prompts whose rows are gathered at once: many short ones that end together take no more memory than these."""
_SEED = 20_260_101
_EPS = 1e-6


class PromptSink(Protocol):
    """Takes the vectors of prompts."""

    def record_prompt(self, space: str, vector: np.ndarray, tenant: str) -> None:
        """Keep a vector (d,) float32 of a tenant's prompt; drops when full. `space`, `tenant`: see PromptVectors."""


class _Table(NamedTuple):
    """Centroids as they are looked up."""

    names: list[str]
    centroids: np.ndarray  # (K, d) float32
    radii: np.ndarray  # (K,) float32


class PromptClasses:
    """Sorts requests without a bucket into classes. Engine thread only, but for `install` and the counters."""

    def __init__(
        self,
        features: torch.Tensor,
        num_taps: int,
        *,
        target_version: str,
        tap_layers: Sequence[int],
        sink: PromptSink | None,
        note_error: Callable[[str], None],
    ) -> None:
        """features: the KV pool's tapped hidden states (R, m * Dm), m = num_taps. note_error: counts what must end neither a
        request nor the engine; called inside the handler, with what failed."""
        self._features, self._num_taps = features, num_taps
        self._sink, self._note_error = sink, note_error
        size = features.shape[1]
        random = torch.randn(size, NUM_DIMS, generator=torch.Generator().manual_seed(_SEED))
        self._projection = (random / (size * NUM_DIMS) ** 0.5).to(features.device)
        text = f"{target_version} {tuple(tap_layers)} {NUM_DIMS} {NUM_ROWS} {_SEED}"
        self.space = hashlib.sha256(text.encode()).hexdigest()[:12]
        """Vectors and centroids of another space mean nothing here."""
        self._table: _Table | None = None
        self.num_classed = 0
        """Requests that were sorted into a class."""
        self.num_unclassed = 0
        """Requests without a name that lay within no class."""

    @property
    def num_classes(self) -> int:
        """K."""
        table = self._table
        return 0 if table is None else len(table.names)

    def install(self, classes: TrafficClasses) -> None:
        """Sort requests by these centroids from now on; those of another space, or of other sizes, mean none. Any thread."""
        count = len(classes.names)
        fits = classes.space == self.space and len(classes.centroids) == len(classes.radii) == count
        if not fits or not count or any(len(c) != NUM_DIMS for c in classes.centroids):
            self._table = None
            return
        centroids = np.asarray(classes.centroids, np.float32)
        self._table = _Table(list(classes.names), centroids, np.asarray(classes.radii, np.float32))

    def launch(self, requests: Sequence[RunningRequest]) -> torch.Tensor | None:
        """Vectors (n, d) float32 of those of these requests that have no bucket yet, on their way to the host.

        The rows of their prompts must be in the pool. None: there is no such request.  Syncs: none.
        """
        wanted = [r for r in requests if r.awaits_class]
        if not wanted:
            return None
        if self._table is None and self._sink is None:
            for r in wanted:
                r.awaits_class = False
            return None
        try:
            groups = [wanted[i : i + _GROUP] for i in range(0, len(wanted), _GROUP)]
            return torch.cat([self._vectors(group) for group in groups]).to("cpu", non_blocking=True)
        except Exception:
            self._note_error("telling the class of a prompt")
            for r in wanted:
                r.awaits_class = False
            return None

    def _vectors(self, requests: Sequence[RunningRequest]) -> torch.Tensor:
        """(n, d) float32 on the pool's device."""
        rows: list[torch.Tensor] = []
        for r in requests:
            assert r.rows is not None and r.context_len >= r.prompt_len, "a prompt is not in the pool"
            rows.append(r.rows[torch.arange(NUM_ROWS) * r.prompt_len // NUM_ROWS])
        index = upload(torch.cat(rows), self._features.device)
        states = self._features.index_select(0, index).float().view(len(requests), NUM_ROWS, self._num_taps, -1)
        means = (states * states.square().mean(-1, keepdim=True).add_(_EPS).rsqrt_()).mean(1)
        return means.view(len(requests), -1) @ self._projection

    def assign(self, requests: Sequence[RunningRequest], vectors: torch.Tensor) -> list[RunningRequest]:
        """Give the requests of a `launch` their class; call when the host has waited for the device since.

        Returns: those that have one now.
        """
        wanted, told = [r for r in requests if r.awaits_class], list[RunningRequest]()
        table = self._table
        for request, vector in zip(wanted, vectors.numpy(), strict=True):
            request.awaits_class = False
            if not np.isfinite(vector).all():
                continue
            if table is not None:
                away = np.sqrt(((table.centroids - vector) ** 2).sum(1))
                best = int(away.argmin())
                if away[best] <= table.radii[best]:
                    request.bucket = table.names[best]
                    told.append(request)
                    self.num_classed += 1
                else:
                    self.num_unclassed += 1
            if self._sink is not None and request.request.is_traced:
                try:
                    self._sink.record_prompt(self.space, vector, request.request.tenant)
                except Exception:
                    self._note_error("recording the vector of a prompt")
        return told
