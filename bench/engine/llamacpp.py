"""Arms of llama.cpp: the same weights and token ids through llama.cpp, greedily, as many requests at once as the engine has.

Optional: llama.cpp comes with `pip install llama-cpp-python`. Its library is called directly, one llama_decode a round for
all running requests; a request that ends is followed by the next. `LOOKUP` drafts by the n-gram lookup of that package.
Everything that is not named here is as llama.cpp has it by default (K and V in float16, among others).
"""

from __future__ import annotations

import ctypes
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.bench.engine.arms import BenchGroup, GroupTiming, Stretch
from paceline.errors import ConfigError, PacelineError
from paceline.serving.target_model.model import TargetModel

PLAIN, LOOKUP = "llamacpp", "llamacpp_lookup"
"""Names of the arms."""
PACKAGE = "llama-cpp-python"
_NGRAM, _DRAFT_TOKENS = 2, 8
"""Of the lookup: the package's own longest n-gram; tokens as in the arm transformers_lookup."""


@dataclass(slots=True)
class _Sequence:
    """A running request."""

    index: int
    feed: list[int]
    """Tokens of the next round: the prompt, or the last token and its draft."""
    num_rows: int = 0
    """Rows of K and V."""
    text: list[int] = field(default_factory=list)
    """Prompt and answer, which drafts are looked up in."""


