"""The queue keeps the order of ranks whoever leaves."""

import numpy as np

from paceline.serving.engine.scheduler import RequestQueue
from tests.helpers.running_requests import make_request


def test_the_smallest_rank_is_first_whoever_leaves():
    rng, queue, members = np.random.default_rng(0), RequestQueue(), []
    for i in range(3000):
        if members and rng.random() < 0.5:
            gone = members.pop(int(rng.integers(len(members))))
            queue.remove(gone)
            assert gone not in queue
            if rng.random() < 0.3:  # back again, as after a preemption
                queue.push(gone)
                members.append(gone)
        else:
            request = make_request(i, 3)
            request.rank = (float(rng.integers(5)), i)
            queue.push(request)
            members.append(request)
        assert queue.first() is (min(members, key=lambda r: r.rank) if members else None)
        assert len(queue) == len(members)
    assert list(queue) == sorted(members, key=lambda r: r.rank) and all(r in queue for r in members)
    heaps = sum(len(line.heap) for line in queue._lines.values())
    assert heaps <= 2 * len(members) + 65, "entries of requests that left are dropped"
