"""The largest cells in steady, and what the forward leaves to a GEMM that follows it.

    python -m perf.steady [--out DIR]

At 32768x8192, of the ladder's configs: percent of the matched probe in ``cold`` and in ``steady``,
for the five dtype pairs; and the time of a GEMM after the forward, on its output and on other data,
beside the same after a forward without cache policies. Writes steady.csv and environment.json, the
probes and their drift in it; exit code 1 where a GEMM is more than 1 % slower.
"""

from __future__ import annotations

import csv
import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

try:
    import torch
except ModuleNotFoundError:
    sys.exit("perf.steady runs GEMMs in torch: pip install torch")

from perf.command_line import start
from rmsnorm_raw import bandwidth, environment, ops, workbench
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.measure import TIMING_PROTOCOL, measure
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.stats import Outcome, compare, percentile
from rmsnorm_raw.study import rooflines

SHAPE = (32768, 8192)
PAIRS = (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32"))
COLUMNS = ("what", "act", "weight", "config", "regime", "median_us", "low_us", "high_us", "percent")
GEMM_COLUMNS = 1024
GEMM_ROUNDS = 40
GEMM_WARM_UP = 4


def speeds(backend: Backend, roofline: bandwidth.Roofline) -> Iterator[dict[str, str]]:
    """A row for each operation, dtype pair and regime; percent is of the matched probe."""
    for make in (Problem.forward, Problem.backward):
        for act, weight in PAIRS:
            problem = make(*SHAPE, act, weight_dtype=weight)
            kernel = workbench.build(problem, "ladder", backend=backend)
            config, verdict = kernel.config, kernel.check(seed=1)
            for regime in ("cold", "steady"):
                taken = measure(
                    problem, config, kernel.binary, verdict, regime=regime, goal_pct=0.5
                )
                gbps = taken.gbps(problem.logical_bytes())
                percent = roofline.percent(gbps, "matched", problem.op)
                yield {
                    "what": problem.op, "act": act, "weight": weight, "config": config.slug,
                    "regime": regime, "median_us": f"{taken.median_us:.2f}",
                    "low_us": f"{taken.low_us:.2f}", "high_us": f"{taken.high_us:.2f}",
                    "percent": f"{percent:.2f}",
                }  # fmt: skip


def gemms(backend: Backend) -> Iterator[tuple[str, list[float], list[float]]]:
    """(which data, microseconds after the ladder's forward, after one without policies)."""
    problem = Problem.forward(*SHAPE, "bf16")
    ladder = default_config(problem, backend.device)
    plain = replace(ladder, load_policy="default", store_policy="default")
    rows, cols = SHAPE
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x, weight, b, other = make(rows, cols), make(cols), make(cols, GEMM_COLUMNS), make(cols, cols)
    y = torch.empty_like(x)

    def time_after(config: Any, a: torch.Tensor) -> float:
        torch.cuda._sleep(1_000_000)  # cycles, longer than the host takes to enqueue the rest
        ops.rmsnorm_fwd(x, weight, out=y, config=config)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.mm(a, b)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    for name, a in (("its output", y), ("other data", other)):
        times: dict[Any, list[float]] = {ladder: [], plain: []}
        for _ in range(GEMM_ROUNDS):
            for config in times:
                times[config].append(time_after(config, a))
        yield name, times[ladder][GEMM_WARM_UP:], times[plain][GEMM_WARM_UP:]


def main() -> int:
    """The command line."""
    backend, out = start("steady", __doc__)
    opening = bandwidth.roofline(backend)
    print(opening)
    slower = 0
    with (out / "steady.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for row in speeds(backend, opening):
            table.writerow(row)
            where = f"{row['what']:8} {row['act']}/{row['weight']} {row['regime']:6}"
            print(f"{where} {row['median_us']:>8} us {row['percent']:>6} %  {row['config']}")
        closing = bandwidth.remeasure(opening, backend)
        for name, ours, plain in gemms(backend):
            compared = compare(plain, ours)
            slower += compared.verdict is Outcome.SLOWER
            for regime, times in (("after ours", ours), ("after plain", plain)):
                table.writerow(
                    dict.fromkeys(COLUMNS, "")
                    | {"what": f"gemm on {name}", "regime": regime}
                    | {"median_us": f"{percentile(times, 50):.2f}"}
                )
            medians = f"{percentile(ours, 50):.1f} us, {percentile(plain, 50):.1f}"
            print(f"gemm on {name}, after ours and after plain: {compared} ({medians})")
    facts = {
        "command": "python -m perf.steady",
        "timing_protocol": TIMING_PROTOCOL,
        "roofline_opening": rooflines.roofline_facts(opening),
        **rooflines.closing_facts(opening, closing),
    }
    print(f"drift {facts['drift_pct']:.3f} %{', suspect' * facts['suspect']}")
    environment.write(out / "environment.json", facts)
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
