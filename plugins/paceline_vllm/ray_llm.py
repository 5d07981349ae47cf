"""Ray Serve LLM: replicas that have the agent, by `server_cls: paceline_vllm.ray_llm:PacelineServer` of an LLMConfig.

Ray makes no HTTP application of a replica unless it streams directly, and endpoint plugins are started by that alone.
"""

from __future__ import annotations

from argparse import Namespace

from ray.serve.llm.deployment import LLMServer

from paceline_vllm.endpoint import PacelineEndpoint


class PacelineServer(LLMServer):
    """LLMServer whose replicas follow the service and tell it their rounds."""

    async def start(self) -> None:
        await super().start()
        client = self.engine._engine_client  # type: ignore[union-attr]  # vLLM's, which `start` has made
        await PacelineEndpoint().init_state(client, None, Namespace())
