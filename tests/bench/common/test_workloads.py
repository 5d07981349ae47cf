"""Bundled prompts."""

import pytest

from paceline.bench.common.workloads import BUNDLED_BUCKETS, bundled_prompts, load_prompts
from paceline.errors import ConfigError


@pytest.mark.parametrize("bucket", BUNDLED_BUCKETS)
def test_every_bucket_has_at_least_40_distinct_prompts(bucket):
    prompts = bundled_prompts(bucket)
    assert len({p.text for p in prompts}) >= 40
    assert {p.bucket for p in prompts} == {bucket}


def test_order_is_seeded_and_repeats_only_when_the_list_is_used_up():
    first = load_prompts("math", None, 240, seed=3)
    assert [p.prompt_id for p in first] == [p.prompt_id for p in load_prompts("math", None, 240, seed=3)]
    assert len({p.prompt_id for p in first}) == 240
    assert [p.prompt_id for p in first] != [p.prompt_id for p in load_prompts("math", None, 240, seed=4)]


def test_unknown_bucket_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="tools, code, math, facts"):
        bundled_prompts("poems")
