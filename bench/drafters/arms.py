"""Arms of the drafter benchmark: drafters with policies, and what each one weighs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from safetensors import safe_open

from paceline.bench.common.engine_run import load_named_drafter, trained_domains
from paceline.bench.common.recorders import CountedDrafter, RoundRecorder
from paceline.bench.engine.arms import EngineArm, new_engine
from paceline.bench.engine.cells import PLAIN
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.errors import ConfigError
from paceline.paths import TEXT_DRAFTERS, resolve_drafter
from paceline.serving.target_model.model import TargetModel

FREE_POLICIES: dict[str, dict[str, Any]] = {name: {"policy": name} for name in ("adaptive", "bastion")}
"""Policies that choose the number of nodes themselves, up to the engine's limit: each drafter at its own best. Name -> settings of
the tree."""
BUDGET_POLICIES: dict[str, dict[str, Any]] = {name: {"policy": name} for name in ("fixed", "ddtree", "bundle")}
"""Policies with a given number of nodes, the same for every drafter; one arm for each of --nodes."""
_DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmSpec:
    """A drafter with a policy."""

    name: str
    """drafter/policy, as in tables and results."""
    drafter: str
    """Name or folder."""
    policy: str
    tree: TreeConfig
    num_weights: int
    """Elements of the drafter's weight files; 0 for drafters without weights."""
    weight_bytes: int
    domains: tuple[str, ...]
    """What the drafter was trained on, as its config says."""


def check_policies(policies: Sequence[str], nodes: Sequence[int]) -> None:
    """Raises ConfigError on an unknown policy, or a fixed one without a budget."""
    known = (*FREE_POLICIES, *BUDGET_POLICIES)
    strange = [p for p in policies if p not in known]
    if not policies or strange:
        raise ConfigError(f"policies must be among {', '.join(known)}, got {','.join(policies)!r}")
    if any(p in BUDGET_POLICIES for p in policies) and not nodes:
        raise ConfigError(f"nodes must give the budgets of {', '.join(BUDGET_POLICIES)}, got none")
    for n in nodes:
        TreeConfig(max_draft_tokens=n)


def arm_specs(
    drafters: Sequence[str], policies: Sequence[str], nodes: Sequence[int], model: str = "bundled"
) -> list[ArmSpec]:
    """Every drafter under every policy; raises ConfigError on unknown names, two equal ones, or missing weights.

    drafters: NAME+TEXT is a drafter with weights beside one of TEXT_DRAFTERS.
    """
    check_policies(policies, nodes)
    out: list[ArmSpec] = []
    for given in drafters:
        label = given.rstrip("/").rsplit("/", 1)[-1]
        drafter, _, mix = given.rpartition("+")
        drafter, mix = (drafter, mix) if drafter and mix in TEXT_DRAFTERS else (given, "none")
        num_weights, weight_bytes = weights_of(drafter, model)
        if mix != "none" and not num_weights:
            raise ConfigError(
                f"drafters must be named as NAME+TEXT of a drafter with weights and one without, got {given!r}"
            )
        trees = {p: TreeConfig(**FREE_POLICIES[p], mix=mix) for p in policies if p in FREE_POLICIES}
        budgets = [p for p in policies if p in BUDGET_POLICIES]
        trees |= {
            f"{p}{n}": TreeConfig(**BUDGET_POLICIES[p], max_draft_tokens=n, mix=mix) for p in budgets for n in nodes
        }
        out += [
            ArmSpec(
                name=f"{label}/{policy}", drafter=drafter, policy=policy, tree=tree, num_weights=num_weights,
                weight_bytes=weight_bytes, domains=trained_domains(drafter, model),
            )
            for policy, tree in trees.items()
        ]  # fmt: skip
    names = [s.name for s in out]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ConfigError(f"drafters must differ in the last part of their name, got {twice[0]!r} twice")
    return out


def weights_of(drafter: str, model: str = "bundled") -> tuple[int, int]:
    """(elements, bytes) of a drafter's weight files; (0, 0) for drafters without weights."""
    folder = resolve_drafter(drafter, model)
    if folder is None:
        return 0, 0
    num_weights = num_bytes = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118, the file is no mapping
                piece = file.get_slice(key)
                count = math.prod(piece.get_shape())
                num_weights += count
                num_bytes += count * _DTYPE_BYTES[piece.get_dtype()]
    return num_weights, num_bytes


def build_arms(
    specs: Sequence[ArmSpec], target: TargetModel, config: EngineConfig, *, context_tokens: int
) -> list[EngineArm]:
    """The plain arm and one for each spec, each with its own engine of as many pages and its own copy of the drafter.

    config: with room for all requests of the largest batch. context_tokens: of the longest request, prompt and answer.
    """
    most_nodes = max([s.tree.max_draft_tokens for s in specs], default=1)
    pages = -(-(context_tokens + most_nodes + 1) // config.page_tokens)
    num_tokens = (config.max_running + 1) * pages * config.page_tokens
    recorder = RoundRecorder()
    plain = new_engine(target, None, version=PLAIN, num_tokens=num_tokens, config=config, feedback=recorder)
    out = [EngineArm(PLAIN, plain, Group.PLAIN, recorder=recorder)]
    for spec in specs:
        drafter = load_named_drafter(spec.drafter, target)
        if drafter is None:
            raise ConfigError("drafters must draft: 'none' is the plain arm, which always runs")
        counted, recorder = CountedDrafter(drafter), RoundRecorder()
        engine = new_engine(
            target, counted, version=spec.drafter, num_tokens=num_tokens,
            config=dataclasses.replace(config, tree=spec.tree), feedback=recorder,
        )  # fmt: skip
        out.append(EngineArm(spec.name, engine, Group.ADAPTIVE, recorder=recorder, drafter=counted))
    return out
