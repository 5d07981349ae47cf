"""What the command line refuses before any command begins to work."""

import dataclasses
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated as A

import pytest
import typer
from typer.testing import CliRunner

import paceline.infra.app as serve_command
from paceline.cli.main import app, main
from paceline.cli.options import command, given_words
from paceline.errors import ConfigError
from paceline.infra.service.preflight import has_gpu_driver
from paceline.paths import check_output
from paceline.records import Setting, Threads, count, record

RUN = CliRunner()
PROMISED = Path(__file__).parent / "commands.txt"


@record()
class Inner:
    """Part of a record."""

    depth: A[int, Setting("Depth.", ge=1, le=8)] = 8


@record()
class Options:
    """Long words.

    Example: play --kv-share 1.
    """

    name: A[str, Setting("Who.", is_argument=True)]
    kv_share: A[float, Setting("Share.", gt=0, le=4)] = 0.2
    temperatures: A[tuple[float, ...], Setting("Comma list.", flag="temperature", ge=0)] = (0.0, 0.8)
    sweep: A[tuple[str, ...], Setting("Again and again.", is_repeated=True)] = ()
    tokens: A[int, Setting("How many.", parser=count)] = 400_000
    is_timing: A[bool, Setting("Take times.", flag="time/--no-time")] = True
    folder: A[Path | None, Setting("Where.", is_folder=True)] = None
    num_threads: Threads = None
    inner: Inner = dataclasses.field(default_factory=Inner)
    hidden: int = 3


@record()
class Secrets:
    """Options that the environment may give."""

    token: A[str | None, Setting("Whose.", env=("PACELINE_A", "PACELINE_B"))] = None
    address: A[str | None, Setting("Of another's.", env="RAY_X")] = None


