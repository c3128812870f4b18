"""Every tuned record against the ladder's config, measured anew.

    python -m perf.tuned_vs_ladder [--out DIR]

Of all records in the user's cache that serve this device: the gate, then both configs interleaved,
``cold`` and, where clones exceed the cache, ``steady``, each in both orders. Writes
tuned_vs_ladder.csv and environment.json, and prints how many are FASTER and SLOWER, and geometric
means. Exit code 1 where a record is SLOWER beyond 1 %, or there is none.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from perf.command_line import start
from rmsnorm_raw import check, environment, ladder, module, stats, store
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.config import Config
from rmsnorm_raw.lab import Fault, Lab
from rmsnorm_raw.measure import TIMING_PROTOCOL, Limits
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.search import NOISE_PCT, REGIMES
from rmsnorm_raw.source import render
from rmsnorm_raw.study import sweep
from rmsnorm_raw.study.cells import problem_columns
from rmsnorm_raw.study.tuning import Row

COLUMNS = (
    "op", "m", "n", "act", "weight", "extras", "config", "ladder", "regime", "verdict", "tuned_us",
    "ladder_us", "ratio", "low", "high",
)  # fmt: skip
LIMITS = {
    "cold": Limits(goal_pct=0.5, min_samples=36, max_samples=120),
    "steady": Limits(goal_pct=0.5, min_samples=6, max_samples=12),
}
#: of a record that leaves the ladder in place
STAYS = "LADDER"


def contenders(backend: Backend) -> list[tuple[Problem, Config, Config]]:
    """(problem, the ladder's config, the one in use) at the lower end of each record's bucket."""
    problems = [key.problem for key in store.applying(backend)]
    return [
        (each, ladder.default_config(each, backend.device), store.resolve(each, backend)[0])
        for each in problems
    ]


def compared(problem: Problem, base: Config, tuned: Config, lab: Lab) -> Iterator[Row]:
    """A row for each regime; one without times where the ladder stays."""
    named = problem_columns(problem) | {"config": tuned.slug, "ladder": base.slug}
    if tuned == base:
        yield named | {"verdict": STAYS, "ratio": "1"}
        return
    for config in (base, tuned):
        binary = module.build(render(problem, config, lab.backend.device), lab.backend)
        check.require(check.verify(problem, config, binary), problem, config)
    for regime in REGIMES:
        times: dict[Config, tuple[float, ...]] = {base: (), tuned: ()}
        for order in ([base, tuned], [tuned, base]):
            taken = lab.time(problem, order, regime, LIMITS[regime])
            if isinstance(taken, Fault):
                if taken.kind == "constraints":
                    return  # no steady times: clones do not exceed the cache
                raise RuntimeError(f"{problem} {regime}: {taken.message}")
            times = {config: times[config] + taken[config].times_us for config in times}
        found = stats.compare(times[base], times[tuned], NOISE_PCT)
        yield named | {
            "regime": regime, "verdict": found.verdict.value,
            "tuned_us": f"{stats.percentile(times[tuned], 50):.3f}",
            "ladder_us": f"{stats.percentile(times[base], 50):.3f}", "ratio": f"{found.ratio:.4f}",
            "low": f"{found.low:.4f}", "high": f"{found.high:.4f}",
        }  # fmt: skip


def summary(rows: Sequence[Row]) -> list[str]:
    """Counts and geometric means, by operation and regime."""
    lines = []
    for op in dict.fromkeys(row["op"] for row in rows):
        stay = [row for row in rows if row["op"] == op and row["verdict"] == STAYS]
        for regime in REGIMES:
            tuned = [row for row in rows if row["op"] == op and row.get("regime") == regime]
            if not tuned:
                continue
            verdicts = Counter(row["verdict"] for row in tuned)
            counts = ", ".join(f"{count} {name}" for name, count in sorted(verdicts.items()))
            lines.append(
                f"{op} {regime}: {counts}; geometric mean {mean(tuned):.4f}x of these, "
                f"{mean([*tuned, *stay]):.4f}x with the {len(stay)} where the ladder stays"
            )
    return lines


def mean(rows: Sequence[Row]) -> float:
    """The geometric mean of the ratios."""
    return statistics.geometric_mean(float(row["ratio"]) for row in rows)


def main() -> int:
    """The command line."""
    backend, out = start("tuned_vs_ladder", __doc__)
    planned = contenders(backend)
    if not planned:
        print(f"no record in {store.folder()} serves {backend.device.name}: rmsnorm-raw tune --all")
        return 1
    print(f"{len(planned)} records on {backend.device.name}")
    sweep.build_all([(problem, config) for problem, *both in planned for config in both], backend)
    lab = Lab(backend)
    rows: list[Row] = []
    with (out / "tuned_vs_ladder.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for problem, base, tuned in planned:
            for row in compared(problem, base, tuned, lab):
                rows.append(row)
                table.writerow(dict.fromkeys(COLUMNS, "") | row)
                file.flush()
                where = f"{problem!s:34} {row.get('regime', ''):6} {row['verdict']:8}"
                print(f"{where} {float(row['ratio']):.3f}x  {row['config']}")
    lines = summary(rows)
    facts = {
        "command": "python -m perf.tuned_vs_ladder",
        "timing_protocol": TIMING_PROTOCOL,
        "summary": lines,
    }
    environment.write(out / "environment.json", facts)
    print("\n".join(lines))
    return int(any(row["verdict"] == stats.Outcome.SLOWER.value for row in rows))


if __name__ == "__main__":
    sys.exit(main())
