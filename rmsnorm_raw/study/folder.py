"""A run's folder, which survives whatever ends the run: sweep.csv and environment.json.

``environment.json`` is renamed into place, and says from the first moment what the run is and what
it stands on. A row is one write, on the disk before the next cell begins. So after a kill there are
whole rows and at most a piece of one, which is dropped; the others are kept, and a run is gone on
with where everything that a time depends on is what it was.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
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

Row = dict[str, str]

#: facts that must be the same for rows of one table, beside the GPUs' drivers
SAME = (
    "python", "os", "cpu", "packages", "compilers", "rocm_version", "variables", "backend",
    "device", "toolchain", "providers", "rows_cap", "budget_s", "cells", "tuned", "code",
)  # fmt: skip
#: what changes by the minute, and says most right after the device was busy
CLOCKS = ("nvidia_gpus", "amd_tools")


class CannotWrite(RmsnormRawError, OSError):
    """A file of the run cannot be written; the message says what is kept and how to go on."""


class Folder:
    """A run's files, open for one process.

    Attributes:
        rows: of sweep.csv, those kept from before first.
        kept: how many were kept.
        facts: of environment.json; :meth:`record` writes them.
    """

    def __init__(self, path: Path, columns: Sequence[str], facts: Mapping[str, object]) -> None:
        """Begin a run, or go on with an unfinished one.

        Args:
            path: of the folder; created if need be.
            columns: of sweep.csv.
            facts: what the run is, beside :func:`.environment.collect`.

        Raises:
            InvalidInput: the folder holds something else, a finished run, one that another process
                is at, or one that something else stood behind.
            CannotWrite: it cannot be written.
        """
        self.csv_path, self.environment_path = path / "sweep.csv", path / "environment.json"
        self._columns = columns
        self._began = time.monotonic()
        self.rows: list[Row] = []
        now = json.loads(json.dumps({**environment.collect(), "code": code_digest(), **facts}))
        try:
            path.mkdir(parents=True, exist_ok=True)
            before = self._earlier()
            self._file = os.open(self.csv_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise self._cannot(error) from error
        try:
            self._begin(before, now)
        except BaseException:
            self.close()
            raise

    def _begin(self, before: dict[str, Any] | None, now: dict[str, Any]) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidInput(f"another process is at {self.csv_path}: let it end") from error
        self.facts: dict[str, Any] = now if before is None else before
        if before is not None:
            if changes := list(differences(identity(before), identity(now))):
                raise InvalidInput(
                    f"the unfinished run of {self.csv_path} stood on something else, and its rows "
                    "would not compare with new ones. Mend that, or give another folder:\n  "
                    + "\n  ".join(changes)
                )
            self._keep()
        self.kept = len(self.rows)
        self.facts.setdefault("sessions", []).append(
            {"began_utc": _now(), "command": now["command"], "rows_kept": self.kept}
        )
        self.record(finished=False)
        if self.kept == 0:
            os.ftruncate(self._file, 0)
            self._write(self._columns)

    def append(self, row: Row) -> None:
        """Write one row through to the disk.

        Raises:
            CannotWrite: a full disk, say.
        """
        self._write([row[column] for column in self._columns])
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
        if not self.environment_path.exists():
            if self.csv_path.exists():
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
        if "sessions" not in facts:
            raise InvalidInput(
                f"{self.environment_path} is not a sweep's of this version: give another folder"
            )
        if facts["finished"]:
            raise InvalidInput(f"{self.csv_path} is finished: give another folder")
        return dict(facts)

    def _keep(self) -> None:
        data = self.csv_path.read_bytes()
        whole = whole_records(data)
        table = csv.DictReader(io.StringIO(whole.decode(), newline=""))
        if whole and tuple(table.fieldnames or ()) != tuple(self._columns):
            raise InvalidInput(f"{self.csv_path} has other columns: give another folder")
        self.rows = list(table)
        os.ftruncate(self._file, len(whole))

    def _write(self, fields: Sequence[str]) -> None:
        line = io.StringIO()
        csv.writer(line).writerow(fields)
        data = line.getvalue().encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            raise self._cannot(error) from error

    def _cannot(self, error: OSError) -> CannotWrite:
        return CannotWrite(
            f"{self.csv_path.parent} cannot be written: {error.strerror}. {len(self.rows)} rows "
            "are kept; make room there, or make it writable, and give the same command with this "
            "--out"
        )


def whole_records(data: bytes) -> bytes:
    """The records of a CSV file up to the last that is whole; a note may have several lines.

    A record ends with CR LF, as the writer ends it, outside quotes; a quote in a field is doubled.
    """
    end = quotes = 0
    at = 0
    for line in data.splitlines(keepends=True):
        at += len(line)
        quotes += line.count(b'"')
        if line.endswith(b"\r\n") and quotes % 2 == 0:
            end = at
    return data[:end]


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
