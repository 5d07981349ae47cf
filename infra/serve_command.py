"""`paceline serve`: the application in the foreground until Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import threading

from rich.console import Console

from paceline.config import ServiceConfig
from paceline.infra.app import run_service, stop_service


def serve_forever(config: ServiceConfig, console: Console) -> None:
    """Start the service, print how to reach it, and stop everything cleanly on Ctrl-C or SIGTERM.

    Raises: PacelineError when the service cannot start.
    """
    stop = threading.Event()
    previous = {s: signal.signal(s, lambda *_: stop.set()) for s in (signal.SIGINT, signal.SIGTERM)}
    service = None
    try:
        with console.status("starting Ray, Redis, the replicas and the controller (about 30 s)"):
            service = run_service(config)
        console.print(
            f"Paceline serves {config.model_name!r} at {service.url}/v1 (drafter {config.drafter}, policy "
            f"{config.policy.policy}); data in {config.data_dir}; Ctrl-C stops it",
            highlight=False,
        )
        console.print(
            f"  curl {service.url}/v1/completions -H 'content-type: application/json' "
            f'-d \'{{"model": "{config.model_name}", "prompt": "Hello", "max_tokens": 32}}\'',
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        while not stop.wait(0.5):
            pass
    finally:
        if service is not None:
            with console.status("stopping: running requests may finish"):
                stop_service(service)
        for s, handler in previous.items():
            signal.signal(s, handler)
