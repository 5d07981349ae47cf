"""A real vLLM loads what `paceline export-drafter` writes, drafts with it, and its rounds are those that the gate foretells.

`make test-vllm` installs it and sets PACELINE_VLLM_PYTHON; without that these tests are skipped. Greedy only: vLLM 0.32 on
a CPU corrupts sampling parameters under speculation (docs/api/vllm.md).
"""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from paceline.adapt.gate.shadow import fixed_rounds, replay_rounds
from paceline.adapt.online.trainer import ShadowConfig
from paceline.adapt.versions.export_drafter import ExportDrafterOptions, export_drafter
from paceline.bench.common.engine_run import encode, load_target
from paceline.bench.common.workloads import load_prompts
from paceline.bench.engine.arms import BenchGroup
from paceline.bench.shadow.decode import decode
from paceline.paths import bundled
from paceline.serving.loading.families import load_drafter, read_drafter_files, save_drafter
from paceline.serving.parallel_head.model import ParallelHeadConfig, ParallelHeadModel
from paceline.serving.sampling.request import SamplingParams
from tests.helpers.exported import without_edges
from tests.helpers.vllm_python import PYTHON, vllm_marks
from tests.helpers.vllm_rounds import MARK

ROUNDS = Path(__file__).resolve().parents[1] / "helpers" / "vllm_rounds.py"
pytestmark = vllm_marks(900)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1",
}  # fmt: skip
MAX_TOKENS, CONTEXT = 40, 512
NEAR_TIE = 0.125
"""Nats between the two best tokens: logits of 8 to 16 have steps of 0.0625 in bfloat16, and two of them may be off by one."""


@functools.cache
def target():
    return load_target("bundled", "bfloat16")


@functools.cache
def prompts():
    return [encode(target(), p.text) for b in ("tools", "code") for p in load_prompts(b, None, 5, 0)]


