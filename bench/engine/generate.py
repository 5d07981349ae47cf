"""Generation of one prompt in the terminal: which tokens were drafted, and what that gained."""

from __future__ import annotations

from typing import Annotated as A

from rich.console import Console
from rich.text import Text

from paceline.bench.common.engine_run import (  # fmt: skip
    GroupRun,
    build_engine,
    encode,
    greedy_or_sampled,
    load_named_drafter,
    load_target,
    run_group,
)
from paceline.config import EngineConfig
from paceline.contracts import Group
from paceline.errors import RequestError
from paceline.records import DTYPES, Drafter, Model, Setting, record


@record()
class GenerateOptions:
    """Accepted draft tokens are green.

    Example: paceline generate "def fibonacci(n):" --compare.
    """

    prompt: A[str, Setting("Text; without chat markers it is sent as a user's turn.", is_argument=True)]
    model: Model = "bundled"
    drafter: Drafter = "bundled"
    is_comparing: A[bool, Setting("Run without the drafter too and print the ratio.", flag="compare")] = False
    max_tokens: A[int, Setting("New tokens at most.", ge=1)] = 128
    temperature: A[float, Setting("0 = greedy.", ge=0)] = 0.0
    seed: A[int, Setting("Seed of sampling.", ge=0)] = 0
    dtype: A[str, Setting("auto | float32 | bfloat16 | float16.", choices=DTYPES)] = "auto"


def run_generate(options: GenerateOptions, console: Console) -> None:
    """Print the answer with accepted draft tokens in green, the acceptance length and the speed; a comparison repeats it.

    The two sides alternate three times after a warm-up, so that the ratio is not one side's cold start.
    """
    prompt, drafter, compare = options.prompt, options.drafter, options.is_comparing
    if not prompt.strip():
        raise RequestError("prompt must not be empty")
    params = [greedy_or_sampled(options.temperature, options.max_tokens, options.seed)]
    target = load_target(options.model, options.dtype, drafters=[drafter])
    text = prompt
    if target.tokenizer.chat_template and "<|" not in prompt:
        text = target.tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)  # fmt: skip
    ids = encode(target, text)
    if not ids:
        raise RequestError("prompt must not be empty")
    engine = build_engine(target, load_named_drafter(drafter, target), EngineConfig(prefix_caching=False), drafter)
    order = [Group.ADAPTIVE, Group.PLAIN] if compare else [Group.ADAPTIVE]
    runs: dict[Group, list[GroupRun]] = {g: [] for g in order}
    for i in range(4 if compare else 1):
        for g in order:
            run = run_group(engine, [ids], params, group=g, bucket="default", tag=f"{g.value}-{i}")
            if i > 0 or not compare:
                runs[g].append(run)
    first = runs[Group.ADAPTIVE][-1].outputs[0]
    answer = Text()
    for token, accepted in zip(first.token_ids, first.accepted, strict=True):
        answer.append(target.tokenizer.decode([token]), style="bold green" if accepted else "")
    console.print(answer)
    stats = first.stats
    console.print(
        f"\n{len(first.token_ids)} tokens in {stats.num_rounds} rounds (green: accepted draft tokens), acceptance length "
        f"{stats.acceptance_length:.2f}, finished by {first.finish_reason}",
        highlight=False,
    )
    for g in order:
        rate = sum(r.num_tokens for r in runs[g]) / sum(r.seconds for r in runs[g])
        console.print(f"{drafter if g == Group.ADAPTIVE else 'plain'}: {rate:.0f} tokens/s", highlight=False)
    if compare:
        a, b = (sum(r.num_tokens for r in runs[g]) / sum(r.seconds for r in runs[g]) for g in order)
        same = first.token_ids == runs[Group.PLAIN][-1].outputs[0].token_ids
        console.print(f"ratio {a / b:.2f}; the two texts are {'identical' if same else 'different (rounding: near ties)'}", highlight=False)  # fmt: skip
