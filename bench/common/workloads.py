"""Prompts of benchmarks and demos: those bundled with the package, or those of a data folder.

Formats of a data folder are told by the keys of a file's first line: Spec-Bench and SPEED-Bench questions, HumanEval, GSM8K's
test split, dialogues with user and system turns, lines with `prompt` or `messages`, and books (.md, .txt), of which the last
tenth is used. Training text of the project's own recipes (GSM8K's train split, puzzles) is passed over; of Taskmaster and the
factbook only held-out documents count.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

BUNDLED_BUCKETS = ("tools", "code", "math", "facts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt of a traffic class."""

    prompt_id: str
    bucket: str
    text: str


def bundled_prompts(bucket: str) -> list[Prompt]:
    """Return the prompts of one bucket that ship with the package; raises ConfigError on an unknown bucket."""
    if bucket not in BUNDLED_BUCKETS:
        raise ConfigError(f"bucket must be one of {', '.join(BUNDLED_BUCKETS)}, got {bucket!r}")
    text = (files("paceline") / "prompts" / f"{bucket}.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines() if line]
    return [Prompt(prompt_id=r["id"], bucket=r["bucket"], text=r["prompt"]) for r in rows]


def data_prompts(bucket: str, data: Path | None) -> list[Prompt]:
    """Return held-out prompts of one domain of a data folder: each document up to its first answer; None: as corpus.documents."""
    from paceline.adapt.data import corpus

    prompts = []
    for i, doc in enumerate(corpus.documents(bucket, data, "held_out")):
        cut = doc.find(corpus.ASSISTANT)
        call = doc.find(corpus.CALL)
        ends = [e for e in (cut + len(corpus.ASSISTANT) if cut > 0 else -1, call) if e > 0]
        if ends:
            prompts.append(Prompt(prompt_id=f"{bucket}-data-{i}", bucket=bucket, text=doc[: min(ends)]))
    return prompts


def prompt_pool(bucket: str, data: Path | None) -> list[Prompt]:
    """The different prompts of a bucket.

    Without a folder: the bundled ones, and of `chat` those that the project itself writes. Raises: ConfigError without any.
    """
    found = bundled_prompts(bucket) if data is None and bucket != "chat" else data_prompts(bucket, data)
    if not found:
        raise ConfigError(f"bucket {bucket!r} has no prompts in {data}")
    return list({p.text: p for p in found}.values())


def load_prompts(bucket: str, data: Path | None, count: int, seed: int = 0) -> list[Prompt]:
    """Return `count` prompts of `prompt_pool` in seeded random order, repeating the list only when it is too short."""
    pool, rng = prompt_pool(bucket, data), random.Random(f"{seed}-{bucket}")
    out: list[Prompt] = []
    while len(out) < count:
        out += rng.sample(pool, len(pool))
    return out[:count]


def has_template(tokenizer: Any) -> bool:
    """Whether a model is asked through a chat template, which writes the special tokens itself."""
    return bool(getattr(tokenizer, "chat_template", None))


def asked_text(prompt: str, tokenizer: Any) -> str:
    """A prompt as a model is asked: the model's chat template stands for turn marks that its tokenizer does not know."""
    from paceline.adapt.data import corpus
    from paceline.adapt.data.regenerate import has_marks

    if not has_template(tokenizer) or has_marks(tokenizer):
        return prompt
    turns, given = corpus.messages(prompt), ""
    if turns[-1]["role"] == "assistant":
        given = turns.pop()["content"]  # the beginning of the answer, if there is one
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) + given