def vllm(speculation=None, **engine):
    """Answers of a fresh vLLM; speculation: its speculative_config."""
    engine = {"model": str(bundled("target")), "max_model_len": CONTEXT, "max_num_seqs": 8, **engine}
    if speculation is not None:
        engine |= {"speculative_config": speculation, "per_request_spec_decode_metrics": "detailed"}
    job = {"prompts": prompts(), "max_tokens": MAX_TOKENS, "engine": engine}
    around = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}  # of these tests' own kernels
    done = subprocess.run(
        [PYTHON, str(ROUNDS)], input=json.dumps(job), capture_output=True, text=True, env={**around, **ENVIRONMENT},
        timeout=800, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, (done.stdout + done.stderr)[-4000:]
    return json.loads(lines[-1].removeprefix(MARK))


@functools.cache
def plain():
    return vllm()


@functools.cache
def drafted(folder, method, num_draft_tokens):
    return vllm({"method": method, "model": str(folder), "num_speculative_tokens": num_draft_tokens})


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Name and format -> the folder and what the export said; each is made once."""

    @functools.cache
    def make(source, form):
        out = tmp_path_factory.mktemp("export") / form
        return out, export_drafter(ExportDrafterOptions(version=str(source), format=form, out=out))

    return make


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Name of a bundled drafter -> its folder, without what vLLM has no tensors for."""
    plain_head = without_edges("jetspec", tmp_path_factory.mktemp("drafters") / "jetspec")
    return lambda name: plain_head if name == "jetspec" else bundled(name)


def answers_of(exported, source, form="vllm"):
    folder, facts = exported(source, form)
    return drafted(folder, facts.method, facts.num_draft_tokens), facts


def first_difference(a, b):
    return next((i for i, (x, y) in enumerate(itertools.zip_longest(a, b)) if x != y), None)


def assert_plain_answers(answers):
    """Equal token for token, up to a place where the plain engine itself was near a tie."""
    equal = 0
    for one, other in zip(plain(), answers, strict=True):
        at = first_difference(one["token_ids"], other["token_ids"])
        equal += at is None
        assert at is None or one["gaps"][at] < NEAR_TIE, (at, one["gaps"][at])
    assert equal >= 0.7 * len(answers)


def length_of(answers):
    accepted = [a for answer in answers for a in answer["accepted"]]
    return 1 + sum(accepted) / len(accepted)


# The names of the toys with a floor of their acceptance length: at most half of what they reach
@pytest.mark.parametrize(
    ("name", "form", "floor"),
    [("eagle3", "vllm", 1.7), ("eagle3", "speculators", 1.7), ("dflash", "vllm", 1.7), ("jetspec", "vllm", 1.7)],
)
def test_an_exported_drafter_drafts_and_leaves_the_answers_alone(exported, folder_of, name, form, floor):
    answers, facts = answers_of(exported, folder_of(name), form)
    assert_plain_answers(answers)
    assert {d for answer in answers for d in answer["drafted"]} == {facts.num_draft_tokens}
    assert length_of(answers) > floor


def test_few_tokens_and_a_speculators_head_load_and_leave_the_answers_alone(exported, tmp_path):
    """Untrained beyond its layers, so it drafts badly; what counts is that d2t, head and mask token are taken."""
    own, state = read_drafter_files(bundled("dflash"))
    ids = torch.arange(0, own["vocab_size"], 2)
    config = ParallelHeadConfig.from_dict({**own, "draft_vocab_size": len(ids), "mask_token_id": 5})
    model = ParallelHeadModel(config)
    kept = {k: v for k, v in state.items() if k != "mask_embedding"}
    model.load_state_dict({**kept, "draft_token_ids": ids, "log_coverage": torch.zeros(())})
    save_drafter(tmp_path / "few", model, own["target_version"])
    for form in ("vllm", "speculators"):
        answers, _ = answers_of(exported, tmp_path / "few", form)
        assert_plain_answers(answers)
        assert length_of(answers) >= 1


def traces_of(texts):
    """Traces of these texts (prompt and answer), their features from this package's own forward."""
    params = tuple(SamplingParams(temperature=0.0, max_tokens=1, seed=0) for _ in texts)
    group = BenchGroup(tag="text", bucket="b", prompts=tuple(map(tuple, texts)), params=params, batch=4)
    out = []
    for prompt, text, trace in zip(prompts(), texts, decode(target(), None, group).traces, strict=True):
        out.append(
            dataclasses.replace(
                trace, prompt_len=len(prompt), token_ids=list(text), features=trace.features[: len(text) - 1],
                finish_reason="length",
            )
        )  # fmt: skip
    return out


@pytest.mark.parametrize(("name", "error", "share"), [("eagle3", 0.02, 0.8), ("dflash", 0.1, 0), ("jetspec", 0.1, 0)])
def test_the_gate_foretells_the_rounds_of_a_chain(exported, folder_of, name, error, share):
    """Replayed on vLLM's own answers; a near tie among drafted tokens may move a round here and there.

    error: of the number of rounds. share: of the requests, with as many rounds as foretold. Parallel heads draft other
    tokens at one anchor in seven in vLLM 0.32 on a CPU, in both directions, with a batch of one as with eight.
    """
    answers, facts = answers_of(exported, folder_of(name))
    tree = ShadowConfig(chain=facts.num_draft_tokens).tree
    drafter = load_drafter(folder_of(name), target(), num_candidates=1)
    traces = traces_of([p + a["token_ids"] for p, a in zip(prompts(), answers, strict=True)])
    foretold = replay_rounds(drafter, traces, fixed_rounds(*tree.values(), is_calibrated=False))
    real = [a["accepted"] for a in answers]
    trees = load_drafter(folder_of(name), target())
    wide = replay_rounds(trees, traces, fixed_rounds(*ShadowConfig().tree.values()))
    same = sum(len(a) == len(b) for a, b in zip(foretold, real, strict=True))
    num_rounds, num_foretold, num_wide = (sum(map(len, rounds)) for rounds in (real, foretold, wide))
    print(
        f"\n{name}, K={facts.num_draft_tokens}: vLLM {num_rounds} rounds, acceptance length {length_of(answers):.3f}; foretold "
        f"{num_foretold}, {same} of {len(real)} requests alike; a tree of 8 {num_wide} ({num_rounds / num_wide:.3f})"
    )
    assert same >= share * len(real), [(len(a), len(b)) for a, b in zip(foretold, real, strict=True)]
    assert num_foretold == pytest.approx(num_rounds, rel=error)
    assert num_wide < 0.97 * num_rounds, "a tree of eight promises more than a chain keeps"
