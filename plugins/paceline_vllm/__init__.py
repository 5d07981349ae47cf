"""vLLM as an engine of Paceline; see docs/api/vllm.md."""
