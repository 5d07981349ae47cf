"""Tree policy: which requests of a round draft, the trees they get, and what the round teaches.

Shape legend: B requests of the round, N packed tree rows (roots included).
The policy ties drafter, trees and budget together: ask `turns` and `wants_draft`, build `DraftInputs` for those requests, call
`draft`, verify, then `observe`. It never sees the verification's random numbers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from paceline.config import TreeConfig
from paceline.kernels.dispatch import Kernels
from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.budget.stats import DraftKey, RoundObservation
from paceline.serving.drafters.interface import Drafter, DrafterCaps
from paceline.serving.drafters.text import TextDrafter, make_text_drafter
from paceline.serving.trees.calibration import ScoreCalibration
from paceline.serving.trees.device import DeviceTrees
from paceline.serving.trees.host import HostTrees
from paceline.serving.trees.propose import DraftGroup, RoundDraft
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import AcceptPlan

logger = logging.getLogger(__name__)

_FAILED = "drafter %s failed; these requests decode plainly: %s"


class TreePolicy:
    """Plans, builds and learns; one per engine, used by the engine's thread only."""

    def __init__(
        self,
        config: TreeConfig,
        *,
        cost: CostModel | None = None,
        timer: Callable[[], float] = time.perf_counter,
        vocab_size: int | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """timer: seconds, monotonic. vocab_size: when given, proposals outside [0, vocab_size) count as failures.
        kernels: of the target's device; trees off the CPU are built by them, on the host where they are None or the
        references."""
        self.config = config
        self.budget = BudgetController(config, cost)
        self._calibration = ScoreCalibration()
        self._timer = timer
        common = (config, self.budget, self._calibration, timer, vocab_size)
        self._host_trees = HostTrees(*common)
        self.device_trees: DeviceTrees | None = None
        """Drafts rounds off the CPU; None = the host does, as where trees grow by bundles."""
        if kernels is not None and not kernels.is_reference and config.policy != "bundle":
            self.device_trees = DeviceTrees(*common, kernels)
        self.text: TextDrafter | None = None if config.mix == "none" else make_text_drafter(config.mix)
        """Drafts in place of a drafter with weights where a text goes on as it did before; None = the mix is none, or it failed."""
        self.text_failures: dict[str, str] = {}
        """Its name -> why it drafts no more."""

    def drop_text(self, reason: str) -> None:
        """Go on without the text drafter, which has failed."""
        logger.error("the text drafter failed, drafters with weights go on without it: %s", reason)
        assert self.text is not None
        self.text_failures[self.text.caps.name], self.text = reason, None

    def release(self, request_id: str) -> None:
        """Forget what is kept for a request that has ended."""
        if self.text is not None:
            try:
                self.text.release(request_id)
            except Exception as e:  # a broken drafter costs speed, never a request
                self.drop_text(f"release raised {type(e).__name__}: {e}")

    def turns(
        self, keys: list[DraftKey | None], text_keys: list[DraftKey | None], context_rows: int
    ) -> list[DraftKey | None]:
        """Whose turn it is, the drafter's or the text drafter's: the key of each of the round's B requests.

        text_keys: None where the text drafter expects nothing. Call once a round and before `wants_draft`.
        """
        return self.budget.turns(keys, text_keys, context_rows)

    def wants_draft(
        self,
        keys: list[DraftKey | None],
        context_rows: int,
        backlogs: list[int] | None = None,
        horizons: list[int] | None = None,
    ) -> list[bool]:
        """Whether to call the drafter for each of the round's B requests.

        keys: None for requests without a (working) drafter. context_rows: sum of their context_lens. Call exactly once
        per round, or `skip`, and before `draft`: it moves the probing state. backlogs: rows that the drafter has not ingested yet.
        horizons: tokens that each request is expected to get still.
        """
        return self.budget.wants_draft(keys, context_rows, backlogs, horizons)

    def rest(self, keys: set[DraftKey | None], num_requests: int) -> int:
        """How many rounds of the same requests need no decision, as `BudgetController.rest`. keys: of their drafters."""
        known = {key for key in keys if key is not None}
        if self.text is not None:
            known |= {(self.text.caps.name, *key[1:]) for key in known}
        return self.budget.rest(known, num_requests)

    def skip(self) -> None:
        """A round of such requests passes without a decision."""
        self.budget.skip()

    def draft(
        self,
        groups: list[DraftGroup],
        keys: list[DraftKey | None],
        anchor_token_ids: torch.Tensor,
        context_rows: int,
    ) -> RoundDraft:
        """Propose, build, maybe re-enter, and cut all trees of the round to the budget that maximises tokens per second.

        Args:
            groups: the requests for which wants_draft said True and whose drafters have caught up, by drafter.
            keys: (B,), as for wants_draft.
            anchor_token_ids: (B,) int64, of all B requests.
        Returns: trees of the B requests in round order. A drafter that raises or proposes invalid log-probabilities
        is reported in `failures` (the caller stops using it); its requests decode plainly. So are all drafters of the
        round when their proposals cannot be made into trees.  Syncs: a few per group on the CPU, else
        one for all.
        """
        out = plain_round(keys, anchor_token_ids, context_rows)
        if not groups:
            return out
        start = self._timer()
        try:
            self._draft_groups(out, groups, anchor_token_ids)
        except torch.OutOfMemoryError:
            model_s, failures = out.model_s, out.failures
            out = plain_round(keys, anchor_token_ids, context_rows)
            out.failures, out.model_s, out.starved = failures, model_s, list(range(len(groups)))
        except Exception as e:  # what they proposed may be at fault, and drafting again could fail again
            names = ", ".join(sorted({g.drafter.caps.name for g in groups}))
            logger.exception(_FAILED, names, ", ".join(i for g in groups for i in g.inputs.request_ids))
            blamed = [i for i, g in enumerate(groups) if g.drafter is not self.text] or range(len(groups))
            failures = {i: f"{type(e).__name__}: {e}" for i in blamed} | out.failures
            model_s, out = out.model_s, plain_round(keys, anchor_token_ids, context_rows)
            out.failures, out.model_s = failures, model_s
        out.draft_s = self._timer() - start
        return out

    def _draft_groups(self, out: RoundDraft, groups: list[DraftGroup], anchor_token_ids: torch.Tensor) -> None:
        """Fill `out`, which has roots only."""
        trees = self.trees_for(groups, anchor_token_ids.device)
        drafted = []
        for index, group in enumerate(groups):
            try:
                found = trees.propose(index, group, out.keys, out)
            except torch.OutOfMemoryError:
                out.starved.append(index)
                continue
            except Exception as e:  # a drafter is untrusted code with untrusted weights; decoding must go on
                logger.exception(_FAILED, group.drafter.caps.name, ", ".join(group.inputs.request_ids))
                out.failures[index] = f"{type(e).__name__}: {e}"
                continue
            if found is not None:
                drafted.append(found)
        if drafted:
            trees.assemble(out, drafted, anchor_token_ids)  # type: ignore[arg-type]

    def trees_for(self, groups: list[DraftGroup], device: torch.device) -> HostTrees | DeviceTrees:
        """Who drafts a round of these groups."""
        trees = self.device_trees
        if trees is None or device.type == "cpu" or not all(trees.takes(g.drafter.caps) for g in groups):
            return self._host_trees
        return trees

    # ---- rounds on the device, which are read once they are verified --------------------------------------------
    def drafts_by_graph(self, drafter: Drafter, device: torch.device) -> bool:
        """Whether the trees of a drafter are built on the device, whose rounds captured work can draft whole."""
        trees = self.trees_for([], device)
        return trees is self.device_trees and trees.takes(drafter.caps)

    def should_expand(
        self, keys: list[DraftKey | None], context_rows: int, num_requests: int, caps: DrafterCaps
    ) -> bool:
        """Whether to re-enter at the leaves of requests with these keys (G,), as earlier rounds tell."""
        assert self.device_trees is not None
        return self.device_trees.should_expand(keys, context_rows, num_requests, caps)

    def corrections(self, keys: list[DraftKey | None], num_slots: int) -> np.ndarray:
        """(2, G or 1, S, R) of the score calibration."""
        return self._calibration.corrections(keys, num_slots)

    def plan_nodes(
        self, keys: list[DraftKey | None], rows: list[int], context_rows: int
    ) -> tuple[list[int], list[int], int]:
        """As `DeviceTrees.plan_nodes`."""
        if not rows:
            return [0] * len(keys), [0] * len(keys), 0
        assert self.device_trees is not None
        return self.device_trees.plan_nodes(keys, rows, context_rows)

    def settle(self, draft: RoundDraft, index: int, rows: list[int], caps: DrafterCaps, **found: Any) -> None:
        """As `DeviceTrees.settle`."""
        assert self.device_trees is not None
        self.device_trees.settle(draft, index, rows, caps, **found)

    def observe(
        self,
        draft: RoundDraft,
        plan: AcceptPlan,
        *,
        verify_s: float,
        round_s: float,
        catch_up_s: float = 0.0,
        num_catch_up_rows: int = 0,
        catching_up: Sequence[int] = (),
    ) -> None:
        """Learn from a verified round.

        verify_s: seconds of the verify forward. round_s: seconds of the whole round without prefill and without
        catch_up_s, which drafters spent on num_catch_up_rows that earlier plain rounds had left behind. catching_up: requests
        that those are of, or that wait for their turn.
        """
        paths = plan.on_host()
        num_accepted_tokens = [len(rows) - 1 for rows, _ in paths]
        reentered = [0] * len(num_accepted_tokens) if draft.frontier_mass else []
        if draft.tree.cells is not None:
            accepted = np.array([row for path, _ in paths for row in path])
            self._calibration.observe(draft.tree, draft.keys, draft.is_drafted, accepted)
            if draft.frontier_mass:
                cells = draft.tree.cell_list()
                reentered = [
                    sum(cells[row] >= first for row in path) if first else 0
                    for (path, _), first in zip(paths, draft.num_cells, strict=True)
                ]
        self.budget.observe(
            RoundObservation(
                keys=draft.keys,
                is_drafted=draft.is_drafted,
                num_nodes=draft.num_draft_tokens,
                num_accepted_tokens=num_accepted_tokens,
                context_rows=draft.context_rows,
                longest_context=draft.longest_context,
                draft_s=draft.draft_s,
                verify_s=verify_s,
                round_s=round_s,
                num_new_rows=draft.num_new_rows,
                expand_s=draft.expand_s,
                num_leaves=draft.num_leaves,
                catch_up_s=catch_up_s,
                num_catch_up_rows=num_catch_up_rows,
                catching_up=catching_up,
                frontier_mass=draft.frontier_mass,
                num_accepted_tokens_reentered=reentered,
                has_text_turns=self._has_text_turns(draft),
            )
        )

    def _has_text_turns(self, draft: RoundDraft) -> bool:
        if self.text is None:
            return False
        name = self.text.caps.name
        return any(
            d and key is not None and key[0] == name for d, key in zip(draft.is_drafted, draft.keys, strict=True)
        )

    def forget(self, version: str) -> None:
        """Drop what was learnt about a drafter version that is no longer loaded."""
        self.budget.forget(version)
        self._calibration.forget(version)
        if self.device_trees is not None:
            self.device_trees.forget(version)


def plain_round(keys: list[DraftKey | None], anchor_token_ids: torch.Tensor, context_rows: int) -> RoundDraft:
    """A round of roots only. keys, anchor_token_ids: (B,)."""
    num_requests = anchor_token_ids.numel()
    return RoundDraft(
        tree=TreeBatch.roots(anchor_token_ids),
        keys=keys,
        num_draft_tokens=[0] * num_requests,
        is_drafted=[False] * num_requests,
        context_rows=context_rows,
    )
