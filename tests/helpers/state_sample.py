"""Write the stored state of a controller of this release as JSON: python state_sample.py OUT.

Run on a checkout of a release before its state format changes; the test of the migration then starts from the file.
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from paceline.infra.state.desired import ensure_first_version  # noqa: E402
from paceline.infra.state.redis_clients import Keys, patient_client  # noqa: E402
from paceline.infra.state.redis_server import EmbeddedRedis  # noqa: E402
from paceline.machine import ManualClock  # noqa: E402
from tests.helpers.hosts import make_host, send, settle  # noqa: E402

NUM_BATCHES = 12


def main() -> None:
    keys, clock = Keys("sample"), ManualClock(1_000_000.0)
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(folder) as server:
        client = patient_client(server.url)
        ensure_first_version(client, keys, "v1", 10, 1.0)
        host = make_host(server.url, keys, Path(folder), make=None, clock=clock)
        host.connect()
        for seq in range(1, NUM_BATCHES + 1):
            send(client, keys, seq)
            clock.advance(4.0)
            settle(host)
        host.session.orders.pin("v2")
        host.session.orders.set_policy("never")
        settle(host)
        host.stop()
        snapshot = host.snapshot()
        (file,) = (Path(folder) / "data").glob("controller*.msgpack")
        sample = {
            "state": {name.decode(): data.hex() for name, data in client.hgetall(keys.state).items()},
            "decisions": {name.decode(): data.hex() for name, data in client.hgetall(keys.decisions).items()},
            "file": file.read_bytes().hex(),
            "expected": {
                "num_rows": host.session.state.num_rows, "num_duplicates": host.session.state.num_duplicates,
                "last_seq": NUM_BATCHES, "spent_s": snapshot.ledger.spent_s, "saved_s": snapshot.ledger.saved_s,
                "decision_ids": [d.decision_id for d in snapshot.decisions], "history": snapshot.history,
                "policy": snapshot.policy,
            },
        }  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(sample, indent=0) + "\n")


if __name__ == "__main__":
    main()
