"""The canary on a real engine with the bundled model: a poisoned drafter goes, the same drafter again stays."""

import pytest
import torch

from paceline.bench.common.workloads import bundled_prompts
from paceline.config import EngineConfig, RolloutConfig, TreeConfig
from paceline.contracts import RoundStats
from paceline.infra.controller.rollout import Outcome, RolloutState, close_quiet, fold, judge
from paceline.infra.replica.feedback import make_batch
from paceline.paths import resolve_drafter, resolve_model
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.families import build_drafter, read_drafter_files
from paceline.serving.loading.target import read_target
from paceline.serving.sampling.request import GenerationRequest, SamplingParams

CONFIG = RolloutConfig(canary_percent=10, quiet_s=0.5)
WIDTH, MOST = 4, 200


class Rows:
    """Feedback sink that keeps the rows of the rounds since it was read last."""

    def __init__(self) -> None:
        self.rows: list[RoundStats] = []

    def record_rounds(self, rows: RoundStats) -> None:
        self.rows.append(rows)

    def take(self) -> list[RoundStats]:
        rows, self.rows = self.rows, []
        return rows


def poison(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same numbers under other labels: every matrix with its rows shuffled."""
    rng = torch.Generator().manual_seed(1)
    return {k: v[torch.randperm(v.shape[0], generator=rng)] if v.dim() == 2 else v for k, v in state.items()}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_poisoned_drafter_goes_within_200_requests_at_a_tenth_and_no_token_changes():
    folder = resolve_drafter("bundled")
    assert folder is not None
    settings, state = read_drafter_files(folder)
    target = read_target(resolve_model("bundled"), device="cpu")

    def build():
        return build_drafter(settings, state, target)

    sink, slots = Rows(), DrafterSlots(build(), "first", spawn=build)
    # Always drafting: an engine that finds drafting too dear at this load decodes plainly, whatever the version.
    tree = TreeConfig(max_draft_tokens=8, policy="fixed")
    config = EngineConfig(max_running=WIDTH, kv_bytes=16 * 2**20, num_threads=1, tree=tree)
    engine = Engine(target, slots, config, feedback=sink)
    engine.warm_up()
    prompts = [tuple(target.tokenizer.encode(p.text)) for p in bundled_prompts("tools")[:20]]
    outputs: dict[int, set[tuple[int, ...]]] = {}

    def serve(first: int, num: int) -> None:
        for k in range(first, first + num):
            tokens: list[int] = []
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            prompt = k % len(prompts)

            def take(event, tokens=tokens, prompt=prompt) -> None:
                tokens.extend(event.token_ids)
                if event.finish_reason is not None:
                    outputs.setdefault(prompt, set()).add(tuple(tokens))

            engine.submit(
                GenerationRequest(request_id=f"q{k}", prompt_token_ids=prompts[prompt], params=params, bucket="tools"),
                take,
            )
        while engine.step():
            pass

    serve(0, 20)
    sink.take()
    assert slots.stage("poisoned", poison(state))
    slots.set_canary("poisoned", CONFIG.canary_percent)
    rollout = RolloutState()
    canary = rollout.begin("poisoned", "first", CONFIG, now=0.0, decision_id=0, bucket="tools", arm="full")
    verdict, sent, now = None, 0, 1.0
    while verdict is None and sent < MOST:
        serve(1000 + sent, WIDTH)
        sent += WIDTH
        batch = make_batch(sink.take(), replica_id="a", boot_epoch=1, seq=1, target_version="t", num_dropped=0)
        fold(canary, batch.cells, now)
        now += 1.0
        close_quiet(canary, CONFIG, now)
        verdict = judge(canary, CONFIG, now)
    assert verdict is not None and verdict.outcome == Outcome.ROLLED_BACK, canary.test
    print(f"{sent} requests, {canary.test.num_requests[1]} on the canary: {verdict.reason}")
    assert sent <= MOST
    slots.set_canary("", 0)
    serve(5000, 8)
    assert {v for rows in sink.take() for v in rows.drafter_version} == {"first"}
    assert all(len(o) == 1 for o in outputs.values()) and len(outputs) == len(prompts)
