"""``rmsnorm-raw sweep``: what it says before, while and after it measures."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

from rmsnorm_raw import console
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.study import idle, origin, sweep
from rmsnorm_raw.study.summary import idle_line, printed, summary


def run(
    backend: Backend,
    out: Path | None,
    peers: Iterable[str],
    rows_cap: int | None,
    budget_s: float,
    allow_busy: bool,
) -> int:
    """The command; its exit code: 1 where a row failed.

    Raises:
        RmsnormRawError: whatever ends it before its time; see :func:`.sweep.sweep`.
    """
    chosen = origin.choose(peers)
    origins = [origin.find(provider) for provider in chosen]
    for found in origins:
        _say(str(found))
    with console.results(out, backend.device) as out_dir, console.progress() as step:
        outcome = sweep.sweep(
            backend, out_dir, chosen=chosen, origins=origins, rows_cap=rows_cap,
            budget_s=budget_s, look=functools.partial(_look, backend, allow_busy),
            opened=lambda: _say(f"writing to {out_dir}"), progress=step,
        )  # fmt: skip
    console.print_table(*printed(outcome.rows))
    print("\n".join(summary(outcome)))
    print(f"written: {outcome.csv_path}, {outcome.environment_path}")
    return int(bool(outcome.failed))


def _look(backend: Backend, allow_busy: bool) -> dict[str, object]:
    found = idle.check(backend.device, allow_busy=allow_busy)
    if line := idle_line(found):
        _say(line)
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
