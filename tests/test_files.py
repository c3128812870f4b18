"""Files that a report cannot be made of: each is one message that names the place."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_report import RESULTS, Row, beside_the_ladder, command, rows_of, some_rows, write_run

from rmsnorm_raw.study.files import read_run

SEARCHES = ("tune.csv", "tuned_vs_ladder.csv")


def search_rows(name: str) -> list[Row]:
    """A table of searches with rows of both kinds: with figures and without."""
    return rows_of(RESULTS / "tune" / name) if name == "tune.csv" else list(beside_the_ladder())


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", some_rows())


def is_refused(folder: Path, *said: str) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, output = command(folder)
    assert code == 2, output[-500:]
    assert all(words in output for words in said), output
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


# ---- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "text"),
    [
        *(("median_us", text) for text in ("-3", "0", "nan", "inf", "1e400", "1e13", "fast", " ")),
        *(("low_us", text) for text in ("-3", "nan")),
        ("high_us", "inf"),
        ("times_us", "3.0 nan 3.1"),
        *(("gbps", text) for text in ("-1", "inf", "1e7")),
        *(("pct_matched", text) for text in ("nan", "inf", "-1", "1000.1", "1e9")),
        *(("rows_run", text) for text in ("0", "-1", "4097", "many")),
        *(("m", text) for text in ("0", "many", "4_096", "9" * 5000)),
        ("n", ""),
        ("op", "sideways"),
        ("provider", " "),
        ("provider", ""),
        ("provider", "ours tuned"),
        ("verdict", ""),
    ],
)
def test_a_figure_that_makes_no_sense_is_refused(tmp_path: Path, column: str, text: str) -> None:
    rows = [row for row in some_rows() if row["m"] == "4096"]
    rows[1] = rows[1] | {column: text}
    is_refused(write_run(tmp_path, rows), f"{tmp_path / 'perf.csv'}, line 3, row 2", column)


@pytest.mark.parametrize("column", ["act", "weight"])
def test_a_dtype_that_is_none_is_refused(tmp_path: Path, column: str) -> None:
    rows = some_rows()
    rows[0] = rows[0] | {column: "int3"}
    is_refused(write_run(tmp_path, rows), "perf.csv, line 2, row 1", "dtype 'int3' is not")


def test_a_path_that_is_none_is_refused(tmp_path: Path) -> None:
    rows = [row | {"path": "../../up"} for row in some_rows()]  # it would name a file
    is_refused(write_run(tmp_path, rows, "sweep.csv"), "sweep.csv, line 2, row 1", "path")


def test_speeds_that_round_to_0_are_none_of_these(tmp_path: Path) -> None:
    rows = [row | {"gbps": "0.0", "pct_matched": "0.00"} for row in some_rows()]
    folder = write_run(tmp_path, rows)
    assert {row.gbps for row in read_run(folder).timings} == {0.0}
    assert command(folder)[0] == 0


def test_other_rows_in_one_cell_are_refused(tmp_path: Path) -> None:
    rows = some_rows()
    cell = {name: rows[0][name] for name in ("op", "m", "n", "act", "weight")}
    last = max(i for i, row in enumerate(rows) if cell.items() <= row.items())
    rows[last] = rows[last] | {"rows_run": "17"}
    is_refused(write_run(tmp_path, rows), f"row {last + 1}", "rows_run is 17")


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["perf.csv", *SEARCHES])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xfe", "line 1, is not UTF-8"),
        ("op,m\n".encode("utf-16"), "line 1, is not UTF-8"),
        (b"op,m\nfwd,\xe9\n", "line 2, is not UTF-8"),
        (b"a,b\n1,2\n", "line 1, has no column"),
        (b"a;b\n1;2\n", "line 1, has no column"),
    ],
)
def test_a_foreign_table_is_refused(run_folder: Path, name: str, data: bytes, said: str) -> None:
    (run_folder / name).write_bytes(data)
    is_refused(run_folder, name, said)


@pytest.mark.parametrize("fields", [b",1,2", b""])
def test_a_row_of_other_fields_than_titles_is_refused(run_folder: Path, fields: bytes) -> None:
    path = run_folder / "perf.csv"
    lines = path.read_bytes().split(b"\r\n")
    lines[3] = lines[3] + fields if fields else lines[3].rpartition(b",")[0]
    path.write_bytes(b"\r\n".join(lines))
    is_refused(run_folder, f"{path}, line 4, row 3")


@pytest.mark.parametrize("last", ["note", "times_us"])
@pytest.mark.parametrize("closed", [True, False])
def test_a_quote_too_many_takes_no_rows_away(tmp_path: Path, last: str, closed: bool) -> None:
    every = some_rows("ours")
    columns = [*(name for name in every[0] if name != last), last]
    rows = [{name: row[name] for name in columns} for row in every]
    if last == "note":
        rows[1]["note"] = "a note\nof two lines, fwd,bwd"
        if closed:
            rows[9]["note"] = "one, quoted"
    folder = write_run(tmp_path, rows)
    assert len(read_run(folder).timings) == len(rows)
    lines = (folder / "perf.csv").read_bytes().split(b"\r\n")
    before, comma, after = lines[3].rpartition(b",")
    lines[3] = before + comma + b'"' + after
    (folder / "perf.csv").write_bytes(b"\r\n".join(lines))
    is_refused(folder, "perf.csv, line", "a quote is missing or too many")


def test_a_column_that_stands_twice_is_refused(run_folder: Path) -> None:
    path = run_folder / "perf.csv"
    path.write_bytes(path.read_bytes().replace(b"p10_us", b"low_us", 1))
    is_refused(run_folder, "names a column twice")


def test_a_field_without_end_is_refused_at_its_line(tmp_path: Path) -> None:
    rows = some_rows()
    rows[0] = rows[0] | {"note": "two\nlines"}
    rows[1] = rows[1] | {"note": "x" * 200_000}
    is_refused(write_run(tmp_path, rows), "perf.csv, line 4, row 2", "field larger than")


def test_an_editors_mark_at_the_beginning_is_no_column(run_folder: Path) -> None:
    whole = read_run(run_folder)
    path = run_folder / "perf.csv"
    path.write_bytes("\ufeff".encode() + path.read_bytes())
    assert read_run(run_folder).series == whole.series == ("ours", "quack")


def test_a_piece_of_a_row_may_end_in_half_a_character(tmp_path: Path) -> None:
    rows = some_rows()
    del rows[-1]["times_us"]
    names = [name for name in rows[0] if name != "times_us"]
    rows = [{name: row[name] for name in names} for row in rows]
    rows[-1]["prepare_s"] = "µ"
    folder = write_run(tmp_path, rows)
    data = (folder / "perf.csv").read_bytes().removesuffix(b"\xb5\r\n")
    (folder / "perf.csv").write_bytes(data)
    assert data.endswith(b"\xc2")
    torn = read_run(folder)
    assert torn.torn
    assert len(torn.timings) == len(rows) - 1


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize(
    "change",
    [
        {"op": "sideways"}, {"m": "many"}, {"act": "int3"},
        {"tuned_us": "nan", "cold_ratio": "nan"}, {"ladder_us": "-1", "steady_low": "-1"},
    ],
)  # fmt: skip
def test_a_damaged_row_of_a_search_is_refused(
    run_folder: Path, name: str, change: dict[str, str]
) -> None:
    rows = search_rows(name)
    index = next(
        i for i, row in enumerate(rows) if row.get("regime") or row.get("verdict") == "TUNED"
    )
    rows[index] |= {column: text for column, text in change.items() if column in rows[index]}
    write_run(run_folder, rows, name)
    is_refused(run_folder, f"{run_folder / name}, line {index + 2}, row {index + 1}")


@pytest.mark.parametrize("column", ["regime", "ladder_us", "tuned_us"])
def test_a_search_has_both_times_or_none(run_folder: Path, column: str) -> None:
    rows = search_rows("tuned_vs_ladder.csv")
    timed = next(row for row in rows if row["regime"])
    timed[column] = ""
    write_run(run_folder, rows, "tuned_vs_ladder.csv")
    is_refused(run_folder, "tuned_vs_ladder.csv, line", column)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_piece_of_a_searchs_row_is_refused(run_folder: Path, name: str) -> None:
    write_run(run_folder, search_rows(name), name)
    data = (run_folder / name).read_bytes()
    (run_folder / name).write_bytes(data[:-3])
    is_refused(run_folder, name, "ends in a piece of a row")


# ---- environment.json ----------------------------------------------------------------------------

PROBE = {"gbps": 4000.0, "median_us": 500.0}
PROBES = {"copy": PROBE, "write": PROBE, "2r1w": PROBE}


@pytest.mark.parametrize("name", ["roofline_opening", "roofline_closing", "roofline_resumed"])
@pytest.mark.parametrize(
    "probes",
    [
        {"copy": {}},
        [1],
        {"copy": PROBE},
        PROBES | {"copy": {"median_us": 500.0}},
        PROBES | {"copy": 5},
        *(PROBES | {"copy": PROBE | {"gbps": gbps}} for gbps in (0, -1, 1e9, "fast", None)),
        PROBES | {"write": PROBE | {"median_us": "fast"}},
    ],
)
def test_probes_that_are_none_are_refused(tmp_path: Path, name: str, probes: Any) -> None:
    fact = [probes] if name == "roofline_resumed" else probes
    folder = write_run(tmp_path, some_rows(), change=lambda facts: facts.update({name: fact}))
    is_refused(folder, "environment.json is not of a run", name)


@pytest.mark.parametrize(
    "facts",
    [
        {"command": 5}, {"command": [5]}, {"tuned": 5}, {"timing_protocol": "two"},
        {"device": ["H200"]}, {"drift_pct": float("nan")}, {"os": float("inf")}, {"os": "\ud800"},
        {"roofline_resumed": 5},
    ],
)  # fmt: skip
def test_facts_that_are_none_are_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    folder = write_run(tmp_path, some_rows(), change=lambda known: known.update(facts))
    is_refused(folder, "environment.json is not of a run")


@pytest.mark.parametrize("text", ["[]", "{\n,", "\xff", "[" * 100_000])
def test_what_is_no_environment_is_refused(run_folder: Path, text: str) -> None:
    (run_folder / "environment.json").write_bytes(text.encode("latin-1"))
    is_refused(run_folder, "environment.json is not of a run")


def test_compilers_that_are_no_text_are_shown_as_they_are(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, some_rows(), change=lambda facts: facts.update(compilers={"c++": [5, 6]})
    )
    assert command(folder)[0] == 0
    assert "c++: 5" in (folder / "report.md").read_text(encoding="utf-8")


# ---- what cannot be read -------------------------------------------------------------------------


def forbid(monkeypatch: pytest.MonkeyPatch, name: str, method: str) -> None:
    """One file, as a user without rights finds it; root reads whatever its mode says."""
    plain: Callable[..., Any] = getattr(Path, method)

    def refusing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path, *args, **kwargs)

    monkeypatch.setattr(Path, method, refusing)


@pytest.mark.parametrize("name", ["perf.csv", "environment.json", "tune.csv"])
@pytest.mark.parametrize("method", ["read_bytes", "is_file"])
@pytest.mark.parametrize("check", [[], ["--check"]])
def test_a_file_that_may_not_be_read_is_named(
    run_folder: Path, name: str, method: str, check: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_folder / "tune.csv").write_bytes((RESULTS / "tune/tune.csv").read_bytes())
    forbid(monkeypatch, name, method)
    code, said = command(run_folder, *check)
    assert code == 2
    assert f"{run_folder / name} cannot be read: Permission denied" in said
    assert not list(run_folder.glob("report*"))


@pytest.mark.parametrize("name", ["report.html", "report.md", "roofline.svg"])
def test_a_page_that_may_not_be_read_is_named(
    run_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(run_folder)[0] == 0
    forbid(monkeypatch, name, "read_bytes")
    code, said = command(run_folder, "--check")
    assert code == 2
    assert f"{name} cannot be read: Permission denied" in said


def test_the_committed_runs_are_none_of_these() -> None:
    for path in sorted(RESULTS.parent.rglob("environment.json")):
        if any((path.parent / name).is_file() for name in ("sweep.csv", "perf.csv")):
            run = read_run(path.parent)
            assert run.environment == json.loads(path.read_text(encoding="utf-8"))
            assert all(row.us is not None for row in run.timings if row.verdict == "PASS")
