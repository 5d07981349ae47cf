"""Generation of one prompt in the terminal: which tokens were drafted, and what that gained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from typing import Annotated as A

from rich.console import Console
from rich.text import Text

from paceline.config import EngineConfig
from paceline.contracts import Group
from paceline.errors import RequestError
from paceline.paths import default_drafter, resolve_model
from paceline.records import DRAFTERS, DTYPES, Model, Setting, record
from paceline.serving.sampling.request import SamplingParams
from paceline.serving.sampling.text_stream import TextStream, TokenText

if TYPE_CHECKING:
    from paceline.bench.engine.arms import GroupTiming


@record()
class GenerateOptions:
    """Accepted draft tokens are green.

    Examples: paceline generate "def fibonacci(n):" --compare. paceline generate "Hello, who are you?" --model smollm2.
    """

    prompt: A[str, Setting("Text; without chat markers it is sent as a user's turn.", is_argument=True)]
    model: Model = "bundled"
    drafter: A[str | None, Setting(f"none | {DRAFTERS}; default: bundled, or what `paceline serve` takes.")] = None
    is_comparing: A[bool, Setting("Run without the drafter too and print the ratio.", flag="compare")] = False
    max_tokens: A[int, Setting("New tokens at most.", ge=1)] = 128
    temperature: A[float, Setting("0 = greedy.", ge=0)] = 0.0
    seed: A[int, Setting("Seed of sampling.", ge=0)] = 0
    dtype: A[str, Setting("auto | float32 | bfloat16 | float16 | int8 (CPU only).", choices=DTYPES)] = "auto"


def run_generate(options: GenerateOptions, console: Console) -> None:
    """Print the answer with accepted draft tokens in green, the acceptance length and the speed; a comparison repeats it.

    The two sides alternate three times after a warm-up, so that the ratio is not one side's cold start.
    """
    prompt, drafter, compare = options.prompt, options.drafter or default_drafter(options.model), options.is_comparing
    if not prompt.strip():
        raise RequestError("prompt must not be empty")
    resolve_model(options.model)
    # torch takes seconds, which nobody should wait for who mistyped an option
    from paceline.bench.common.engine_run import build_engine, encode, load_named_drafter, load_target
    from paceline.bench.common.recorders import RoundRecorder
    from paceline.bench.engine.arms import BenchGroup, EngineArm

    params = (SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed),)
    target = load_target(options.model, options.dtype, drafters=[drafter])
    text = prompt
    if target.tokenizer.chat_template and "<|" not in prompt:
        text = target.tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)  # fmt: skip
    ids = encode(target, text)
    if not ids:
        raise RequestError("prompt must not be empty")
    engine = build_engine(target, load_named_drafter(drafter, target), EngineConfig(prefix_caching=False), drafter)
    engine.output.feedback = recorder = RoundRecorder()
    order = [Group.ADAPTIVE, Group.PLAIN] if compare else [Group.ADAPTIVE]
    runs: dict[Group, list[GroupTiming]] = {g: [] for g in order}
    for i in range(4 if compare else 1):
        for g in order:
            group = BenchGroup(
                tag=str(i), bucket="default", prompts=(tuple(ids),), params=params, batch=1, tenant=str(i)
            )
            run = EngineArm(g.value, engine, g, recorder=recorder).run(group)
            if i > 0 or not compare:
                runs[g].append(run)
    first = runs[Group.ADAPTIVE][-1]
    (token_ids,), (rounds,), (last,) = first.token_ids, first.rounds, first.last
    accepted = [False, *(i < r.num_accepted_tokens for r in rounds for i in range(r.num_emitted_tokens))]
    console.print(marked_text(target.tokenizer, ids, token_ids, accepted))
    stats = last.stats
    accepted_note = " (green: accepted draft tokens)" if console.color_system else ""
    console.print(
        f"\n{len(token_ids)} tokens in {stats.num_rounds} rounds{accepted_note}, acceptance length "
        f"{stats.acceptance_length:.2f}, finished by {last.finish_reason}",
        highlight=False,
    )
    for g in order:
        rate = sum(r.num_tokens for r in runs[g]) / sum(r.seconds for r in runs[g])
        console.print(f"{drafter if g == Group.ADAPTIVE else 'plain'}: {rate:.0f} tokens/s", highlight=False)
    if compare:
        a, b = (sum(r.num_tokens for r in runs[g]) / sum(r.seconds for r in runs[g]) for g in order)
        same = first.token_ids == runs[Group.PLAIN][-1].token_ids
        console.print(f"ratio {a / b:.2f}; the two texts are {'identical' if same else 'different (rounding: near ties)'}", highlight=False)  # fmt: skip


def marked_text(
    tokenizer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], is_accepted: Sequence[bool]
) -> Text:
    """The answer with accepted draft tokens in green; a character of several tokens is as its last one is."""
    stream = TextStream(TokenText(tokenizer), prompt_token_ids=prompt_ids, skip_special=False)
    stream.push(token_ids)
    stream.finish()
    marked = Text()
    for (begin, end), accepted in zip(pairwise([*stream.starts, len(stream.text)]), is_accepted, strict=True):
        marked.append(stream.text[begin:end], style="bold green" if accepted else "")
    return marked
