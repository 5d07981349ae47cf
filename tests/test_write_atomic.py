"""Files written by paceline.paths are whole or absent, and leave nothing beside them."""

from __future__ import annotations

import pytest

from paceline.paths import open_atomic, write_atomic


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
