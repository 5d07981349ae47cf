"""`paceline serve`: the application in the foreground until Ctrl-C or SIGTERM."""

from __future__ import annotations

from rich.console import Console

from paceline.config import ServiceConfig
from paceline.infra.app import run_service, stop_service
from paceline.infra.service.stop_signals import StopSignals
from paceline.infra.web.access import Access


def dashboard_words(url: str, access: Access) -> str:
    """Where the dashboard is and who may use it, or why nobody may."""
    if (reason := access.closed()) is not None:
        return f"dashboard {reason}"
    if access.admin_token is not None:
        return f"dashboard {url}/dashboard (with controls)"
    who = "this computer only" if access.api_token is None else "with the API token"
    return f"dashboard {url}/dashboard (read-only, {who}: --admin-token adds controls)"


def serve_forever(config: ServiceConfig, console: Console) -> None:
    """Start the service, print how to reach it, and stop everything cleanly on Ctrl-C or SIGTERM.

    Raises: PacelineError when the service cannot start.
    """
    service = None
    with StopSignals() as signals:
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
            console.print(
                f"  {dashboard_words(service.url, Access.of(service.config))}", highlight=False, soft_wrap=True
            )
            while not signals.stop.wait(0.5):
                pass
        finally:
            if service is not None:
                with console.status("stopping: running requests may finish"):
                    stop_service(service)
