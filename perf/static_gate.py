"""The static gate over whole spaces: every kept config of four problems, by each ROCm release.

    python -m perf.static_gate [--out DIR] [--arch gfx950] [--processes N]

No device is needed. Compiles what the space keeps for 32768x8192 and 32768x1024 bf16, forward and
backward, with ROCm 7.0.0 and 7.2.4, holds the machine code against the config
(rmsnorm_raw/backends/static_gate.py), and writes gate.csv and environment.json. Exit code 1 if
anything has a fault. With every config present so is every neighbour in one knob, and a knob that
does nothing shows.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rmsnorm_raw import environment
from rmsnorm_raw.backends.offline import ARCHITECTURES, OfflineBackend, OfflineCode
from rmsnorm_raw.backends.rocm_libraries import WHEELS, fetch_wheel
from rmsnorm_raw.backends.static_gate import gate, inert_knobs
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import CompileError
from rmsnorm_raw.launch import launches
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render
from rmsnorm_raw.space import enumerate_configs
from rmsnorm_raw.study.cells import problem_columns

PROBLEMS = tuple(
    make(32768, cols, "bf16")
    for make in (Problem.forward, Problem.backward)
    for cols in (8192, 1024)
)
COLUMNS = (
    "arch", "rocm", "op", "m", "n", "act", "weight", "config", "kernel", "vgpr", "agpr", "sgpr",
    "spills", "lds_bytes", "waves_per_simd", "limit", "cu_bytes_before_first_wait", "verdict",
)  # fmt: skip


class Job(NamedTuple):
    """Configs of a problem that have one source, to be compiled once by one release."""

    problem: Problem
    configs: tuple[Config, ...]
    arch: str
    release: str


class Outcome(NamedTuple):
    """What came of a job: its rows of the table, and the digest of its code ("" without any)."""

    job: Job
    rows: list[dict[str, object]]
    digest: str


def jobs(problems: Iterable[Problem], arch: str, releases: Iterable[str]) -> Iterator[Job]:
    """All that is to be compiled."""
    for problem in problems:
        alike: dict[str, list[Config]] = {}
        for config in enumerate_configs(problem, KNOWN[arch]).kept:
            alike.setdefault(render(problem, config, KNOWN[arch]).digest, []).append(config)
        for release in releases:
            yield from (Job(problem, tuple(each), arch, release) for each in alike.values())


def run(job: Job) -> Outcome:
    """Compile, hold against the config, and say what each of its launches takes."""
    backend = OfflineBackend(job.arch, fetch_wheel(job.release))
    first = job.configs[0]
    facts: dict[str, object] = {
        **problem_columns(job.problem), "arch": job.arch, "rocm": job.release, "op": job.problem.op,
    }  # fmt: skip
    try:
        binary = build(render(job.problem, first, backend.device), backend)
    except CompileError as error:
        rows = [facts | {"config": c.slug, "verdict": f"compile: {error}"} for c in job.configs]
        return Outcome(job, rows, "")
    code = binary.code
    assert isinstance(code, OfflineCode)
    rows = []
    for config in job.configs:
        verdict = "; ".join(gate(job.problem, config, code)) or "passed"
        for it in launches(job.problem, config, binary):
            kernel = code.kernels[it.entry_point]
            taken = kernel.launched(it.grid, it.block, it.lds_bytes)
            rows.append(
                facts
                | {
                    "config": config.slug, "kernel": it.entry_point, "vgpr": kernel.vgpr,
                    "agpr": kernel.agpr, "sgpr": kernel.sgpr,
                    "spills": kernel.vgpr_spills + kernel.sgpr_spills, "lds_bytes": it.lds_bytes,
                    "waves_per_simd": taken.waves_per_simd, "limit": taken.limit,
                    "cu_bytes_before_first_wait": taken.cu_bytes_before_first_wait,
                    "verdict": verdict,
                }
            )  # fmt: skip
    return Outcome(job, rows, code.code_digest)


def inert(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Knobs that do nothing, of each problem by each release."""
    compiled: dict[tuple[Problem, str, str], dict[Config, str]] = {}
    for job, _, digest in outcomes:
        if digest:
            one = compiled.setdefault((job.problem, job.arch, job.release), {})
            one |= dict.fromkeys(job.configs, digest)
    for (problem, arch, release), digests in compiled.items():
        for fault in inert_knobs(problem, KNOWN[arch], digests):
            yield f"{arch} ROCm {release} {problem}: {fault}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, or 1 where a config has a fault."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("python -m perf.static_gate", description=about)
    parser.add_argument("--out", type=Path, help="by default rmsnorm-raw-results/<arch>-static")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="gfx950", help="default gfx950")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="by default one for each CPU"
    )
    given = parser.parse_args(arguments)
    for release in WHEELS:
        fetch_wheel(release)
    todo = list(jobs(PROBLEMS, given.arch, WHEELS))
    begun, outcomes = time.monotonic(), []
    with ProcessPoolExecutor(given.processes) as pool:
        for done, outcome in enumerate(pool.map(run, todo, chunksize=4), 1):
            outcomes.append(outcome)
            if done % 50 == 0 or done == len(todo):
                print(f"[{done}/{len(todo)}] {time.monotonic() - begun:.0f} s", flush=True)
    rows = [row for outcome in outcomes for row in outcome.rows]
    faults = [
        " ".join(
            str(row[column]) for column in ("arch", "rocm", "op", "m", "n", "config", "verdict")
        )
        for row in rows
        if row["verdict"] != "passed"
    ]
    faults = list(dict.fromkeys((*faults, *inert(outcomes))))
    out = given.out or Path("rmsnorm-raw-results", f"{given.arch}-static")
    out.mkdir(parents=True, exist_ok=True)
    with (out / "gate.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    facts = {
        "command": environment.command(sys.argv),
        "compilers": [f"hiprtc of ROCm {release}" for release in WHEELS],
        "configs": len({(row["op"], row["n"], row["config"]) for row in rows}),
        "compilations": len(todo), "seconds": round(time.monotonic() - begun), "faults": faults,
    }  # fmt: skip
    environment.write(out / "environment.json", facts)
    print("\n".join((*faults, f"{len(rows)} rows, {len(faults)} faults: {out / 'gate.csv'}")))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