def play(*words: str) -> Options:
    """The record of a command line."""
    seen: list[Options] = []
    small = typer.Typer()

    @command(small, "play", f"{__name__}:Options")
    def run(options, console) -> None:
        """Short words."""
        seen.append(options)

    sys.modules[__name__].Options = Options  # importlib mode names this module after its path
    result = RUN.invoke(small, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_a_command_line_becomes_the_record_that_declares_it():
    assert play("me") == Options(name="me")
    given = play("me", "--kv-share", "1", "--temperature", "0, 1", "--sweep", "a=1", "--sweep", "b=2", "--tokens", "4e5", "--no-time", "--depth", "3", "--threads", "2")  # fmt: skip
    assert given == Options(
        name="me", kv_share=1.0, temperatures=(0.0, 1.0), sweep=("a=1", "b=2"), is_timing=False, num_threads=2,
        inner=Inner(depth=3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv-share", "5"), r"^kv-share must be in \(0, 4\], got 5\.0$"),
        (("--temperature", "0,-1"), r"^temperature must be >= 0, got '0\.0,-1\.0'$"),
        (("--temperature", "warm"), "^temperature must be a comma list of numbers, got 'warm'$"),
        (("--depth", "9"), r"^depth must be in \[1, 8\], got 9$"),
        (("--threads", "0"), "^threads must be >= 1, got 0$"),
        (("--folder", "/nowhere"), "^folder must be a folder, got '/nowhere'$"),
    ],
)
def test_a_value_out_of_bounds_is_refused_in_the_words_that_were_typed(words, message):
    with pytest.raises(ConfigError, match=message):
        play("me", *words)


def test_the_words_of_a_record_name_what_was_given_and_no_path():
    options = Options(name="me", folder=Path("/tmp"), sweep=("a=1",), num_threads=2)
    words = given_words(options, hidden=("num_threads", "name"))
    assert words == "--kv-share 0.2 --temperature 0,0.8 --sweep 'a=1' --tokens 400000 --time --folder DIR --depth 8"
    assert "--temperature '' --tokens 0 " in given_words(Options(name="me", temperatures=(), tokens=0))
    exact = Options(name="me", kv_share=1 / 3, temperatures=(0.30000001, 1e-9, 2e22))
    assert play("me", *shlex.split(given_words(exact, hidden=("name",)))) == exact


def leaves(group=None, path: str = ""):
    """(words of a command, the command)."""
    group = group or typer.main.get_command(app)
    for name, found in group.commands.items():
        if hasattr(found, "commands"):
            yield from leaves(found, f"{path}{name} ")
        else:
            yield path + name, found.built()


def interface() -> list[str]:
    """One line a command: its options, their environment variables and defaults."""
    lines = []
    for name, found in sorted(leaves()):
        words = []
        for p in found.params:
            env = ",".join(p.envvar if isinstance(p.envvar, list) else [p.envvar] if p.envvar else [])
            default = "!" if p.required else "" if p.default in (None, []) else f"={p.default}"
            words.append(
                "/".join([*p.opts, *p.secondary_opts]) + (f"${env}" if env else "") + default.replace(" ", "_")
            )
        lines.append(f"{name}: {' '.join(sorted(words))}")
    return lines


def test_commands_options_and_defaults_are_those_that_were_promised():
    assert interface() == PROMISED.read_text(encoding="utf-8").splitlines()


def test_every_command_has_a_line_in_the_list_and_an_explanation_with_each_option():
    for name, found in leaves():
        assert found.help and "\n\n" in found.help, name
        summary, _, rest = found.help.partition("\n\n")
        assert summary.removesuffix(".").partition(" ")[2].lower() not in rest.lower(), f"{name} says it twice"
        assert all(getattr(p, "help", None) for p in found.params), name


def test_the_list_of_commands_loads_neither_torch_nor_ray():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom paceline.cli.main import app\n"
        "assert CliRunner().invoke(app, ['bench', '--help']).exit_code == 0\n"
        "print({'torch', 'ray', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_fewer_replicas_at_most_than_at_least_are_refused_before_torch_is_loaded():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom paceline.cli.main import app\n"
        "print(CliRunner().invoke(app, ['serve', '--replicas', '3', '--max-replicas', '2']).exception)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, is_loaded = done.stdout.strip().splitlines()
    assert "(--max-replicas) must be at least num_replicas (--replicas), which is 3, got 2" in said
    assert is_loaded == "False"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["serve", "--model", "/no/such/model", "--port", "0"], "model must be"),
        (["serve", "--drafter", "/no/such/drafter", "--port", "0"], "drafter must be"),
        (["serve", "--port", "BUSY"], "must be free"),
        (["serve", "--device", "cuda", "--port", "0"], "device must be cpu or auto"),
        (["generate", "hello", "--max-tokens", "-1"], "max-tokens must be >= 1"),
        (["generate", "hello", "--model", "/no/such/model"], "model must be"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_is_wrong_on_the_face_of_it_is_said_before_ray_and_torch_are_loaded(words, reason):
    if "cuda" in words and has_gpu_driver():
        pytest.skip("this computer has a driver")
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        words = [str(busy.getsockname()[1]) if word == "BUSY" else word for word in words]
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli", *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )  # fmt: skip
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode != 0 and reason in " ".join(said.split()), said
    # about 0.4 s; Ray alone takes 1 to 2 more, and torch 3
    assert used.ru_utime + used.ru_stime < 1.0, used


def test_serve_hands_what_was_typed_to_the_service(monkeypatch):
    found = []
    monkeypatch.setattr(serve_command, "serve_forever", lambda config, console: found.append(config))
    words = ["serve", "--tree-policy", "bastion", "--max-draft-tokens", "32", "--mix", "suffix", "--drafter", "eagle3", "--replicas", "2", "--no-resume", "--port", "0"]  # fmt: skip
    assert RUN.invoke(app, words, catch_exceptions=False).exit_code == 0
    tree = found[0].engine.tree
    assert (tree.policy, tree.max_draft_tokens, tree.mix) == ("bastion", 32, "suffix")
    assert (found[0].drafter, found[0].num_replicas) == ("eagle3", 2)
    with pytest.raises(ConfigError, match=r"^replicas must be in \[1, 1024\], got 0$"):
        RUN.invoke(app, ["serve", "--replicas", "0"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["bench", "drafters"], "html"),
        (["bench", "drafters"], "json"),
        (["bench", "engine"], "json"),
        (["bench", "curves", "specblock"], "html"),
        (["bench", "compare", "a.json", "b.json"], "json"),
        (["bench", "shadow"], "json"),
        (["bench", "feedback"], "json"),
        (["replay", "small"], "html"),
        (["replay", "small"], "suggest"),
        (["demo"], "html"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else v,
)
def test_a_result_that_cannot_be_written_is_refused_before_the_work(tmp_path, command, option):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "below"):
        result = RUN.invoke(app, [*command, f"--{option}", str(path)])
        assert isinstance(result.exception, ConfigError), result.output
        assert str(result.exception).startswith(f"{option} must name a file that can be written, got {path}")


def test_the_check_makes_the_folder_and_leaves_what_is_there(tmp_path):
    assert check_output(None, "json") is None
    path = tmp_path / "new" / "r.json"
    assert check_output(path, "json") == path and path.parent.is_dir() and not path.exists()
    path.write_text("old")
    check_output(path, "json")
    assert path.read_text() == "old"


def _trained(monkeypatch, *options):
    """(data, recipe, command) that `train-drafter` hands to the recipe."""
    seen = []

    def train(source, data, out, recipe, *, command, **_):
        seen.append((data, recipe, command))
        return {}

    monkeypatch.setattr("paceline.adapt.recipes.drafter.train_drafter", train)
    result = RUN.invoke(app, ["train-drafter", "--target", "bundled", "--out", "o", *options])
    assert result.exit_code == 0, result.output
    return seen[0]


def test_the_recorded_command_trains_the_same_drafter_again(tmp_path, monkeypatch):
    options = ["--without", "shift, rank-head", "--learning-rate", "1e-3", "--data", str(tmp_path), "--domains", "code"]
    data, recipe, command = _trained(monkeypatch, *options)
    assert data == tmp_path and recipe.without == ("shift", "rank-head") and recipe.learning_rate == 1e-3
    assert "--data DIR" in command and str(tmp_path) not in command
    again = _trained(monkeypatch, *shlex.split(command.replace("DIR", str(tmp_path)))[6:])
    assert again == (data, recipe, command)


def test_the_recorded_command_names_only_what_was_given(monkeypatch):
    data, recipe, command = _trained(monkeypatch, "--domains", "code")
    assert data is None and recipe.learning_rate is None and recipe.without == ()
    assert command == (
        "paceline train-drafter --target bundled --out DIR --drafter specblock --domains code --tokens 400000 --epochs 3 "
        "--held-out 8000 --nodes 8 --batch-rows 768 --weights float32 --seed 1"
    )


def test_training_says_how_far_it_is_without_a_terminal(monkeypatch):
    def train(source, data, out, recipe, *, device, progress, command):
        for done in (10, 20, 1000):
            progress(done, 1000, {"phase": "text", "tokens_per_s": 12.345678})
        return {}

    monkeypatch.setattr("paceline.adapt.recipes.drafter.train_drafter", train)
    result = RUN.invoke(app, ["train-drafter", "--target", "bundled", "--out", "o"])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("training drafter")]
    assert lines == [
        "training drafter: 10 of 1,000  phase text  tokens_per_s 12.35",
        "training drafter: 1,000 of 1,000  phase text  tokens_per_s 12.35",
    ]


