"""Server of vLLM: a vLLM of another Python environment as a child process, with the plugin of `plugins/paceline_vllm`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from paceline.errors import ConfigError, PacelineError
from paceline.machine import free_port

_ENVIRONMENT = {
    "VLLM_PLUGINS": "paceline", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


class VllmServer:
    """One `vllm serve`, killed with all of its processes at the end."""

    def __init__(
        self, python: str | Path, *, target: Path, drafter: Path, method: str, num_draft_tokens: int,
        settings: Mapping[str, Any], log: Path, arguments: tuple[str, ...] = (), port: int | None = None,
    ) -> None:  # fmt: skip
        """Start it; `wait` says when it answers.

        Args:
            python: interpreter of the environment that has vLLM and the plugin.
            drafter, method: a folder of `paceline export-drafter --format vllm`, and what vLLM calls it.
            settings: of the plugin (plugins/paceline_vllm/settings.py).
            log: file that takes what it prints.
        """
        if not os.access(python, os.X_OK):
            raise ConfigError(f"vllm_python must be the interpreter of an environment with vLLM, got {python}")
        self.port = port or free_port()
        self.url, self._log = f"http://127.0.0.1:{self.port}", log
        speculation = {"method": method, "model": str(drafter), "num_speculative_tokens": num_draft_tokens}
        command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", "bfloat16", "--enforce-eager",
            "--speculative-config", json.dumps(speculation), "--weight-transfer-config", '{"backend": "paceline"}',
            "--scheduler-cls", "paceline_vllm.scheduler.PacelineScheduler",
            "--additional-config", json.dumps({"paceline": dict(settings)}), *arguments,
        ]  # fmt: skip
        around = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=file, env={**around, **_ENVIRONMENT}, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float = 300.0) -> VllmServer:
        """Return when it answers. Raises: PacelineError, with the end of its log, when it ended or took too long."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive() and time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        self.stop()
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise PacelineError(f"vLLM did not start within {timeout_s:g} s; its log ends with\n{tail}")

    def stop(self, timeout_s: float = 15.0) -> None:
        """End it, by force after a while; its engine's processes are in its session."""
        if self.is_alive():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout_s)
