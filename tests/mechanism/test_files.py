"""Files that survive a crash: replaced whole, appended whole, a torn end mended."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.system.files import file_digest, write_durably, write_json
from runner.system.json_lines import LineFile, read_lines

LINES = st.lists(
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none()),
    max_size=5,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("before", [None, b"", b"a much longer text than the new one"])
def test_a_file_is_replaced_whole(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    write_durably(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


def test_what_an_earlier_crash_left_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "file.tmp").write_bytes(b"half of someth")
    write_durably(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old")
    (tmp_path / "file.tmp").mkdir()  # the temporary name is taken: open fails
    with pytest.raises(OSError):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"


def test_json_is_canonical(tmp_path: Path) -> None:
    write_json(tmp_path / "a", {"b": 1, "a": [1.5, None]})
    write_json(tmp_path / "b", {"a": [1.5, None], "b": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert json.loads((tmp_path / "a").read_text()) == {"a": [1.5, None], "b": 1}


@pytest.mark.parametrize("size", [0, 1, (1 << 22) - 1, 1 << 22, (1 << 22) + 1])
def test_digest_is_sha256_of_the_whole_file(tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    (tmp_path / "file").write_bytes(data)
    assert file_digest(tmp_path / "file") == hashlib.sha256(data).hexdigest()


# JSON lines


def written(path: Path, lines: list[dict[str, Any]]) -> bytes:
    """The bytes of a file with these lines, written as the run writes them."""
    path.unlink(missing_ok=True)
    file = LineFile(path, length=0)
    for line in lines:
        file.append(line, durably=False)
    assert file.sync() == path.stat().st_size
    file.close()
    return path.read_bytes()


@settings(max_examples=40, deadline=None)
@given(lines=LINES, data=st.data())
def test_a_cut_file_gives_its_whole_lines_and_goes_on(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]], data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    whole = written(path, lines)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    path.write_bytes(cut)
    num_whole = cut.count(b"\n")
    found, length = read_lines(path)
    assert found == lines[:num_whole]
    assert length == cut.rfind(b"\n") + 1
    file = LineFile(path, length=length)
    file.append({"after": "the crash"}, durably=True)
    file.close()
    assert read_lines(path)[0] == [*lines[:num_whole], {"after": "the crash"}]


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 64 + b"\n", b"{\n", b"[1]\n", b"3\n", b"\n", b"\xff\xfe\n", b'{"a":1', b"[" * 9999],
)
def test_garbage_ends_the_reading(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}\n' + garbage + b'{"b": 2}\n')
    assert read_lines(path) == ([{"a": 1}], 9)