class LlamaCppModel:
    """The target's weights in llama.cpp, with a context for every number of requests."""

    def __init__(self, checkpoint: Path, target: TargetModel, *, num_context: int) -> None:
        """num_context: tokens of the longest request. Raises: ConfigError without the package or for an unfit target."""
        if target.is_int8 or target.device.type != "cpu":
            raise ConfigError(
                f"arms {PLAIN} and {LOOKUP} need --device cpu and a dtype other than int8; leave them out"
            )
        self.lib: Any = load_package()
        self.vocab_size, self.eos, self.num_context = target.vocab_size, target.eos_token_ids, num_context
        with tempfile.TemporaryDirectory() as room:
            path = Path(room, "target.gguf")
            from paceline.bench.engine.gguf import write_gguf  # half a second that no other arm needs

            write_gguf(checkpoint, path, target.dtype)
            self._model = self.lib.llama_model_load_from_file(str(path).encode(), self.lib.llama_model_default_params())
        if not self._model:
            raise ConfigError(f"llama.cpp must be able to load this target; update it: pip install -U {PACKAGE}")
        self._contexts: dict[int, Any] = {}

    def context(self, batch: int) -> Any:
        """A context of `batch` sequences, on as many threads as torch has."""
        if batch not in self._contexts:
            params = self.lib.llama_context_default_params()
            params.n_seq_max, params.n_ctx = batch, batch * -(-self.num_context // 256) * 256
            params.n_batch = params.n_ctx
            params.n_threads = params.n_threads_batch = torch.get_num_threads()
            params.no_perf = True
            self._contexts[batch] = self.lib.llama_init_from_model(self._model, params)
            if not self._contexts[batch]:
                raise PacelineError(f"llama.cpp made no context for {batch} requests of {self.num_context} tokens")
        return self._contexts[batch]


def load_package() -> Any:
    """The low-level functions of llama.cpp, silenced. Raises: ConfigError where the package is not installed."""
    try:
        import llama_cpp
    except ImportError as e:
        raise ConfigError(f"arms {PLAIN} and {LOOKUP} need llama.cpp: pip install {PACKAGE} ({e})") from e
    _CALLBACKS.append(llama_cpp.llama_log_callback(lambda *_: None))
    llama_cpp.llama_log_set(_CALLBACKS[-1], ctypes.c_void_p(0))
    return llama_cpp


_CALLBACKS: list[Any] = []
"""What the library may call as long as the process lives."""


class _Batch:
    """Packed rows of one llama_decode, in arrays that are filled again each round."""

    def __init__(self, lib: Any, num_rows: int) -> None:
        self._lib = lib
        self._tokens, self._positions, self._sequences = (np.zeros(num_rows, dtype=np.int32) for _ in range(3))
        self._counts, self._wants = np.ones(num_rows, dtype=np.int32), np.zeros(num_rows, dtype=np.int8)
        self._addresses = self._sequences.ctypes.data + 4 * np.arange(num_rows, dtype=np.uint64)

    def fill(self, running: dict[int, _Sequence]) -> Any:
        """Rows of all requests; logits are wanted of a prompt's last row and of all others."""
        at = 0
        for slot, sequence in running.items():
            end = at + len(sequence.feed)
            self._tokens[at:end] = sequence.feed
            self._positions[at:end] = np.arange(sequence.num_rows, sequence.num_rows + end - at)
            self._sequences[at:end] = slot
            self._wants[at:end] = sequence.num_rows > 0
            self._wants[end - 1] = 1
            at = end
        types = self._lib.llama_batch
        pointers: dict[str, np.ndarray] = {
            "token": self._tokens, "pos": self._positions, "n_seq_id": self._counts, "seq_id": self._addresses,
            "logits": self._wants,
        }  # fmt: skip
        kinds = dict(types._fields_)
        return types(n_tokens=at, **{k: ctypes.cast(a.ctypes.data, kinds[k]) for k, a in pointers.items()})


class LlamaCppArm:
    """Greedy decoding by llama.cpp; not thread-safe."""

    def __init__(self, name: str, model: LlamaCppModel) -> None:
        self.name, self._model = name, model

    def supports(self, batch: int, temperature: float) -> bool:
        """Whether groups of this size can run: greedy ones, whose tokens can be compared; lookup takes one request."""
        return temperature == 0 and (batch == 1 or self.name != LOOKUP)

    def run(self, group: BenchGroup) -> GroupTiming:
        """Run one group to its end. Raises: PacelineError when llama.cpp fails."""
        lib, context = self._model.lib, self._model.context(group.batch)
        memory, batch = lib.llama_get_memory(context), _Batch(lib, lib.llama_n_batch(context))
        lib.llama_memory_clear(memory, True)
        tokens: list[list[int]] = [[] for _ in group.prompts]
        ttft_s = [0.0] * len(group.prompts)
        running: dict[int, _Sequence] = {}
        waiting, num_rounds, num_tokens, num_started = iter(range(len(group.prompts))), 0, 0, 0
        full: list[tuple[float, int, int]] = []
        began = time.perf_counter()
        while True:
            for slot in set(range(group.batch)) - set(running):
                for i in itertools.islice(waiting, 1):
                    running[slot] = _Sequence(i, list(group.prompts[i]), text=list(group.prompts[i]))
            now = time.perf_counter()
            is_full = len(running) == group.batch and num_started >= group.batch
            if is_full if not full else len(full) == 1 and len(running) < group.batch:
                full.append((now, num_tokens, num_rounds))
            if not running:
                break
            best = self._decode(context, batch.fill(running))
            num_rounds += 1
            for slot, sequence in list(running.items()):
                count = 1 if sequence.num_rows == 0 else len(sequence.feed)
                own, best = best[:count], best[count:]
                i, is_first = sequence.index, not tokens[sequence.index]
                new = accepted(sequence.feed if not is_first else sequence.feed[-1:], own)
                new, is_last = self._cut(new, group, i, len(tokens[i]))
                tokens[i] += new
                num_tokens += len(new)
                num_started += is_first
                if is_first:
                    ttft_s[i] = time.perf_counter() - began
                # The last new token has no row yet.
                sequence.num_rows += len(sequence.feed) if is_first else len(new)
                if is_last:
                    lib.llama_memory_seq_rm(memory, slot, -1, -1)
                    del running[slot]
                    continue
                if len(new) < count:
                    lib.llama_memory_seq_rm(memory, slot, sequence.num_rows, -1)
                sequence.text += new
                room = group.params[i].max_tokens - len(tokens[i]) - 1
                sequence.feed = new[-1:] + self._draft(sequence.text, room)
        seconds = time.perf_counter() - began
        return GroupTiming(
            token_ids=tuple(map(tuple, tokens)), seconds=seconds, ttft_s=tuple(ttft_s[: group.batch]),
            full_batch=_stretch(*full) if len(full) == 2 else None,
        )  # fmt: skip

    def _decode(self, context: Any, rows: Any) -> list[int]:
        """The best token behind each wanted row."""
        lib = self._model.lib
        failed = lib.llama_decode(context, rows)
        if failed:
            raise PacelineError(f"llama_decode of {rows.n_tokens} rows failed with code {failed}")
        num = int(np.ctypeslib.as_array(rows.logits, (rows.n_tokens,)).sum())
        logits = np.ctypeslib.as_array(lib.llama_get_logits(context), (num, self._model.vocab_size))
        return logits.argmax(1).tolist()

    def _cut(self, new: list[int], group: BenchGroup, index: int, num_before: int) -> tuple[list[int], bool]:
        """New tokens up to the end token or the limit, and whether the request ends there."""
        params = group.params[index]
        new = new[: params.max_tokens - num_before]
        if not params.ignore_eos:
            end = next((i for i, token in enumerate(new) if token in self._model.eos), None)
            if end is not None:
                return new[: end + 1], True
        return new, num_before + len(new) == params.max_tokens

    def _draft(self, text: Sequence[int], room: int) -> list[int]:
        if self.name != LOOKUP or room < 1:
            return []
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        found = LlamaPromptLookupDecoding.find_candidate_pred_tokens(
            np.array(text, dtype=np.intc), _NGRAM, min(_DRAFT_TOKENS, room)
        )
        return found.tolist()


def accepted(feed: Sequence[int], best: Sequence[int]) -> list[int]:
    """New tokens of a round: the best ones, as far as the draft (feed behind its first token) foretold the one before."""
    count = next((i for i, (drafted, token) in enumerate(zip(feed[1:], best, strict=False)) if drafted != token), len(feed) - 1)  # fmt: skip
    return list(best[: count + 1])


def _stretch(start: tuple[float, int, int], end: tuple[float, int, int]) -> Stretch:
    seconds, num_tokens, num_rounds = (b - a for a, b in zip(start, end, strict=True))
    return Stretch(seconds=seconds, num_tokens=int(num_tokens), num_rounds=int(num_rounds), part_s={})


def llamacpp_arms(
    names: Sequence[str], checkpoint: Path, target: TargetModel, *, num_context: int
) -> list[LlamaCppArm]:
    """Arms among PLAIN and LOOKUP, with one copy of the weights in the target's number type.

    num_context: tokens of the longest request, drafts included. Raises: ConfigError.
    """
    model = LlamaCppModel(checkpoint, target, num_context=num_context + _DRAFT_TOKENS)
    return [LlamaCppArm(name, model) for name in names]
