"""The bars of perf/bars.py, on runs of known times."""

from __future__ import annotations

import csv
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rmsnorm_raw.dtypes import SHORT_NAME
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study.cells import ARCHIVE_NAME, cells

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "perf")
    import bars

    module: ModuleType = bars
    return module


Times = dict[str, float]  # us by provider; nan: it failed its gate


def write_run(folder: Path, times: dict[Problem, Times], **facts: object) -> Path:
    """A run whose samples lie within 0.5 % of these times, on probes of 4000 GB/s."""
    folder.mkdir()
    rows = [
        row_of(problem, name, centre_us)
        for problem, by_provider in times.items()
        for name, centre_us in by_provider.items()
    ]
    with (folder / "perf.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    facts = {"simulated": False, "suspect": False, "beyond": False, "wall_s": 400.0} | facts
    (folder / "environment.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def row_of(problem: Problem, provider: str, centre_us: float) -> dict[str, object]:
    taken = [centre_us * (1 + 0.001 * step) for step in range(-5, 6)] * 3
    failed = math.isnan(centre_us)
    percent = problem.logical_bytes() / centre_us / 1e3 / 40
    assert problem.weight_dtype is not None
    return {
        "op": ARCHIVE_NAME[problem.op],
        "m": problem.rows,
        "n": problem.cols,
        "act": SHORT_NAME[problem.dtype],
        "weight": SHORT_NAME[problem.weight_dtype],
        "provider": provider,
        "verdict": "WrongResult" if failed else "PASS",
        "median_us": centre_us,
        "low_us": centre_us * 0.999,
        "high_us": centre_us * 1.001,
        **dict.fromkeys(("pct_copy", "pct_2r1w", "pct_matched"), f"{percent:.2f}"),
        "times_us": "" if failed else " ".join(f"{time:.4f}" for time in taken),
    }


def ideal(problem: Problem) -> Times:
    """Ours at 4000 GB/s, which every probe gives, and peers that are behind enough."""
    our_us = problem.logical_bytes() / 4e6 + 1
    behind = {"ours": 1.0, "quack": 1.4, "quack_searched": 1.2, "liger": 2.5, "torch": 2.5}
    return {name: our_us * factor for name, factor in behind.items()}


@pytest.fixture
def times() -> dict[Problem, Times]:
    return {problem: ideal(problem) for problem in cells()}


FORWARD = Problem.forward(32768, 4096, "bf16")
BACKWARD = Problem.backward(32768, 8192, "bf16")


@pytest.fixture
def judged(tmp_path: Path, bars: ModuleType) -> Callable[..., tuple[int, list[str]]]:
    folders = (tmp_path / f"run{number}" for number in itertools.count())

    def main(*runs: dict[Problem, Times], **facts: object) -> tuple[int, list[str]]:
        lines: list[str] = []
        written = [str(write_run(next(folders), times, **facts)) for times in runs]
        return bars.main(written, lines.append), lines

    return main


Judged = Callable[..., tuple[int, list[str]]]


def failures(lines: list[str]) -> set[str]:
    return {line for line in lines if line.startswith("FAIL")}


def test_a_run_that_holds_every_bar_passes(judged: Judged, times: dict[Problem, Times]) -> None:
    code, lines = judged(times)
    assert not failures(lines)
    assert code == 0
    # 90 cells, 5 means, 4 + 4 percentages, 4 + 4 dtype pairs, the session's seconds
    assert lines[-1].startswith(f"{90 + 5 + 8 + 8 + 1} bars hold, 0 fail")


def test_a_cell_behind_its_best_peer_fails_by_name(
    judged: Judged, times: dict[Problem, Times]
) -> None:
    times[FORWARD]["torch"] = 0.97 * times[FORWARD]["ours"]
    code, lines = judged(times)
    assert code == 1
    (line,) = failures(lines)
    assert line.startswith("FAIL fwd 32768x4096 bf16/bf16 / best peer: 0.97 [")
    assert "torch" in line


def test_a_ratio_whose_interval_reaches_its_bar_holds(
    judged: Judged, times: dict[Problem, Times]
) -> None:
    times[FORWARD]["torch"] = 0.989 * times[FORWARD]["ours"]
    assert judged(times)[0] == 0


@pytest.mark.parametrize(
    ("problem", "peer_us", "our_us", "holds"),
    [
        (Problem.forward(1, 4096, "bf16"), 4.7, 4.89, True),
        (Problem.forward(1, 4096, "bf16"), 4.7, 4.95, False),
        (Problem.forward(1, 4096, "bf16"), 10.1, 10.29, False),
        (Problem.backward(1, 4096, "bf16"), 4.9, 5.19, True),
        (Problem.backward(1, 4096, "bf16"), 4.9, 5.25, False),
    ],
)
def test_short_calls_have_their_slack_in_microseconds(
    problem: Problem, peer_us: float, our_us: float, holds: bool,
    judged: Judged, times: dict[Problem, Times],
) -> None:  # fmt: skip
    slower = dict.fromkeys(("quack", "quack_searched", "liger", "torch"), 2 * peer_us)
    times[problem] = {"ours": our_us, "compile": peer_us} | slower
    late = {line for line in failures(judged(times)[1]) if "best peer" in line}
    assert bool(late) is not holds


@pytest.mark.parametrize(
    ("op", "peer", "factor", "title"),
    [
        ("forward", "quack", 1.02, "Quack default"),
        ("backward", "quack", 1.24, "Quack default"),
        ("backward", "quack_searched", 1.09, "the better Quack"),
        ("backward", "liger", 1.99, "Liger"),
        ("backward", "torch", 1.99, "torch"),
    ],
)
def test_a_geometric_mean_under_its_bar_fails(
    op: str, peer: str, factor: float, title: str, judged: Judged, times: dict[Problem, Times]
) -> None:
    for problem, by_provider in times.items():
        if problem.op == op:
            by_provider[peer] = factor * by_provider["ours"]
    (line,) = failures(judged(times)[1])
    assert line.startswith(f"FAIL {op[0]}wd geometric mean / {title}: {factor:g} [")


def test_a_slow_wide_cell_misses_its_percentage(
    judged: Judged, times: dict[Problem, Times]
) -> None:
    for name in times[BACKWARD]:
        times[BACKWARD][name] *= 1.05
    (line,) = failures(judged(times)[1])
    assert line.startswith("FAIL bwd 32768x8192 bf16/bf16 % of 2r1w: 95 [")
    assert "bar 97" in line


def test_no_dtype_pair_may_fall_behind_bf16(judged: Judged, times: dict[Problem, Times]) -> None:
    pair = Problem.backward(32768, 8192, "fp16", weight_dtype="fp32")
    for name in times[pair]:
        times[pair][name] *= 1.05
    (line,) = failures(judged(times)[1])
    assert line.startswith("FAIL bwd 32768x8192 fp16/fp32 % of matched, by bf16/bf16")


def test_shapes_beyond_the_study_are_held_to_quack(
    judged: Judged, times: dict[Problem, Times]
) -> None:
    narrow = Problem.forward(1 << 20, 128, "bf16")
    times[narrow] = {"ours": 100.0, "quack": 45.0}
    (line,) = failures(judged(times, beyond=True)[1])
    assert line.startswith("FAIL fwd 1048576x128 bf16/bf16 / Quack: 0.45 [")
    times[narrow]["quack"] = 55.0
    assert judged(times, beyond=True)[0] == 0


def test_one_measurement_more_decides_and_both_are_printed(
    judged: Judged, times: dict[Problem, Times]
) -> None:
    slow = {**times, FORWARD: times[FORWARD] | {"torch": 0.9 * times[FORWARD]["ours"]}}
    code, lines = judged(slow, {FORWARD: times[FORWARD]})
    assert code == 0
    (first,) = failures(lines)
    assert lines[lines.index(first) + 1].startswith("     measured again: ok   fwd 32768x4096")
    assert judged(slow, {FORWARD: slow[FORWARD]})[0] == 1
    assert judged(slow, {BACKWARD: times[BACKWARD]})[0] == 1  # another cell decides nothing


def test_a_part_of_the_study_has_no_means(judged: Judged, times: dict[Problem, Times]) -> None:
    code, lines = judged({FORWARD: times[FORWARD]})
    assert code == 0
    assert lines[-1].startswith("2 bars hold")


def test_the_whole_study_takes_under_8_minutes(judged: Judged, times: dict[Problem, Times]) -> None:
    (line,) = failures(judged(times, wall_s=500.0)[1])
    assert line.startswith("FAIL 480 s / the session's seconds: 0.96")


def test_our_own_failure_is_a_failed_bar(judged: Judged, times: dict[Problem, Times]) -> None:
    times[FORWARD]["ours"] = math.nan
    code, lines = judged(times)
    assert code == 1
    (line,) = failures(lines)
    assert line.endswith("ours: WrongResult")


def test_a_peers_failure_leaves_the_cell_to_the_others(
    judged: Judged, times: dict[Problem, Times]
) -> None:
    times[FORWARD]["quack"] = math.nan
    _, lines = judged(times)
    assert any("fwd 32768x4096 bf16/bf16 / best peer: 1.2 [" in line for line in lines)
    assert not any("fwd geometric mean / Quack default" in line for line in lines)


def test_the_mean_of_ratios_has_the_interval_of_independent_ones(bars: ModuleType) -> None:
    one = bars.Comparison(None, 2.0, 2.0 / 1.02, 2.0 * 1.02)
    mean, low, high = bars.geometric_mean([one] * 4)
    assert (mean, low, high) == pytest.approx((2.0, 2.0 / 1.02**0.5, 2.0 * 1.02**0.5))
    other = bars.Comparison(None, 0.5, 0.5, 0.5)
    assert bars.geometric_mean([one, other])[0] == pytest.approx(1.0)


# ---- from a shell --------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perf.bars", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_exit_code_and_the_last_lines_name_what_fails(
    tmp_path: Path, times: dict[Problem, Times]
) -> None:
    assert run(str(write_run(tmp_path / "good", times))).returncode == 0
    times[FORWARD]["torch"] = 0.5 * times[FORWARD]["ours"]
    done = run(str(write_run(tmp_path / "bad", times)))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("FAIL fwd 32768x4096 bf16/bf16 / best peer")


def test_no_bar_is_held_to_simulated_times(tmp_path: Path, times: dict[Problem, Times]) -> None:
    done = run(str(write_run(tmp_path / "run", times, simulated=True)))
    assert done.returncode == 1
    assert "the run is simulated" in done.stdout


def test_a_run_that_was_ended_early_is_named(judged: Judged, times: dict[Problem, Times]) -> None:
    said = "NOT FINISHED: the run was ended before its last cell"
    assert said not in judged(times)[1]
    assert said in judged(times, finished=False)[1]


@pytest.mark.parametrize("name", ["perf.csv", "environment.json"])
def test_what_is_no_run_is_named(
    name: str, tmp_path: Path, times: dict[Problem, Times], bars: ModuleType
) -> None:
    folder = write_run(tmp_path / "run", times)
    (folder / name).unlink()
    said: list[str] = []
    assert bars.main([str(folder)], said.append) == 2
    assert said == [f"{folder} has no {name}: give the folder that pytest perf --out wrote"]


def test_a_piece_of_a_row_is_none(
    tmp_path: Path, times: dict[Problem, Times], bars: ModuleType
) -> None:
    folder = write_run(tmp_path / "run", times)
    whole = (folder / "perf.csv").read_bytes()
    (folder / "perf.csv").write_bytes(whole[:-40])
    before = sum(map(len, bars.load(write_run(tmp_path / "whole", times)).rows.values()))
    assert sum(map(len, bars.load(folder).rows.values())) == before - 1


def test_without_a_run_the_usage_is_printed() -> None:
    done, helped = run(), run("--help")
    assert (done.returncode, helped.returncode) == (2, 0)
    for text in (done.stderr, helped.stdout):
        assert text.startswith("usage: python -m perf.bars [-h] RUN_DIR [AGAIN_DIR]\n")
