"""Claims of bench/engine/arms.py."""

import pytest

from paceline.bench.common.lossless import greedy_tokens
from paceline.bench.engine.arms import (
    EngineArm,
    GroupTiming,
    TransformersArm,
    make_groups,
    new_engine,
    run_alternating,
)
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.serving.drafters.text import make_text_drafter
from tests.helpers.fakes import tiny_model, tiny_target


class Recorder:
    def __init__(self, name, log):
        self.name, self._log = name, log

    def supports(self, batch):
        return True

    def run(self, group):
        self._log.append((group.tag, self.name))
        return GroupTiming(token_ids=((1,),), seconds=1.0, ttft_s=(0.1,))


def groups(count, **changed):
    options = {"bucket": "b", "batch": 2, "group_size": 2, "temperature": 0.5, "max_tokens": 8, "seed": 7}
    return make_groups([(i,) for i in range(count)], **{**options, **changed})


def test_every_arm_runs_every_group_and_another_one_begins_each_time():
    log, told = [], []
    arms = [Recorder(n, log) for n in "abc"]
    timings = run_alternating(arms, groups(8), num_warmup=1, on_group=lambda: told.append(1))
    assert ["".join(n for tag, n in log if tag.endswith(f"-{i}")) for i in range(4)] == ["abc", "bca", "cab", "abc"]
    assert {n: len(t) for n, t in timings.items()} == {"a": 3, "b": 3, "c": 3} and len(told) == 4


def test_requests_draw_with_seeds_of_their_own_and_a_rest_is_left_out():
    got = groups(5)
    assert [g.prompts for g in got] == [((0,), (1,)), ((2,), (3,))]
    assert [p.seed for g in got for p in g.params] == [7, 8, 9, 10]
    assert len({g.tag for g in [*got, *groups(5, label="w")]}) == 4


def test_no_cell_drafts_from_the_answers_of_another():
    """Cells run the same prompts: a drafter that remembers answers would know them by heart from the second one on."""
    target = tiny_target(vocab=64, layers=2, width=16, context=128)
    tree = TreeConfig(policy="fixed", max_draft_tokens=4)
    config = EngineConfig(max_running=1, page_tokens=8, prefix_caching=False, tree=tree)
    engine = new_engine(target, make_text_drafter("suffix-recent"), version="s", num_tokens=512, config=config)
    arm = EngineArm("s", engine, Group.ADAPTIVE)
    alike = {"batch": 1, "group_size": 1, "temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
    first, again = ([arm.run(g) for g in groups(2, bucket=bucket, **alike)] for bucket in "ab")
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    assert [r.num_accepted_tokens for r in first] == [r.num_accepted_tokens for r in again]


@pytest.mark.parametrize("lookup", [False, True])
def test_a_penalty_of_the_checkpoint_does_not_change_what_transformers_decodes(lookup):
    model = tiny_model("llama", vocab=64, layers=2, width=16).eval()
    model.generation_config.repetition_penalty = 3.0
    alone = {"bucket": "b", "batch": 1, "group_size": 1, "temperature": 0.0, "max_tokens": 24, "seed": 0}
    (group,) = make_groups([(5, 9, 7)], ignore_eos=True, **alone)
    (text,) = TransformersArm("transformers", model, 0, lookup=lookup).run(group).token_ids
    assert list(text) == greedy_tokens(model, group.prompts[0], 24)
