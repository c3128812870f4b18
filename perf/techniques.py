"""What each technique is worth: the ladder's config with one knob changed at a time.

    python -m perf.techniques [--out DIR]

Prints a table for 32768x8192 and 32768x1024 bf16, both operations, and writes techniques.csv,
techniques.md (the table of ARCHITECTURE.md) and environment.json. The ladder's config is timed
first and last; a change is its time over the mean of the two. Configs that the space refuses are
listed with the reason.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from perf.command_line import start
from rmsnorm_raw import environment
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.measure import TIMING_PROTOCOL, Samples, measure
from rmsnorm_raw.module import Binary, build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render
from rmsnorm_raw.space import PROGRAMS, reject_reason

COLUMNS = ("op", "m", "n", "technique", "config", "median_us", "low_us", "high_us", "change_pct")


def variants(base: Config, problem: Problem) -> Iterator[tuple[str, Config]]:
    """(technique, config) with one knob of ``base`` changed, and what has to change with it."""
    forward = problem.op == "forward"
    row = min(base.threads_per_row, 2 * base.block)  # of one block, where several share a row
    whole = replace(base, block=max(base.block, row), threads_per_row=row)
    resident = max(1, min(4, 512 // whole.block)) if forward else base.programs
    plain = replace(whole, path="registers", stages=0, bulk=False, reread=False, paced=False)
    if base.blocks_per_row > 1:
        yield "one block a row", whole
    yield "rows kept in registers", replace(plain, programs=0 if forward else base.programs)
    yield "ping-pong", replace(plain, path="pingpong", programs=resident)
    ring = replace(plain, path="lds", stages=3, programs=resident)
    yield "ring of 3, copied by lanes", replace(ring, load_policy="default")
    for stages in (2, 3, 4, 6):
        bulk = replace(ring, stages=stages, bulk=True, paced=base.paced)
        yield f"ring of {stages}, bulk copies", bulk
    yield "ring of 3, read again", replace(ring, bulk=True, reread=True, paced=base.paced)
    if base.bulk:
        yield "paced" if not base.paced else "not paced", replace(base, paced=not base.paced)
    yield "no policy", replace(base, load_policy="default", store_policy="default")
    yield "loads kept", replace(base, load_policy="keep", store_policy="default")
    yield "stores streamed", replace(base, load_policy="default", store_policy="stream")
    yield "loads kept, stores streamed", replace(base, load_policy="keep", store_policy="stream")
    yield "loads streamed", replace(base, load_policy="stream", store_policy="default")
    yield "8-byte vectors", replace(base, vec=8)
    if base.min_blocks:
        yield "registers for occupancy", replace(base, min_blocks=0)
    else:
        yield "registers for loads in flight", replace(base, min_blocks=1)
    for row in (base.threads_per_row // 4, base.threads_per_row // 2, *_wider(base)):
        block = base.block if base.blocks_per_row > 1 else max(base.block, row)
        yield f"{row} lanes a row", replace(base, block=block, threads_per_row=row)
    for block in (128, 256, 512, 1024):
        if block >= base.threads_per_row and block != base.block:
            yield f"blocks of {block}", replace(base, block=block)
    if not forward:
        early = base.finish == "early"
        yield ("late finish", replace(base, finish="kernel")) if early else (
            "early finish", replace(base, finish="early")
        )  # fmt: skip
        for programs in PROGRAMS:
            if programs != base.programs:
                yield f"{programs} programs", replace(base, programs=programs)


def _wider(base: Config) -> Iterator[int]:
    most = 8 * base.block if base.blocks_per_row > 1 else 1024
    yield from (f * base.threads_per_row for f in (2, 4) if f * base.threads_per_row <= most)


def run(problem: Problem, backend: Backend) -> Iterator[dict[str, str]]:
    """Rows of the table for one problem."""
    base = default_config(problem, backend.device)
    named = {config: technique for technique, config in variants(base, problem)}
    named.pop(base, None)  # a change to what it is already
    changed = [(technique, config) for config, technique in named.items()]
    planned = [("the ladder", base), *changed, ("the ladder again", base)]
    refused = {c: reject_reason(problem, backend.device, c) for _, c in planned}
    fits = [config for config, reason in refused.items() if reason is None]

    def built(config: Config) -> Binary:
        return build(render(problem, config, backend.device), backend)

    with ThreadPoolExecutor() as pool:
        binaries = dict(zip(fits, pool.map(built, fits), strict=True))
    times: dict[int, Samples] = {}
    for at, (_, config) in enumerate(planned):
        if config in binaries:
            verdict = verify(problem, config, binaries[config], seed=1)
            times[at] = measure(problem, config, binaries[config], verdict, budget_s=0.3)
    reference_us = (times[0].median_us + times[len(planned) - 1].median_us) / 2
    for at, (technique, config) in enumerate(planned):
        row = {"op": problem.op, "m": str(problem.rows), "n": str(problem.cols)}
        row |= {"technique": technique, "config": config.slug}
        if at in times:
            taken = times[at]
            row |= {"median_us": f"{taken.median_us:.2f}", "low_us": f"{taken.low_us:.2f}"}
            row |= {"high_us": f"{taken.high_us:.2f}"}
            row["change_pct"] = f"{100 * (taken.median_us / reference_us - 1):+.1f}"
        else:
            row["change_pct"] = f"({refused[config]})"
        yield row


def markdown(rows: list[dict[str, str]]) -> str:
    """A line for each technique, a column for each problem: the time, or its change in percent."""
    problems = list(dict.fromkeys((row["op"], row["m"], row["n"]) for row in rows))
    cells: dict[str, dict[tuple[str, str, str], str]] = {}
    for row in rows:
        problem = row["op"], row["m"], row["n"]
        text = "" if "median_us" not in row else f"{row['change_pct']} %"
        if row["technique"] == "the ladder":
            text = f"{float(row['median_us']):.1f} µs `{row['config']}`"
        cells.setdefault(row["technique"], {})[problem] = text
    lines = ["| | " + " | ".join(f"{op} {m}×{n}" for op, m, n in problems) + " |"]
    lines.append("|---" * (len(problems) + 1) + "|")
    for technique, each in cells.items():
        if any(each.values()):
            shown = (each.get(problem, "") for problem in problems)
            lines.append(f"| {technique} | " + " | ".join(shown) + " |")
    return "\n".join((*lines, ""))


def main() -> None:
    """The command line."""
    backend, out = start("techniques", __doc__)
    facts = {"command": "python -m perf.techniques", "timing_protocol": TIMING_PROTOCOL}
    environment.write(out / "environment.json", facts)
    rows = []
    with (out / "techniques.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for make in (Problem.forward, Problem.backward):
            for cols in (8192, 1024):
                problem = make(32768, cols, "bf16")
                print(f"\n{problem} on {backend.device.name}")
                for row in run(problem, backend):
                    rows.append(row)
                    table.writerow(row)
                    file.flush()
                    time = f"{row.get('median_us', '-'):>8} us {row['change_pct']:>7} %"
                    print(f"  {row['technique']:28} {time}  {row['config']}")
    (out / "techniques.md").write_text(markdown(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
