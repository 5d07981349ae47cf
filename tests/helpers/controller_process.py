"""A controller in a process of its own, for tests that kill it: python controller_process.py URL MODEL DIR [SECONDS]."""

import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from paceline.config import RolloutConfig  # noqa: E402
from paceline.infra.controller.host import ControllerHost  # noqa: E402
from paceline.infra.controller.store import HostConfig  # noqa: E402
from tests.helpers.scripted import MemoryRegistry, MemoryStore, ProcessLauncher, ScriptedController  # noqa: E402


def main() -> None:
    url, model, folder, seconds = sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])
    host = ControllerHost(
        HostConfig(
            redis_url=url, model=model, data_dir=folder / "data", lease_ttl_s=1.0, context_every_s=0.0, target_version="t",
            rollout=RolloutConfig(canary_percent=0),
        ),
        store=MemoryStore(),
        registry=MemoryRegistry(),
        launcher=ProcessLauncher(url, str(folder / "journal"), seconds=seconds),
        make_controller=lambda stored: ScriptedController(stored, train_every_rows=400),
    )  # fmt: skip
    host.start()
    print("started", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