HELD_OUT = {"tools": "dialogue/taskmaster4/dialogs.jsonl", "facts": "facts/factbook/sections.jsonl"}
"""Domains whose documents the bundled weights were trained on, except the held-out ones."""
_BOOK_SHARE = 0.1
_PASSAGE_CHARS = (400, 1200)
_NOT_BOOKS = ("notice", "license", "licence", "readme", "index", "provenance")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One prompt of a category, as SPEED-Bench's files have them."""

    question_id: str
    category: str
    turns: tuple[str, ...]
    """User turns, asked one after the other."""
    source: str
    """File below the data folder; 'bundled' for the package's own."""
    messages: tuple[tuple[str, str], ...] = ()
    """(role, text) of a conversation to go on with, instead of the turns."""
    is_completion: bool = False
    """The text goes to the model as it is, without its chat template."""


def question_text(question: Question, tokenizer: Any) -> str:
    """A question as a model is asked: through its chat template, except a text to complete that has no marks of turns."""
    from paceline.adapt.data import corpus

    if question.is_completion:
        return asked_text(question.turns[0], tokenizer) if corpus.USER in question.turns[0] else question.turns[0]
    messages = question.messages or (("user", question.turns[0]),)
    if not has_template(tokenizer):
        return "".join(f"{role}: {text}\n" for role, text in messages) + "assistant:"
    chat = [{"role": role, "content": text} for role, text in messages]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def bundled_questions(bucket: str) -> list[Question]:
    """The package's own prompts of one bucket; raises ConfigError on an unknown one."""
    return [
        Question(question_id=p.prompt_id, category=bucket, turns=(p.text,), source="bundled", is_completion=True)
        for p in bundled_prompts(bucket)
    ]


def read_questions(data: Path | None) -> dict[str, list[Question]]:
    """All prompts by category, in the order of files and lines; the bundled ones without a folder.

    Raises: ConfigError when the folder holds no file of a known format, or one breaks its format.
    """
    if data is None:
        return {b: bundled_questions(b) for b in BUNDLED_BUCKETS}
    out: dict[str, list[Question]] = {}
    num_others = 0
    for path in sorted(p for p in data.rglob("*") if p.is_file()):
        if path.suffix == ".jsonl":
            found = list(_read_lines(path, str(path.relative_to(data))))
        elif path.suffix in (".md", ".txt") and not path.stem.lower().startswith(_NOT_BOOKS):
            found = list(_read_book(path, str(path.relative_to(data))))
        else:
            found = []
        num_others += not found
        for question in found:
            out.setdefault(question.category, []).append(question)
    for domain, name in HELD_OUT.items():
        if (data / name).is_file():
            out[domain] = [
                Question(question_id=p.prompt_id, category=domain, turns=(p.text,), source=name, is_completion=True)
                for p in data_prompts(domain, data)
            ]
    out = {category: questions for category, questions in out.items() if questions}
    if not out:
        raise ConfigError(
            f"data must hold prompts in a known format (lines with question_id, category, turns | task_id, prompt | "
            f"question, answer | turns of U and S | prompt | text | messages; books as .md or .txt), got none in {str(data)!r}, "
            f"which has {num_others} other files"
        )
    return out


