"""``--out`` of the suites: perf.csv and environment.json, over nothing that lies there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rmsnorm_raw.errors import RmsnormRawError
from rmsnorm_raw.study import sweep
from rmsnorm_raw.study.folder import Folder, require_free
from rmsnorm_raw.study.table_file import TableFile

TABLE = TableFile("perf.csv", (*sweep.COLUMNS, "prepare_s"), sweep.KEY)


def require_usable(config: pytest.Config, out: Path) -> None:
    """Refuse a folder, or a command line, before anything is collected; makes the folder.

    Raises:
        UsageError: it has results, or cannot be made, or several processes would write there.
    """
    if config.getoption("dist", "no") != "no":
        raise pytest.UsageError("--out is of one process, which times one call at a time: no -n")
    try:
        out.mkdir(parents=True, exist_ok=True)
        require_free(out)
    except OSError as error:
        raise pytest.UsageError(
            f"--out {out}: {error.strerror}; give a folder that you can write"
        ) from error
    except RmsnormRawError as error:
        raise pytest.UsageError(f"--out: {error}") from error


class OutFolder:
    """A :class:`.folder.Folder` whose errors end the session; with no path it does nothing."""

    def __init__(self, path: Path | None, facts: Mapping[str, object]) -> None:
        self._folder: Folder | None = None
        if path is not None:
            with _or_exit():
                self._folder = Folder(path, TABLE, facts, goes_on=False)

    def append(self, row: dict[str, str]) -> None:
        """Write a row at once, so that an interrupted session keeps what it has."""
        if self._folder is not None:
            with _or_exit():
                self._folder.append(row)

    def record(self, facts: dict[str, Any], *, finished: bool) -> None:
        """Write these facts too."""
        if self._folder is not None:
            with _or_exit():
                (self._folder.finish if finished else self._folder.record)(**facts)


@contextlib.contextmanager
def _or_exit() -> Iterator[None]:
    try:
        yield
    except RmsnormRawError as error:
        pytest.exit(str(error), returncode=2)
