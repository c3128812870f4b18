"""A run's folder: what is kept, what is dropped, and when it is not gone on with."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsnorm_raw import environment
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.study.folder import SAME, Folder, whole_records

COLUMNS = ("cell", "note")
#: what a sweep says of itself, beside what is collected
FACTS: dict[str, Any] = {
    "command": ["rmsnorm-raw", "sweep"], "backend": "cpu", "device": {"name": "a device"},
    "toolchain": {"compiler": "c++ 12"}, "providers": {"ours": {"version": "1"}}, "rows_cap": None,
    "budget_s": 0.3, "cells": ["a", "b"], "tuned": {},
}  # fmt: skip


@contextlib.contextmanager
def opened(path: Path, **facts: Any) -> Iterator[Folder]:
    with contextlib.closing(Folder(path, COLUMNS, FACTS | facts)) as folder:
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


@given(
    st.lists(st.tuples(st.text('a,"\r\n', max_size=6), st.text('b"\n', max_size=6)), max_size=4),
    st.integers(min_value=0),
)
def test_of_a_file_cut_anywhere_the_whole_records_remain(
    records: list[tuple[str, str]], cut: int
) -> None:
    file = io.StringIO(newline="")
    ends = [0]
    for record in records:
        csv.writer(file).writerow(record)
        ends.append(len(file.getvalue()))
    data = file.getvalue().encode()[: cut % (len(file.getvalue()) + 1)]
    assert len(whole_records(data)) == max(end for end in ends if end <= len(data))


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
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(InvalidInput, match="does not read"), opened(tmp_path):
        pass
    (tmp_path / "environment.json").unlink()
    with pytest.raises(InvalidInput, match="without an environment"), opened(tmp_path):
        pass
    assert (tmp_path / "sweep.csv").read_bytes() == b"cell,note\r\n"


def test_a_table_of_other_columns_is_not_gone_on_with(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "sweep.csv").write_bytes(b"cell,words\r\na,\r\n")
    with pytest.raises(InvalidInput, match="other columns"), opened(tmp_path):
        pass


def test_two_processes_do_not_write_one_run(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(InvalidInput, match="another process"), opened(tmp_path):
        pass
    with opened(tmp_path) as folder:
        assert folder.kept == 0
