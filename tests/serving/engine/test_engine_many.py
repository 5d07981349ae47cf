"""A hundred requests at once: the target's tokens, and no round with more prompt rows than decoding leaves."""

from __future__ import annotations

import pytest

from tests.helpers.engines import VOCAB, Run, finish, greedy, make_engine
from tests.helpers.scripted_drafters import RandomDrafter

CHUNK, LEAST = 48, 8
PROMPTS = [tuple(3 + (5 * i + k * k) % 60 for k in range(4 + 3 * i)) for i in range(8)]


@pytest.mark.parametrize("packs_prompts", [False, True])
def test_a_hundred_requests_share_rounds_of_bounded_rows(packs_prompts):
    engine = make_engine(
        RandomDrafter(VOCAB), num_pages=1000, max_running=80, max_waiting=200, prefill_chunk_tokens=CHUNK,
        min_prefill_tokens=LEAST, packs_prompts=packs_prompts,
    )  # fmt: skip
    runs = [Run(engine, f"r{i}", PROMPTS[i % 8], max_tokens=10, priority=i % 3) for i in range(100)]
    most = shrunk = 0
    while True:
        before, is_decoding = engine.stats()["num_prefill_rows"], engine.scheduler.num_running > 0
        tree_rows = engine._decode.num_rows if is_decoding else 0
        if not engine.step():
            break
        num_rows = engine.stats()["num_prefill_rows"] - before
        assert num_rows <= max(LEAST, CHUNK - tree_rows)
        shrunk += 0 < num_rows <= LEAST and tree_rows > CHUNK
        most = max(most, engine.scheduler.num_running)
    engine.check_integrity()
    assert all(r.tokens == greedy(PROMPTS[i % 8], 10) for i, r in enumerate(runs))
    assert most > 20 and shrunk > 3, (most, shrunk)
    assert finish(engine) == 0
