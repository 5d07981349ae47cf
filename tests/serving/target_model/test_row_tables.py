"""Row tables on the device are those of the page allocator, whatever grew, joined or left since the latest round."""

import numpy as np
import torch

from paceline.serving.target_model.graph_capture import Staging
from paceline.serving.target_model.kv_cache import PageAllocator, RowTables

PAGE, CONTEXT, LINES = 4, 40, 3


def test_tables_follow_the_allocator():
    rng, pages, staging = np.random.default_rng(0), PageAllocator(64, PAGE), Staging(torch.device("cpu"))
    tables = RowTables(
        staging, max_requests=LINES, max_context=CONTEXT, max_growth=6, page_tokens=PAGE, device=torch.device("cpu")
    )
    lengths, order, count = {}, [], 0
    for step in range(120):
        if len(order) < LINES and rng.random() < 0.3:
            order.insert(int(rng.integers(len(order) + 1)), f"r{step}")
            lengths[f"r{step}"] = int(rng.integers(1, 30))
        elif order and rng.random() < 0.1:
            gone = order.pop(int(rng.integers(len(order))))
            pages.release(gone)
        for name in order:
            lengths[name] = min(lengths[name] + int(rng.integers(0, 5)), CONTEXT)
            assert pages.ensure(name, lengths[name])
        own = [pages.rows(name, 0, -(-lengths[name] // PAGE) * PAGE) for name in order]
        if rng.random() < 0.1:
            tables.overwrite(torch.zeros(len(order), 8, dtype=torch.int64))
            assert tables.is_dirty
        tables.note(range(len(order)), own)
        staging.send()
        for _ in range(2):  # twice is as good as once
            tables.apply()
        for line, rows in enumerate(own):
            assert torch.equal(tables.lines[line, : rows.numel()], rows)
            count += 1
    assert count > 100 and not tables.is_dirty and tables.lines.max() < 64 * PAGE
