"""The sweep and the workbench at full size, on whatever GPU is here."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import rmsnorm_raw as rr
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.errors import WrongResult
from rmsnorm_raw.stats import Outcome
from rmsnorm_raw.study import sweep as study
from rmsnorm_raw.study.cells import cells
from rmsnorm_raw.study.providers import providers
from rmsnorm_raw.study.summary import summary

pytestmark = pytest.mark.gpu

#: 67 MB moved, long enough for a steady time and quick to gate
PROBLEM = rr.Problem.forward(4096, 4096, "bf16")
SWEEP_LIMIT_S = 300
PEERS = ("quack", "liger", "torch")
FULL_SWEEP_LIMIT_S = 480


def test_the_90_cells_pass_at_full_size_in_under_5_minutes(gpu: Backend, tmp_path: Path) -> None:
    began = time.perf_counter()
    outcome = study.sweep(gpu, tmp_path)
    took_s = time.perf_counter() - began
    print("\n".join((f"\n{took_s:.0f} s", *summary(outcome))))
    assert outcome.failed == ()
    assert took_s < SWEEP_LIMIT_S
    with outcome.csv_path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    by_ladder = [row for row in rows if row["path"] == "ladder"]
    assert [(row["m"], row["rows_run"]) for row in by_ladder] == [
        (str(c.rows),) * 2 for c in cells()
    ]
    for row in rows:
        assert row["simulated"] == "false"
        assert int(row["samples"]) >= 12
        assert float(row["gbps"]) > 0
        matched = "copy" if row["op"] == "fwd" else "2r1w"
        assert row["pct_matched"] == row[f"pct_{matched}"]
        # nothing moves its bytes much faster than the best probe, unless it was found in cache
        assert 0 < float(row["pct_best"]) < 105
    facts = json.loads(outcome.environment_path.read_text(encoding="utf-8"))
    assert set(facts["roofline_opening"]) == set(facts["roofline_closing"])
    assert facts["suspect"] == (facts["drift_pct"] > 2)


def test_the_full_sweep_beside_three_peers_takes_8_minutes_at_most(
    gpu: Backend, tmp_path: Path
) -> None:
    if missing := [p.missing() for p in providers() if p.name in PEERS and p.missing()]:
        pytest.skip("; ".join(map(str, missing)))
    command = ("from rmsnorm_raw.cli import app; app()", "sweep", "--providers", ",".join(PEERS))
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", *command, "--allow-busy", "--out", str(tmp_path)], check=True
    )  # this process is on the GPU too
    took_s = time.perf_counter() - began
    with (tmp_path / "sweep.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    by_provider = Counter(row["provider"] for row in rows if row["path"] != "tuned")
    assert by_provider == dict.fromkeys(("ours", *PEERS), 90)
    assert took_s <= FULL_SWEEP_LIMIT_S


def test_a_kernel_is_neither_faster_nor_slower_than_itself(gpu: Backend) -> None:
    kernel = rr.build(PROBLEM, backend=gpu)
    again = rr.compare(kernel, kernel)
    assert again.verdict in (Outcome.SAME, Outcome.UNCLEAR)
    assert again.low <= 1.01
    assert again.high >= 0.99


def test_compare_finds_a_kernel_that_idles(gpu: Backend) -> None:
    kernel = rr.build(PROBLEM, backend=gpu)
    spin = "for (const long long from = clock64(); clock64() - from < 20000;) {}"
    statement = "RR_LDS(lds);"
    assert statement in kernel.source.text
    slow = kernel.with_source(kernel.source.text.replace(statement, f"{statement} {spin}"))
    assert rr.compare(kernel, slow).verdict is Outcome.SLOWER


def test_a_wrong_kernel_has_no_time_and_no_comparison(gpu: Backend) -> None:
    kernel = rr.build(PROBLEM, backend=gpu)
    right, wrong = "out[e] = x[e] * rstd;", "out[e] = 1.01f * x[e] * rstd;"
    broken = kernel.with_source(kernel.source.text.replace(right, wrong))
    with pytest.raises(WrongResult):
        broken.bench()
    with pytest.raises(WrongResult):
        rr.compare(kernel, broken)


def test_a_call_gives_what_the_operation_gives(gpu: Backend) -> None:
    x, dout = (rr.array.randn((8, 4096), "bf16", seed=n, backend=gpu.name) for n in (0, 1))
    weight = rr.array.randn(4096, "fp32", seed=2, backend=gpu.name)
    forward = rr.build(rr.Problem.forward(8, 4096, "bf16", weight_dtype="fp32"), backend=gpu)
    backward = rr.build(rr.Problem.backward(8, 4096, "bf16", weight_dtype="fp32"), backend=gpu)
    fwd = forward(x, weight)
    pairs = [
        *zip(fwd, rr.rmsnorm_fwd(x, weight), strict=True),
        *zip(
            backward(dout, x, weight, fwd.rstd),
            rr.rmsnorm_bwd(dout, x, weight, fwd.rstd),
            strict=True,
        ),
    ]
    for got, want in pairs:
        assert type(got) is type(x)
        assert got.tobytes() == want.tobytes()
