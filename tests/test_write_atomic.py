"""Files written by paceline.paths are whole or absent, and leave nothing beside them."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.errors import ConfigError
from paceline.paths import check_folder, check_output, check_private, open_atomic, open_folder, write_atomic


def test_text_and_bytes_replace_the_file_and_make_its_folder(tmp_path):
    path = tmp_path / "deep" / "a.json"
    write_atomic(path, "ä")
    assert path.read_bytes() == "ä".encode()
    write_atomic(str(path), b"new")
    assert path.read_bytes() == b"new" and [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_a_failed_write_leaves_the_file_before_and_no_half_one(tmp_path):
    path = tmp_path / "a"
    write_atomic(path, b"old")
    with pytest.raises(ZeroDivisionError), open_atomic(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_link_stays_one_and_what_is_no_file_is_written_to_as_it_goes(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_atomic(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"
    (tmp_path / "absent").symlink_to(tmp_path / "deep" / "made")
    write_atomic(tmp_path / "absent", b"new")
    assert (tmp_path / "deep" / "made").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    assert check_output(tmp_path / "pipe", "json") == tmp_path / "pipe"
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        write_atomic(tmp_path / "pipe", b"through")
        assert reader.communicate()[0] == b"through"
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "out").write_text("before\n")
    with (tmp_path / "out").open("a") as out:
        write_atomic(f"/dev/fd/{out.fileno()}", b"behind")
    assert (tmp_path / "out").read_text() == "before\nbehind"
    if os.access("/dev/shm", os.W_OK):
        shared = Path(f"/dev/shm/{tmp_path.name}-{os.getpid()}")
        for text in (b"old", b"new"):
            write_atomic(shared, text)
        assert shared.read_bytes() == b"new", "a folder as any other"
        shared.unlink()
    for name, to in (("round", tmp_path / "round"), ("nowhere", Path("/proc/none/x"))):
        (tmp_path / name).symlink_to(to)
        with pytest.raises(ConfigError, match="json must name a file that can be written"):
            check_output(tmp_path / name, "json")
    write_atomic("/dev/null", b"nothing")
    assert Path("/dev/null").is_char_device()


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with open_folder(tmp_path / "new") as part:
        (part / "a").write_text("1")
        assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with open_folder(str(tmp_path / "empty")) as part:
        (part / "a").write_text("1")
    with pytest.raises(ZeroDivisionError), open_folder(tmp_path / "half") as part:
        (part / "a").write_text("1")
        raise ZeroDivisionError
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == [
        "empty",
        "empty/a",
        "new",
        "new/a",
    ]


def test_a_folder_that_holds_something_is_refused_at_the_start_and_at_the_end(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="out must be a new or empty folder"), open_folder(path):
            raise AssertionError("begun")
    with (
        pytest.raises(ConfigError, match=r"to must be a new or empty folder.*not empty"),
        open_folder(tmp_path / "late", "to"),
    ):
        (tmp_path / "late").mkdir()
        (tmp_path / "late" / "theirs").touch()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "late"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "runs.jsonl").mkdir()
    for folder, message in (
        (tmp_path / "file", "resume must be a folder, got"), (tmp_path, "resume must name a file .* Is a directory"),
        (tmp_path / "file" / "below", "resume must name a file"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            check_folder(folder, "runs.jsonl", "resume")
    check_folder(tmp_path / "new", "runs.jsonl", "resume")
    assert (tmp_path / "new").is_dir() and not list((tmp_path / "new").iterdir())


def test_a_private_folder_that_cannot_be_made_or_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="data-dir must be a folder that can be written, got"):
            check_private(folder, "data-dir")
    check_private(tmp_path / "new", "data-dir")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_full_disk_is_one_sentence_of_the_command_line(monkeypatch, capsys):
    def fill() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(main, "app", fill)
    with pytest.raises(SystemExit, match="2"):
        main.main()
    assert capsys.readouterr().err == "error: a file could not be written: No space left on device\n"
