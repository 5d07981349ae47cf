"""Training documents per domain: reads a data folder, formats chat documents, splits train and held-out by hash."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.adapt.data.chat_templates import generate_questions
from paceline.adapt.data.code_templates import generate_code_document
from paceline.errors import ConfigError

USER, ASSISTANT, CALL, RESULT, SYSTEM, END, PAD = (
    "<|user|>", "<|assistant|>", "<|call|>", "<|result|>", "<|system|>", "<|end|>", "<|pad|>",
)  # fmt: skip
SPECIAL_TOKENS = (PAD, END, SYSTEM, USER, ASSISTANT, CALL, RESULT)
DOMAINS = ("tools", "code", "math", "facts")
PROMPT_DOMAINS = ("chat", "prose")
"""Questions without answers: for targets that answer them themselves."""
_LICENCES = {
    "tools": "Taskmaster-4 (TM-4-2024) by Bill Byrne and Saravanan Ganesh, Google LLC, CC BY 4.0; reformatted as turns",
    "code": "templates written by this project (Apache-2.0)",
    "math": "GSM8K train split, MIT (c) OpenAI; calculator marks removed",
    "chat": "questions written by this project (Apache-2.0)",
    "prose": "novels in the public domain, all but the last 10% of each",
    "facts": "World Factbook, US Government work, public domain / CC0; fields shortened",
}
_PUZZLES = "Python Programming Puzzles, MIT (c) Microsoft, without its human_eval module"
_HELD_OUT_PERCENT = 3
_TURN = re.compile("(" + "|".join(map(re.escape, (SYSTEM, USER, ASSISTANT, CALL, RESULT))) + ")")
_ROLES = {SYSTEM: "system", USER: "user", ASSISTANT: "assistant", CALL: "assistant", RESULT: "user"}
_MAX_FIELD_CHARS = 320
_NUM_CHATS = 12_000
_PROSE_CHARS = 700
_PROSE_REQUESTS = (
    "Continue this text:", "Summarise this text:", "What happens here?", "Rewrite this in simple words:", "Who speaks here, and about what?",
    "List the main points of this text:",
)  # fmt: skip


def _read_jsonl(path: Path, documents: Callable[[Any], Iterator[str]]) -> Iterator[str]:
    """The documents that the rows of a file make. Raises: ConfigError when there is no file, or one of its lines makes none."""
    if not path.is_file():
        raise ConfigError(f"data file {path} must exist; pass --data with the folder that holds it")
    with path.open("rb") as f:
        for number, line in enumerate(f, 1):
            with _described(f"{path}:{number}"):
                found = list(documents(json.loads(line))) if line.strip() else []
            yield from found


@contextmanager
def _described(place: str) -> Iterator[None]:
    """What goes wrong in the block is what lies at a place of the data."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as e:
        raise ConfigError(f"{place} must be as docs/drafters.md says, got {type(e).__name__}: {e}") from e


def chat_document(messages: list[dict[str, str]]) -> str:
    """The document of a chat, which ends where an answer begins or with one; raises ConfigError on a message without text."""
    marks = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": RESULT}
    try:
        text = "".join(f"{marks[m['role']]}{m['content'].strip()}\n" for m in messages)
        is_answered = messages[-1]["role"] == "assistant"
    except (KeyError, TypeError, AttributeError, IndexError):
        raise ConfigError(
            f"messages must be objects with role ({', '.join(marks)}) and content, at least one, got {str(messages)[:200]}"
        ) from None
    return text if is_answered else text + ASSISTANT


def messages(document: str) -> list[dict[str, str]]:
    """The turns of a document as messages of a chat; tool calls are the assistant's words, their results the user's."""
    parts = _TURN.split(document)
    parts = ["", USER, *parts] if parts[0] else parts  # what has no mark is a user's
    turns = [(_ROLES[tag], text.strip()) for tag, text in zip(parts[1::2], parts[2::2], strict=True)]
    out: list[dict[str, str]] = []
    for role, content in turns:
        if out and out[-1]["role"] == role:  # many templates want turns to alternate
            out[-1]["content"] += "\n" + content
        else:
            out.append({"role": role, "content": content})
    return out


def _tools(row: Any) -> Iterator[str]:
    tag = {"user": USER, "assistant": ASSISTANT}
    out = []
    for event in row["events"]:
        kind = event[0]
        if kind == "call":
            out.append(f"{CALL}{event[1]} {event[-1]}\n")
        elif kind == "result":
            out.append(f"{RESULT}{event[-1]}\n")
        else:
            out.append(f"{tag[kind]}{event[1]}\n")
    yield "".join(out)


def _math(row: Any) -> Iterator[str]:
    answer = re.sub(r"<<.*?>>", "", row["answer"])
    yield f"{USER}{row['question']}\n{ASSISTANT}{answer}\n"