def test_a_file_that_fails_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "services" / "paceline" / "controller.msgpack").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["paceline", "backup", "--data-dir", str(tmp_path), "--out", str(tmp_path / "o")])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.endswith("controller.msgpack: Is a directory\n")


def test_a_variable_of_ours_may_name_a_file_for_every_command(monkeypatch, tmp_path):
    seen: list[Secrets] = []
    small = typer.Typer()

    @command(small, "play", f"{__name__}:Secrets")
    def run(options, console) -> None:
        """Play."""
        seen.append(options)

    (tmp_path / "b").write_text("of the file\n", encoding="utf-8")
    for name in ("PACELINE_B", "RAY_X"):
        monkeypatch.setenv(f"{name}_FILE", str(tmp_path / "b"))
    assert RUN.invoke(small, []).exit_code == 0 and RUN.invoke(small, ["--token", "typed"]).exit_code == 0
    monkeypatch.setenv("PACELINE_B", "of the variable")
    assert RUN.invoke(small, []).exit_code == 0
    assert [(o.token, o.address) for o in seen] == [("of the file", None), ("typed", None), ("of the variable", None)]
    monkeypatch.delenv("PACELINE_B")
    monkeypatch.setenv("PACELINE_A_FILE", str(tmp_path / "nowhere"))
    refused = RUN.invoke(small, [])
    assert isinstance(refused.exception, ConfigError) and "PACELINE_A_FILE" in str(refused.exception)
