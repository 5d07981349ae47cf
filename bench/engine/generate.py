"""Generation of one prompt in the terminal: which tokens were drafted, and what that gained."""

from __future__ import annotations

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


def run_generate(
    prompt: str,
    *,
    model: str,
    drafter: str,
    compare: bool,
    max_tokens: int,
    temperature: float,
    seed: int,
    dtype: str,
    console: Console,
) -> None:
    """Print the answer with accepted draft tokens in green, the acceptance length and the speed; `compare` repeats it plain.

    The two sides alternate three times after a warm-up, so that the ratio is not one side's cold start.
    """
    if not prompt.strip():
        raise RequestError("prompt must not be empty")
    params = [greedy_or_sampled(temperature, max_tokens, seed)]
    target = load_target(model, dtype, drafters=[drafter])
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
