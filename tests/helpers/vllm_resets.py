"""vLLM that is to empty its prefix cache at each switch: switched under a request and without one, what later ones begin with.

Run by the Python of an environment with vLLM and the plugin: target, drafter's folder and data folder as arguments, JSON behind
the last line of stdout.
"""

import hashlib
import json
import sys
from pathlib import Path

MARK = "RESETS "


def main() -> None:
    from paceline_vllm.install import install
    from vllm import LLM, SamplingParams

    target, drafter, folder = sys.argv[1:]
    install()
    engine = LLM(
        model=target, dtype="bfloat16", enforce_eager=True, enable_prefix_caching=True, max_model_len=512, max_num_seqs=8,
        scheduler_cls="paceline_vllm.scheduler.PacelineScheduler", weight_transfer_config={"backend": "paceline"},
        speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": 5},
        additional_config={
            "paceline": {"redis_url": "redis://127.0.0.1:1", "data_dir": folder, "stale_prefix": "reset", "trace_share": 0.0}
        },
    ).llm_engine  # fmt: skip
    core, seen = engine.engine_core.engine_core, []
    file = Path(drafter) / "model.safetensors"
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()

    def begin(request_id: str) -> None:
        prompt = {"prompt_token_ids": [100 + i % 50 for i in range(400)]}
        engine.add_request(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        engine.step()

    def look() -> None:
        log = core.scheduler.paceline
        seen.append((log.num_stale, sorted(log.open(r).group for r in core.scheduler.requests.values())))

    core.paceline_publish(str(file), sha256, "first", "adaptive")
    begin("early")
    core.paceline_publish(str(file), sha256, "second", "adaptive")
    begin("behind it")
    look()
    while engine.has_unfinished_requests():
        engine.step()
    core.paceline_publish(str(file), sha256, "third", "adaptive")
    begin("idle")
    look()
    print("\n" + MARK + json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