def _facts(row: Any) -> Iterator[str]:
    lines: list[str] = []
    for name, text in row["fields"]:
        text = text if len(text) <= _MAX_FIELD_CHARS else text[:_MAX_FIELD_CHARS].rsplit(" ", 1)[0] + " ..."
        lines.append(f"{name}: {text}\n")
    for start in range(0, len(lines), 12):
        part = "" if start == 0 else f", part {start // 12 + 1}"
        yield (
            f"{USER}Give me the facts about {row['country']}, section {row['section']}{part}.\n{ASSISTANT}"
            + "".join(lines[start : start + 12])
        )


def _code(data: Path | None) -> Iterator[str]:
    rng = random.Random(7)
    for _ in range(6000):
        request, answer = generate_code_document(rng)
        yield f"{USER}{request}\n{ASSISTANT}{answer}\n"
    if data is None:
        return
    path = data / "code/p3_puzzles/puzzles.json"
    if not path.is_file():
        raise ConfigError(f"data file {path} must exist; pass --data with the folder that holds it")
    with _described(str(path)):
        puzzles = [text for row in json.loads(path.read_bytes()) for text in _puzzle(row)]
    yield from puzzles


def _puzzle(row: Any) -> Iterator[str]:
    if row["module"] == "human_eval.py":  # HumanEval prompts are kept for evaluation
        return
    for body in row["sol_bodies"]:
        if len(row["sat"]) + len(body) < 1500:
            yield f"{USER}Solve this puzzle.\n{row['sat']}\n{ASSISTANT}{row['sol_header']}\n{body}\n"


def _chat() -> Iterator[str]:
    rng = random.Random(11)
    for _ in range(_NUM_CHATS):
        # The answer to the first question of two is not known here: both are asked at once.
        yield f"{USER}{' '.join(generate_questions(rng))}\n{ASSISTANT}"


def _prose(data: Path) -> Iterator[str]:
    folder, rng = data / "prose/books", random.Random(13)
    books = [f for f in sorted(folder.glob("*.md")) if f.name != "NOTICE.md"]
    if not books:
        raise ConfigError(
            f"data folder {folder} must hold books as .md files; pass --data with the folder that holds it"
        )
    for book in books:
        with _described(str(book)):
            text = book.read_text(encoding="utf-8")
        paragraphs = [p.strip() for p in text[: len(text) * 9 // 10].split("\n\n")]
        for paragraph in paragraphs:
            if 120 < len(paragraph) <= _PROSE_CHARS and not paragraph.startswith("#"):
                yield f"{USER}{rng.choice(_PROSE_REQUESTS)}\n\n{paragraph}\n{ASSISTANT}"


_ROWS: dict[str, tuple[str, Callable[[Any], Iterator[str]]]] = {
    "tools": ("dialogue/taskmaster4/dialogs.jsonl", _tools),
    "math": ("math/gsm8k/train.jsonl", _math),
    "facts": ("facts/factbook/sections.jsonl", _facts),
}
"""Domain -> its file below a data folder, and the documents of one of its rows."""


def _check_domain(domain: str) -> None:
    known = (*DOMAINS, *PROMPT_DOMAINS)
    if domain not in known:
        raise ConfigError(f"domain must be one of {', '.join(known)}, got {domain!r}")


def licence(domain: str, data: Path | None) -> str:
    """Sources and licences of the documents that `documents` returns for the same domain and data; raises as it does."""
    _check_domain(domain)
    return f"{_LICENCES[domain]}; {_PUZZLES}" if domain == "code" and data is not None else _LICENCES[domain]


def documents(domain: str, data: Path | None, split: str) -> list[str]:
    """Return the chat documents of one domain, without the end token.

    Args:
        domain: one of DOMAINS, or of PROMPT_DOMAINS, whose documents end where the answer begins.
        data: folder laid out as described in docs/drafters.md; None works for `code` and `chat` (project-written templates).
        split: "train" or "held_out"; a document's side is a hash of its text, so it never changes.
    Raises: ConfigError on an unknown domain, a missing data file, or one that has nothing for one of the sides.
    """
    _check_domain(domain)
    if domain == "code":
        found = _code(data)
    elif domain == "chat":
        found = _chat()
    elif data is None:
        raise ConfigError(f"domain {domain!r} needs --data DIR; 'code' and 'chat' are generated by the project itself")
    elif domain == "prose":
        found = _prose(data)
    else:
        file, rows = _ROWS[domain]
        found = _read_jsonl(data / file, rows)
    sides: dict[bool, list[str]] = {True: [], False: []}
    for document in found:
        sides[zlib.crc32(document.encode()) % 100 < _HELD_OUT_PERCENT].append(document)
    if not all(sides.values()):
        raise ConfigError(
            f"domain {domain!r} must have documents to train on and, by their hash {_HELD_OUT_PERCENT} of 100, to hold out, got "
            f"{len(sides[False])} and {len(sides[True])}; add more to the data folder"
        )
    return sides[split == "held_out"]
