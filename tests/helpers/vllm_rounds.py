"""vLLM asked for answers: a job as JSON on stdin, answers and rounds as JSON behind the last line of stdout.

Run by the Python of an environment with vLLM, in which Paceline's own dependencies are not: it imports nothing of it.
"""

import json
import sys

MARK = "ROUNDS "


def main() -> None:
    """Job: {"prompts": [[token id]], "max_tokens", "engine": arguments of vllm.LLM}; greedy, with two logprobs a token."""
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    engine = LLM(dtype="bfloat16", enforce_eager=True, enable_prefix_caching=False, **job["engine"])
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], logprobs=2)
    answers = []
    for out in engine.generate([{"prompt_token_ids": p} for p in job["prompts"]], params, use_tqdm=False):
        (answer,) = out.outputs
        best = [sorted((p.logprob for p in step.values()), reverse=True) for step in answer.logprobs]
        rounds = answer.spec_decode_metrics
        answers.append(
            {
                "token_ids": list(answer.token_ids), "gaps": [b[0] - b[1] for b in best],
                "accepted": None if rounds is None else rounds.per_step_accepted,
                "drafted": None if rounds is None else rounds.per_step_drafted,
            }
        )  # fmt: skip
    print("\n" + MARK + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
