"""A run's CSV file: what may stand in it, how it is written, and read again after a kill."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rmsnorm_raw.errors import InvalidInput

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class TableFile:
    """A table by its name and its columns.

    Attributes:
        name: of the file.
        columns: in their order.
        key: the columns that name a row.
        numbers: columns that are empty, or have a positive number, or several with spaces between.
        speeds: likewise, but a number may have been rounded to 0.
        planned: the keys of the run's rows; None for any.
    """

    name: str
    columns: Sequence[str]
    key: Sequence[str]
    numbers: Sequence[str] = ()
    speeds: Sequence[str] = ()
    planned: Collection[tuple[str, ...]] | None = None

    @property
    def header(self) -> bytes:
        """The first record."""
        return record(self.columns)

    def key_of(self, row: Row) -> tuple[str, ...]:
        """What names a row."""
        return tuple(row[name] for name in self.key)

    def read(self, path: Path) -> tuple[list[Row], int]:
        """The rows of a file, and how many bytes they take with the header.

        The piece of a row that a kill may leave at the end is not among them.

        Raises:
            InvalidInput: it is no table of this kind, or damaged; the message names the line.
            OSError: it cannot be read.
        """
        data = path.read_bytes()
        whole = whole_records(data)
        self._require_one_piece(path, whole, data[len(whole) :])
        try:
            text = whole.decode()
        except UnicodeDecodeError as error:
            raise _damaged(path, _line(whole[: error.start]), "it is not UTF-8") from error
        reader = csv.DictReader(io.StringIO(text, newline=""))
        rows: dict[tuple[str, ...], Row] = {}
        try:
            if whole and tuple(reader.fieldnames or ()) != tuple(self.columns):
                raise _of_other_columns(path)
            for row in reader:
                if fault := self._fault(row) or self._twice(row, rows):
                    raise _damaged(path, reader.line_num, fault)
                rows[self.key_of(row)] = row
        except csv.Error as error:
            raise _damaged(path, reader.line_num + 1, str(error)) from error
        return list(rows.values()), len(whole)

    def _fault(self, row: Row) -> str:
        """What is wrong with a row; "" for nothing."""
        if None in row or None in row.values():
            return f"it has not {len(self.columns)} fields"
        for name in (*self.numbers, *self.speeds):
            for text in row[name].split():
                if not (_is_positive(text) or (name in self.speeds and _is_zero(text))):
                    return f"{name} is {text!r}, no positive number"
        if self.planned is not None and self.key_of(row) not in self.planned:
            return f"{' '.join(self.key_of(row))} is no row of this run"
        return ""

    def _twice(self, row: Row, before: Collection[tuple[str, ...]]) -> str:
        key = self.key_of(row)
        return f"{' '.join(key)} has a row above it" if key in before else ""

    def _require_one_piece(self, path: Path, whole: bytes, piece: bytes) -> None:
        """Nothing may be dropped but a piece of the last record."""
        if not whole and not self.header.startswith(piece):
            raise _of_other_columns(path)
        # a note may have several lines, but hardly one of as many fields as a row
        commas = len(self.columns) - 1
        if any(line.count(b",") >= commas for line in piece.splitlines()[1:]):
            raise _damaged(path, _line(whole), "a quote or a line end is missing or too many")


def record(fields: Sequence[str]) -> bytes:
    """A record as it is written."""
    text = io.StringIO()
    csv.writer(text).writerow(fields)
    return text.getvalue().encode()


def whole_records(data: bytes) -> bytes:
    """The records of a CSV file up to the last that is whole; a note may have several lines.

    A record ends with a line end outside quotes: CR LF, as the writer ends it, or LF, as an editor
    or git may leave it. A quote in a field is doubled.
    """
    end = quotes = 0
    at = 0
    for line in data.splitlines(keepends=True):
        at += len(line)
        quotes += line.count(b'"')
        if line.endswith(b"\n") and quotes % 2 == 0:
            end = at
    return data[:end]


def _of_other_columns(path: Path) -> InvalidInput:
    return InvalidInput(f"{path} has other columns: give another folder")


def _damaged(path: Path, line: int, what: str) -> InvalidInput:
    return InvalidInput(
        f"{path}, line {line}: {what}. Nothing was changed: mend that line, or give another folder"
    )


def _line(before: bytes) -> int:
    """The number of the line that stands after these bytes."""
    return before.count(b"\n") + 1


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _is_zero(text: str) -> bool:
    return text.strip("0.") == ""
