"""A run's folder, which survives whatever ends the run: a table and environment.json.

``environment.json`` is renamed into place, and says from the first moment what the run is and what
it stands on. A row is one write, on the disk before the next cell begins. So after a kill there are
whole rows and at most a piece of one, which is dropped; the others are kept, and a sweep is gone on
with where everything that a time depends on is what it was. Nothing is written over.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import rmsnorm_raw
from rmsnorm_raw import environment
from rmsnorm_raw.errors import InvalidInput, RmsnormRawError
from rmsnorm_raw.study.runs import CLOCKS, ENVIRONMENT, TABLES
from rmsnorm_raw.study.table_file import Row, TableFile, record

#: facts that must be the same for rows of one table, beside the GPUs' drivers
SAME = (
    "python", "os", "cpu", "packages", "compilers", "rocm_version", "variables", "backend",
    "device", "toolchain", "providers", "rows_cap", "budget_s", "cells", "tuned", "code",
)  # fmt: skip


class CannotWrite(RmsnormRawError, OSError):
    """A file of the run cannot be written, or read; the message says what is kept, what next."""


class Folder:
    """A run's files, open for one process.

    Attributes:
        rows: of the table, those kept from before first.
        kept: how many were kept.
        facts: of environment.json; :meth:`record` writes them.
    """

    def __init__(
        self, path: Path, table: TableFile, facts: Mapping[str, object], *, goes_on: bool = True
    ) -> None:
        """Begin a run, or go on with an unfinished one.

        Args:
            path: of the folder; created if need be.
            table: its CSV file.
            facts: what the run is, beside :func:`.environment.collect`.
            goes_on: whether an unfinished run is gone on with; else it is refused.

        Raises:
            InvalidInput: the folder holds something else, a finished run, one that another process
                is at, one that something else stood behind, or a damaged table. It is as it was.
            CannotWrite: it cannot be written, or read.
        """
        self.csv_path, self.environment_path = path / table.name, path / ENVIRONMENT
        self._table, self._goes_on = table, goes_on
        self._began = time.monotonic()
        self.rows: list[Row] = []
        now = json.loads(json.dumps({**environment.collect(), "code": code_digest(), **facts}))
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._earlier()  # what is refused is refused before a file is made
            self._file = os.open(self.csv_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise self._untouched(error) from error
        try:
            self._begin(now)
        except BaseException:
            self.close()
            raise

    def _begin(self, now: dict[str, Any]) -> None:
        whole = 0
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            before = self._earlier()
            if before is not None:
                if changes := list(differences(identity(before), identity(now))):
                    raise InvalidInput(
                        f"the unfinished run of {self.csv_path} stood on something else, and its "
                        "rows would not compare with new ones. Mend that, or give another folder:"
                        "\n  " + "\n  ".join(changes)
                    )
                self.rows, whole = self._table.read(self.csv_path)
        except BlockingIOError as error:
            raise InvalidInput(f"another process is at {self.csv_path}: let it end") from error
        except OSError as error:
            raise self._untouched(error) from error
        self.facts: dict[str, Any] = now if before is None else before
        self.kept = len(self.rows)
        self.facts.setdefault("sessions", []).append(
            {"began_utc": _now(), "command": now["command"], "rows_kept": self.kept}
        )
        self.record(finished=False)
        os.ftruncate(self._file, whole if self.kept else 0)
        if self.kept == 0:
            self._write(self._table.columns)

    def append(self, row: Row) -> None:
        """Write one row through to the disk.

        Raises:
            CannotWrite: a full disk, say.
        """
        self._write([row[column] for column in self._table.columns])
        self.rows.append(row)

    def record(self, **facts: object) -> None:
        """Write environment.json with these facts too.

        Raises:
            CannotWrite: a full disk, say; the file is as it was.
        """
        self.facts |= facts
        self.facts["sessions"][-1]["wall_s"] = round(time.monotonic() - self._began, 1)
        try:
            environment.replace_text(self.environment_path, json.dumps(self.facts, indent=2) + "\n")
        except OSError as error:
            raise self._cannot(error) from error

    def finish(self, **facts: object) -> None:
        """The last :meth:`record` of a run, with the clocks as they are now."""
        collected = environment.collect()
        self.record(**facts, **{name: collected[name] for name in CLOCKS}, finished=True)

    def close(self) -> None:
        """Let the files go."""
        os.close(self._file)

    def _earlier(self) -> dict[str, Any] | None:
        """The facts of the unfinished run that lies here; None for none."""
        folder, name = self.csv_path.parent, self.csv_path.name
        if not self._goes_on:
            require_free(folder)
            return None
        found = results_in(folder)
        if others := {*found} - {name, ENVIRONMENT}:
            raise InvalidInput(
                f"{folder} has {' and '.join(others)}, of something else: give another folder"
            )
        if ENVIRONMENT not in found:
            if name in found and self.csv_path.read_bytes() != self._table.header:
                raise InvalidInput(
                    f"{self.csv_path} lies there without an environment.json, so nobody knows what "
                    "it stands on: give another folder"
                )
            return None
        try:
            facts = json.loads(self.environment_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidInput(
                f"{self.environment_path} does not read ({error}): give another folder"
            ) from error
        try:
            identity(facts)
            facts["sessions"][-1]["wall_s"]
            finished = facts["finished"]
        except (AttributeError, LookupError, TypeError) as error:
            raise InvalidInput(
                f"{self.environment_path} is not a sweep's of this version: give another folder"
            ) from error
        if finished:
            raise InvalidInput(f"{self.csv_path} is finished: give another folder")
        return dict(facts)

    def _write(self, fields: Sequence[str]) -> None:
        data = record(fields)
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            raise self._cannot(error) from error

    def _cannot(self, error: OSError) -> CannotWrite:
        mend = "give the same command with this --out" if self._goes_on else "begin in a new folder"
        return CannotWrite(
            f"{self.csv_path.parent} cannot be written: {error.strerror}. {len(self.rows)} rows "
            f"are kept; make room there, or make it writable, and {mend}"
        )

    def _untouched(self, error: OSError) -> CannotWrite:
        where = error.filename or self.csv_path.parent
        return CannotWrite(
            f"{where} cannot be read and written: {error.strerror}. Nothing was changed: mend "
            "that, and give the same command again"
        )


def results_in(folder: Path) -> list[str]:
    """Which of a run's files lie in a folder; an empty table is none.

    Raises:
        OSError: it cannot be read.
    """
    found = [name for name in TABLES if _size(folder / name)]
    return [*found, *([ENVIRONMENT] if (folder / ENVIRONMENT).exists() else [])]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def require_free(folder: Path) -> None:
    """Refuse a folder in which a run's files lie.

    Raises:
        InvalidInput: they do.
        OSError: it cannot be read.
    """
    if found := results_in(folder):
        raise InvalidInput(
            f"{folder} has {' and '.join(found)} of another run, and nothing is written over: "
            "give another folder"
        )


def code_digest() -> str:
    """Of the package's files: the code that measured."""
    root = Path(rmsnorm_raw.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".h", ".csv", ".json"):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def identity(facts: Mapping[str, Any]) -> dict[str, object]:
    """What must be the same for rows of one table, by dotted name."""
    gpus, tools = (facts[name] for name in CLOCKS)
    same: dict[str, Any] = {name: facts[name] for name in SAME}
    same |= {"commit": facts["git"].get("commit"), "nvidia": environment.drivers(gpus)}
    return dict(_flat(same | {"amd": tools["amd-smi static"]}))


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    """A line for each name that has another value now."""
    for name in sorted({*before, *now}):
        old, new = (facts.get(name, "absent") for facts in (before, now))
        if old != new:
            yield f"{name}: it was {old}, and is {new} now"


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
