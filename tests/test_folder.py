"""A run's folder: what is kept, what is dropped, and when it is not gone on with."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rmsnorm_raw import environment
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.study.folder import SAME, CannotWrite, Folder
from rmsnorm_raw.study.table_file import TableFile

TABLE = TableFile("sweep.csv", ("cell", "note"), ("cell",))
#: what a sweep says of itself, beside what is collected
FACTS: dict[str, Any] = {
    "command": ["rmsnorm-raw", "sweep"], "backend": "cpu", "device": {"name": "a device"},
    "toolchain": {"compiler": "c++ 12"}, "providers": {"ours": {"version": "1"}}, "rows_cap": None,
    "budget_s": 0.3, "cells": ["a", "b"], "tuned": {},
}  # fmt: skip


@contextlib.contextmanager
def opened(path: Path, **facts: Any) -> Iterator[Folder]:
    with contextlib.closing(Folder(path, TABLE, FACTS | facts)) as folder:
        yield folder


def row(cell: str, note: str = "") -> dict[str, str]:
    return {"cell": cell, "note": note}


def begin(path: Path) -> None:
    """An unfinished run of two rows, one of whose notes has several lines and quotes."""
    with opened(path) as folder:
        folder.append(row("a"))
        folder.append(row("b", 'it says "no",\r\nand why\n'))


def test_a_new_run_has_its_environment_and_a_header_from_the_first_moment(tmp_path: Path) -> None:
    with opened(tmp_path / "new") as folder:
        facts = json.loads(folder.environment_path.read_text(encoding="utf-8"))
        assert set(SAME) <= facts.keys()
        assert facts["finished"] is False
        assert folder.csv_path.read_bytes() == b"cell,note\r\n"


def test_rows_are_on_the_disk_as_they_are_written(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.append(row("a"))
        assert folder.csv_path.read_bytes() == b"cell,note\r\na,\r\n"


def test_a_run_goes_on_after_its_last_whole_row(tmp_path: Path) -> None:
    begin(tmp_path)
    whole = (tmp_path / "sweep.csv").read_bytes()
    (tmp_path / "sweep.csv").write_bytes(whole + b'c,"half a no')
    with opened(tmp_path) as folder:
        assert folder.kept == 2
        assert folder.rows == [row("a"), row("b", 'it says "no",\r\nand why\n')]
        folder.append(row("c"))
        folder.finish(suspect=False)
    assert (tmp_path / "sweep.csv").read_bytes() == whole + b"c,\r\n"
    facts = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    assert (facts["finished"], facts["suspect"]) == (True, False)
    assert [session["rows_kept"] for session in facts["sessions"]] == [0, 2]
    assert all(session["wall_s"] >= 0 for session in facts["sessions"])


def test_a_kill_before_the_header_loses_nothing(tmp_path: Path) -> None:
    begin(tmp_path)
    for left in (b"", b"cell,no"):
        (tmp_path / "sweep.csv").write_bytes(left)
        with opened(tmp_path) as folder:
            assert folder.kept == 0
            assert folder.csv_path.read_bytes() == b"cell,note\r\n"
    (tmp_path / "sweep.csv").unlink()
    with opened(tmp_path) as folder:
        assert folder.csv_path.read_bytes() == b"cell,note\r\n"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"budget_s": 2.0}, "budget_s: it was 0.3, and is 2.0 now"),
        ({"device": {"name": "another"}}, "device.name: it was a device, and is another now"),
        ({"tuned": {"a": "b64"}}, "tuned.a: it was absent, and is b64 now"),
        (
            {"providers": {"ours": {"version": "1"}, "quack": {"version": "2"}}},
            "providers.quack.version: it was absent, and is 2 now",
        ),
    ],
)
def test_a_run_that_stood_on_something_else_is_left_alone(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    begin(tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InvalidInput) as refused, opened(tmp_path, **changed):
        pass
    assert str(refused.value).endswith(f"give another folder:\n  {said}")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("packages", {"numpy": "0.1"}, "packages.numpy: it was"),
        ("nvidia_gpus", [{"name": "H", "driver_version": "1"}], "nvidia: it was"),
        ("git", {"commit": "abc", "dirty": False}, "commit: it was"),
    ],
)
def test_so_is_one_of_another_machine(
    key: str, value: object, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path)
    here = environment.collect()
    monkeypatch.setattr(environment, "collect", lambda: here | {key: value})
    with pytest.raises(InvalidInput, match=said), opened(tmp_path):
        pass


def test_clocks_and_what_lies_about_in_the_checkout_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu: dict[str, object] = {"name": "H", "driver_version": "1", "clock_sm_mhz": 345.0}
    here = environment.collect() | {"nvidia_gpus": [gpu], "git": {"commit": "a", "dirty": False}}
    monkeypatch.setattr(environment, "collect", lambda: here)
    begin(tmp_path)
    later = {"nvidia_gpus": [gpu | {"clock_sm_mhz": 1980.0}], "git": {"commit": "a", "dirty": True}}
    monkeypatch.setattr(environment, "collect", lambda: here | later)
    with opened(tmp_path) as folder:
        folder.finish()
    facts = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    assert facts["nvidia_gpus"][0]["clock_sm_mhz"] == 1980.0  # as they are after the work


def test_what_is_no_unfinished_sweep_is_not_written_over(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.finish()
    with pytest.raises(InvalidInput, match="is finished"), opened(tmp_path):
        pass
    (tmp_path / "environment.json").write_text('{"command": ["tune"]}')
    with pytest.raises(InvalidInput, match="is not a sweep's"), opened(tmp_path):
        pass
    (tmp_path / "environment.json").write_text('[{"sessions": [], "finished": false}]')
    with pytest.raises(InvalidInput, match="is not a sweep's"), opened(tmp_path):
        pass
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(InvalidInput, match="does not read"), opened(tmp_path):
        pass
    (tmp_path / "environment.json").unlink()
    (tmp_path / "sweep.csv").write_bytes(b"cell,note\r\na,\r\n")
    with pytest.raises(InvalidInput, match="without an environment"), opened(tmp_path):
        pass
    assert (tmp_path / "sweep.csv").read_bytes() == b"cell,note\r\na,\r\n"


def test_a_table_of_other_columns_is_not_gone_on_with(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "sweep.csv").write_bytes(b"cell,words\r\na,\r\n")
    with pytest.raises(InvalidInput, match="other columns"), opened(tmp_path):
        pass


@pytest.mark.parametrize("rows", [b"\xff,\r\n", b"a\n", b"a,\na,\n"])
def test_a_damaged_table_is_refused_and_nothing_is_changed(tmp_path: Path, rows: bytes) -> None:
    begin(tmp_path)
    (tmp_path / "sweep.csv").write_bytes(b"cell,note\r\n" + rows)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with (
        pytest.raises(InvalidInput, match=r"sweep.csv, line [23]: .* Nothing was changed"),
        opened(tmp_path),
    ):
        pass
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_rows_whose_lines_an_editor_has_ended_are_kept(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "sweep.csv").write_bytes(b"cell,note\na,\nb,\n")
    with opened(tmp_path) as folder:
        assert folder.kept == 2
        folder.append(row("c"))
    assert (tmp_path / "sweep.csv").read_bytes() == b"cell,note\na,\nb,\nc,\r\n"


def test_a_disk_that_is_full_from_the_first_moment_can_be_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(environment, "replace_text", full)
        with (
            pytest.raises(CannotWrite, match="give the same command with this --out"),
            opened(tmp_path),
        ):
            pass
    with opened(tmp_path) as folder:
        folder.append(row("a"))
    assert (tmp_path / "sweep.csv").read_bytes() == b"cell,note\r\na,\r\n"


@pytest.mark.parametrize("name", ["sweep.csv", "environment.json"])
def test_a_file_that_cannot_be_opened_is_named_and_no_rows_are_counted(
    name: str, tmp_path: Path
) -> None:
    begin(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(CannotWrite) as refused, opened(tmp_path):
        pass
    said = f"{tmp_path / name} cannot be read and written: Is a directory. Nothing was changed"
    assert str(refused.value).startswith(said)


def test_a_folder_of_the_suites_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "perf.csv").write_bytes(b"cell,note\r\n")
    with pytest.raises(InvalidInput, match=r"has perf.csv, of something else"), opened(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["perf.csv"]


def test_what_another_process_finishes_meanwhile_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read again under the lock."""
    begin(tmp_path)
    flock = fcntl.flock

    def finish_before(file: int, how: int) -> None:
        facts = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
        (tmp_path / "environment.json").write_text(json.dumps(facts | {"finished": True}))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", finish_before)
    with pytest.raises(InvalidInput, match="is finished"), opened(tmp_path):
        pass


def test_two_processes_do_not_write_one_run(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(InvalidInput, match="another process"), opened(tmp_path):
        pass
    with opened(tmp_path) as folder:
        assert folder.kept == 0
