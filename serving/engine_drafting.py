"""How does a drafter get the rows that it has not seen yet?

Shape legend: B requests, R new rows, L longest context.
"""

from __future__ import annotations

import torch

from paceline.serving.drafter import Drafter, DraftInputs
from paceline.serving.running_request import RunningRequest
from paceline.serving.upload import upload

MAX_BACKLOG_ROWS = 32
"""More new rows than this in one request are ingested before the drafting pass."""


def draft_inputs(
    requests: list[RunningRequest],
    slot_table: torch.Tensor,
    temperatures: torch.Tensor,
    features: torch.Tensor | None,
    stops: list[int] | None = None,
) -> DraftInputs:
    """Collect what the drafter has not seen: rows drafted_len..context_len-1 of each request, each with the next token.

    Args:
        slot_table: (B, L) int64, rows of these requests.
        temperatures: (B,) float32.
        features: (R, m * Dm) tapped hidden states by pool row; None when the drafter wants none.
        stops: end of the new rows per request, for ingesting only a part; context_len when None.
    Mutates: nothing; call `mark_ingested` when the drafter took the rows.
    """
    device = slot_table.device
    offsets = [0]
    positions: list[int] = []
    token_ids: list[int] = []
    owners: list[int] = []
    for i, r in enumerate(requests):
        stop = r.context_len if stops is None else stops[i]
        positions += range(r.drafted_len, stop)
        token_ids += r.tokens[r.drafted_len + 1 : stop + 1]
        owners += [i] * (stop - r.drafted_len)
        offsets.append(len(positions))
    new_positions = upload(positions, device, torch.int64)
    if len(requests) == 1:
        new_slots = slot_table[0, requests[0].drafted_len : requests[0].drafted_len + len(positions)]
    else:
        new_slots = slot_table[upload(owners, device, torch.int64), new_positions]
    return DraftInputs(
        request_ids=[r.request_id for r in requests],
        context_lens=upload([r.context_len for r in requests], device),
        anchor_token_ids=upload([r.tokens[r.context_len] for r in requests], device),
        temperatures=temperatures,
        slot_table=slot_table,
        cu_new=upload(offsets, device),
        new_positions=new_positions,
        new_token_ids=upload(token_ids, device, torch.int64),
        new_features=None if features is None else features.index_select(0, new_slots),
        new_slots=new_slots,
        histories=[r.tokens for r in requests],
    )


def mark_ingested(requests: list[RunningRequest], stops: list[int] | None = None) -> None:
    """The drafter has taken the rows that `draft_inputs` handed over."""
    for i, r in enumerate(requests):
        r.drafted_len = r.context_len if stops is None else stops[i]


def catch_up(
    drafter: Drafter,
    requests: list[RunningRequest],
    slot_table: torch.Tensor,
    temperatures: torch.Tensor,
    features: torch.Tensor | None,
    chunk_rows: int,
) -> int:
    """Ingest long backlogs (prompts, rounds without drafting) in chunks; one row per request stays for `propose`.

    Without it a proposal's time would not be that of a typical round, and the rows of one drafter call would be
    unbounded. Returns how many rows it took.
    """
    if max(r.context_len - r.drafted_len for r in requests) <= MAX_BACKLOG_ROWS:
        return 0
    num_done = 0
    while True:
        budget, stops = chunk_rows, []
        for r in requests:
            num_rows = max(0, min(budget, r.context_len - 1 - r.drafted_len))
            budget -= num_rows
            stops.append(r.drafted_len + num_rows)
        if budget == chunk_rows:
            return num_done
        num_done += chunk_rows - budget
        drafter.ingest(draft_inputs(requests, slot_table, temperatures, features, stops))
        mark_ingested(requests, stops)