# ---- formats: (keys of a line, reader of a line); the first that fits counts ------------------------------------------
def _text(value: Any, name: str) -> str:
    """A text of whole characters. Raises: ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text")
    value.encode()  # refuses half a surrogate pair
    return value


def _content(value: Any) -> str:
    """The text of a message: of its parts, '' of one that only calls functions. Raises: ValueError."""
    if isinstance(value, list):
        return "".join(_text(part["text"], "a part of content") for part in value)
    return "" if value is None else _text(value, "content")


def _spec_bench(row: Mapping[str, Any], source: str, at: int) -> Question:
    turns = tuple(_text(turn, "each of turns") for turn in row["turns"])
    if not turns:
        raise ValueError("turns must be texts, at least one")
    return Question(question_id=str(row["question_id"]), category=str(row["category"]), turns=turns, source=source)


def _humaneval(row: Mapping[str, Any], source: str, at: int) -> Question:
    return Question(
        question_id=str(row["task_id"]), category="humaneval", turns=(_text(row["prompt"], "prompt"),), source=source,
        is_completion=True,
    )  # fmt: skip


def _gsm8k(row: Mapping[str, Any], source: str, at: int) -> Question:
    return Question(question_id=f"gsm8k-{at}", category="gsm8k", turns=(_text(row["question"], "question"),), source=source)  # fmt: skip


def _dialogue(row: Mapping[str, Any], source: str, at: int) -> Question | None:
    """The conversation up to the user turn in its middle."""
    if any(who not in ("U", "S") for who, _ in row["turns"]):
        raise ValueError("turns must be pairs of U or S and a text")
    users = [i for i, (who, _) in enumerate(row["turns"]) if who == "U"]
    if not users:
        return None
    own = row["turns"][: users[len(users) // 2] + 1]
    messages = tuple(("user" if who == "U" else "assistant", _text(text, "text")) for who, text in own)
    turns = tuple(text for role, text in messages if role == "user")
    return Question(question_id=str(row["id"]), category="dialogue", turns=turns, source=source, messages=messages)


def _messages(row: Mapping[str, Any], source: str, at: int) -> Question | None:
    """The conversation up to its last user message."""
    pairs = [(str(m["role"]), _content(m.get("content"))) for m in row["messages"]]
    while pairs and pairs[-1][0] != "user":
        pairs.pop()
    if not pairs:
        return None
    turns = tuple(text for role, text in pairs if role == "user")
    name = f"{Path(source).stem}-{at}"
    return Question(
        question_id=name, category=_category(row, source), turns=turns, source=source, messages=tuple(pairs)
    )


def _prompt(row: Mapping[str, Any], source: str, at: int, key: str = "prompt") -> Question:
    name = str(row.get("id", f"{Path(source).stem}-{at}"))
    turns = (_text(row[key], key),)
    return Question(question_id=name, category=_category(row, source), turns=turns, source=source)


def _category(row: Mapping[str, Any], source: str) -> str:
    return str(row.get("category") or row.get("bucket") or Path(source).stem)


_FORMATS: tuple[tuple[frozenset[str], Callable[[Mapping[str, Any], str, int], Question | None]], ...] = (
    (frozenset({"question_id", "category", "turns"}), _spec_bench),
    (frozenset({"task_id", "prompt"}), _humaneval),
    (frozenset({"question", "answer"}), _gsm8k),
    (frozenset({"id", "turns"}), _dialogue),
    (frozenset({"messages"}), _messages),
    (frozenset({"prompt"}), _prompt),
    (frozenset({"text"}), functools.partial(_prompt, key="text")),
)


def _read_lines(path: Path, source: str) -> Iterator[Question]:
    read: Callable[[Mapping[str, Any], str, int], Question | None] | None = None
    with path.open("rb") as file:
        for at, line in enumerate(file):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
                if not isinstance(row, dict):
                    raise ValueError("a line must be a JSON object")
                if read is None:
                    read = next((r for keys, r in _FORMATS if keys <= row.keys()), None)
                    if read is None or (read is _gsm8k and "train" in path.stem):
                        return
                question = read(row, source, at)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
                raise ConfigError(f"{path} line {at + 1} must have the format of the first line: {e}") from e
            if question is not None:
                yield question


def _read_book(path: Path, source: str) -> Iterator[Question]:
    """Passages of the last tenth to go on with, between 400 and 1200 characters, cut at paragraphs where it can be."""
    text = path.read_text(encoding="utf-8", errors="replace")
    least, most = _PASSAGE_CHARS
    passage, count = "", 0
    for paragraph in text[int(len(text) * (1 - _BOOK_SHARE)) :].split("\n\n")[1:]:  # the first one begins half-way
        passage += paragraph.strip() + "\n\n"
        if len(passage) >= least:
            cut = passage[:most].rsplit(" ", 1)[0] if len(passage) > most else passage.rstrip()
            yield Question(
                question_id=f"{path.stem}-{count}", category="books", turns=(cut,), source=source, is_completion=True
            )
            passage, count = "", count + 1
