"""A run's CSV file: whole rows are read, a piece is left out, and a damaged line is named."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.study.table_file import TableFile, record, whole_records

TABLE = TableFile(
    "t.csv", ("who", "m", "us", "note"), ("who", "m"), ("m", "us"),
    planned={(who, str(m)) for who in ("ours", "quack") for m in range(1, 9)},
)  # fmt: skip
WHOLE = record(TABLE.columns) + record(("ours", "1", "2.5", "a,b")) + record(("quack", "1", "", ""))
ROWS = [
    {"who": "ours", "m": "1", "us": "2.5", "note": "a,b"},
    {"who": "quack", "m": "1", "us": "", "note": ""},
]


def read(path: Path, data: bytes) -> tuple[list[dict[str, str]], int]:
    path.write_bytes(data)
    return TABLE.read(path)


@pytest.mark.parametrize(
    "piece",
    [b"", b"ours,2", b'ours,2,,"half', b'ours,2,,"a\r\nb, c\n', b"ours,2,,\xc3", b"ours,2\r"],
)
@pytest.mark.parametrize("line_end", [b"\r\n", b"\n"])
def test_whole_rows_are_read_and_a_piece_at_the_end_is_not(
    line_end: bytes, piece: bytes, tmp_path: Path
) -> None:
    whole = WHOLE.replace(b"\r\n", line_end)
    assert read(tmp_path / "t.csv", whole + piece) == (ROWS, len(whole))


@pytest.mark.parametrize("data", [b"", b"who,m", WHOLE[:16]])
def test_a_table_may_end_before_its_first_row(data: bytes, tmp_path: Path) -> None:
    assert read(tmp_path / "t.csv", data)[0] == []


@pytest.mark.parametrize("data", [b"who,us\r\n", b"hello", WHOLE.replace(b"\r\n", b"\r")])
def test_other_columns_are_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"t\.csv has other columns"):
        read(tmp_path / "t.csv", data)


def test_a_speed_may_have_been_rounded_to_zero(tmp_path: Path) -> None:
    path, table = tmp_path / "t.csv", replace(TABLE, numbers=("m",), speeds=("us",))
    path.write_bytes(WHOLE + b"ours,2,0.00,\r\n")
    assert len(table.read(path)[0]) == 3
    path.write_bytes(WHOLE + b"ours,2,-0.01,\r\n")
    with pytest.raises(InvalidInput, match="no positive number"):
        table.read(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"ours,2,1,\xff\r\n", "it is not UTF-8"),
        (b"ours,2,1\r\n", "it has not 4 fields"),
        (b"ours,2,1,a,b\r\n", "it has not 4 fields"),
        (b"ours,2,fast,\r\n", "us is 'fast', no positive number"),
        (b"ours,2,1 nan,\r\n", "us is 'nan', no positive number"),
        (b"ours,2,inf,\r\n", "us is 'inf', no positive number"),
        (b"ours,2,-3,\r\n", "us is '-3', no positive number"),
        (b"ours,2,0,\r\n", "us is '0', no positive number"),
        (b"ours,1,3,\r\n", "ours 1 has a row above it"),
        (b"ours,9,3,\r\n", "ours 9 is no row of this run"),
        (b"ours,2,3," + b"x" * 200_000 + b"\r\n", "field larger than field limit"),
        (b'ours,2,3,"a\r\nours,3,3,\r\nours,4,3,\r\n', "a quote or a line end is missing"),
        (b"ours,2,3,\rours,3,3,\r", "a quote or a line end is missing"),
    ],
)
def test_a_damaged_line_is_named(line: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(tmp_path / "t.csv", WHOLE + line)
    assert str(refused.value).startswith(f"{tmp_path / 't.csv'}, line 4: {said}")


@given(
    st.lists(st.tuples(st.text('a,"\r\n', max_size=6), st.text('b"\n', max_size=6)), max_size=4),
    st.sampled_from(["\r\n", "\n"]),
    st.integers(min_value=0),
)
def test_of_a_file_cut_anywhere_the_whole_records_remain(
    records: list[tuple[str, str]], line_end: str, cut: int
) -> None:
    file = io.StringIO(newline="")
    ends = [0]
    for each in records:
        csv.writer(file, lineterminator=line_end).writerow(each)
        ends.append(len(file.getvalue()))
    data = file.getvalue().encode()[: cut % (len(file.getvalue()) + 1)]
    assert len(whole_records(data)) == max(end for end in ends if end <= len(data))
