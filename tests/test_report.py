from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rmsnorm_raw
from rmsnorm_raw.cli import app
from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.stats import Outcome
from rmsnorm_raw.study import archives, report
from rmsnorm_raw.study.files import read_run
from rmsnorm_raw.study.gains import counts as count_pairs
from rmsnorm_raw.study.runs import (
    ARCHIVE_PROBE,
    PAIRS,
    archive_pairs,
    archive_rows,
    cell_of,
    study_cells,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "perf/results/nvidia-h200/2026-11-30"
SWEEP = ROOT / "perf/results/nvidia-h200/2026-11-30-sweep"
Row = dict[str, str]


# ---- runs of our own -----------------------------------------------------------------------------


def rows_of(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_run(
    folder: Path,
    rows: Iterable[Mapping[str, str]],
    table: str = "perf.csv",
    change: Callable[[dict[str, Any]], object] = lambda facts: None,
) -> Path:
    """A run of these rows on the committed run's device."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(rows)
    with (folder / table).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    facts = json.loads((RESULTS / "environment.json").read_text(encoding="utf-8"))
    facts.pop("timing_protocol")
    change(facts)
    (folder / "environment.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    return folder


def some_rows(*providers: str) -> list[Row]:
    """Of three shapes, one of them the widest, in every dtype pair; no path is named."""
    shapes = {("4096", "4096"), ("32768", "1024"), ("32768", "8192")}
    return [
        {column: text for column, text in row.items() if column != "path"}
        for row in rows_of(RESULTS / "perf.csv")
        if (row["m"], row["n"]) in shapes and row["provider"] in (providers or ("ours", "quack"))
    ]


def scaled(rows: Iterable[Row], factor: float, *columns: str) -> list[Row]:
    """Rows whose times are longer by a factor; of some columns alone where they are named."""
    names = columns or ("median_us", "low_us", "high_us", "times_us")
    return [
        row
        | {
            name: " ".join(f"{float(us) * factor:.3f}" for us in row[name].split())
            for name in names
        }
        for row in rows
    ]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", some_rows())


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return result.exit_code, result.output


def tables_of(made: report.Report) -> dict[str, list[list[str]]]:
    """Of a page's Markdown: rows by caption."""
    text = made.files[f"{made.stem}.md"]
    found = re.findall(r"^(.+):\n\n((?:\|.*\|\n)+)", text, re.MULTILINE)
    return {
        caption: [
            [cell.strip().strip("*") for cell in line.strip("|").split(" | ")]
            for line in lines.splitlines()
            if not line.startswith("| :--")
        ]
        for caption, lines in found
    }


def table_of(made: report.Report, start: str) -> list[dict[str, str]]:
    (rows,) = (rows for caption, rows in tables_of(made).items() if caption.startswith(start))
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


# ---- the archives --------------------------------------------------------------------------------


def test_the_archives_medians_give_the_published_headline() -> None:
    published = {
        ("H200 forward", "analytical", "266.472", "4029.5"),
        ("H100 forward", "searched", "358.904", "2991.8"),
        ("H200 backward", "searched", "407.120", "3956.5"),
        ("H100 backward", "searched", "540.608", "2979.6"),
    }
    rows = archives.headline_rows()
    assert len(rows) == 8  # 2 hosts, 2 operations, 2 paths
    assert published <= {tuple(row[:4]) for row in rows}
    percents = {tuple(row[:2]): row[4] for row in rows}
    assert percents["H200 forward", "analytical"] == "93.43 % of 2r1w (4312.7)"
    assert percents["H100 forward", "searched"] == "94.01 % of write (3182.3)"
    assert percents["H200 backward", "searched"] == "91.74 % of 2r1w (4312.7)"
    assert percents["H100 backward", "searched"] == "93.63 % of write (3182.3)"


@pytest.mark.parametrize("host", ARCHIVE_PROBE)
@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_every_published_percentage_is_of_its_hosts_probe(host: str, op: str) -> None:
    rows = {
        cell_of(row): row
        for row in archive_rows("hopper_quack_cells.csv")
        if (row["host"], row["op"]) == (host, op)
    }
    pairs = archive_pairs(host, op)
    assert len(pairs) == len(rows) == 45
    for pair in pairs:
        row = rows[pair.cell]
        assert pair.cell.problem.logical_bytes() == int(row["logical_bytes"])
        assert pair.default_pct == pytest.approx(float(row["analytical_pct"]), abs=0.006)
        assert pair.tuned_pct == pytest.approx(float(row["tuned_pct"]), abs=0.006)


@pytest.mark.parametrize(
    ("host", "op", "gains", "losses"),
    [
        ("H200", "bwd", 21, 8),
        ("H100", "bwd", 34, 2),
        ("H200", "fwd", 27, 4),
        ("H100", "fwd", 24, 4),
    ],
)
def test_gains_and_losses_of_the_study_at_a_noise_of_1_percent(
    host: str, op: str, gains: int, losses: int
) -> None:
    counts = count_pairs(archive_pairs(host, op), 1.0)
    assert (counts["gains"], counts["losses"]) == (gains, losses)
    assert counts["within"] == 45 - gains - losses
    wider = count_pairs(archive_pairs(host, op), 5.0)
    assert wider["gains"] < gains
    assert wider["losses"] <= losses


def test_the_page_counts_and_draws_the_archive(run_folder: Path) -> None:
    made = report.make([run_folder])
    counted = {row[""]: row for row in table_of(made, "Quack's search against")}
    assert counted["H200 backward"]["faster by > 1 %"] == "21"
    assert counted["H100 backward"]["slower by > 1 %"] == "2"
    drawn = made.files["report_plots/archive-h200-bwd.svg"]
    # the published gain of 17.48 % of the time, as a ratio of speeds
    assert "+21.2 %" in drawn
    assert drawn.count('class="fill-good"') == 21
    assert drawn.count('class="fill-bad"') == 8


def test_amds_published_figures_stand_beside_with_percents_of_the_same_probe() -> None:
    made = report.make([RESULTS], out=RESULTS)
    rows = table_of(made, "Forward: our best of")
    row = next(row for row in rows if row["rows×columns x/weight"] == "32768×8192 bf16/bf16")
    assert row["FlyDSL, MI355X GB/s"] == "5748.4"
    assert row["FlyDSL, MI355X % of copy"] == f"{100 * 5748.4 / 4644:.2f}"
    assert row["FlyDSL, MI355X % of write"] == f"{100 * 5748.4 / 6664:.2f}"
    assert row["Quack, H200 GB/s"] == "4029.5"
    assert "Quack, H200 % of write" not in row  # its denominator was the other probe
    text = made.files["report.md"]
    assert "Percentages of different probes do not compare" in text
    assert "FlyDSL's forward comes to 124 % of copy: its publisher's copy probe" in text


# ---- the committed run ---------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [RESULTS, SWEEP], ids=lambda folder: folder.name)
def test_a_committed_page_is_what_its_run_gives(folder: Path) -> None:
    assert report.make([folder]).faults() == []
    assert (folder / "report.png").stat().st_size > 10_000


def test_the_committed_sweep_is_whole() -> None:
    """All cells by the ladder and every peer of the record, at full size, none without a time."""
    rows = rows_of(SWEEP / "sweep.csv")
    names = {row["provider"] for row in rows}
    assert names == {"ours", "quack", "quack_searched", "liger", "torch"}
    for name in names:
        mine = [row for row in rows if row["provider"] == name and row["path"] != "tuned"]
        cells = [cell_of(row) for row in mine]
        assert len(cells) == 90
        assert set(cells) == study_cells()
    assert {(row["verdict"], row["simulated"]) for row in rows} == {("PASS", "false")}
    assert all(row["rows_run"] == row["m"] for row in rows)
    facts = json.loads((SWEEP / "environment.json").read_text(encoding="utf-8"))
    tuned = [row["config"] for row in rows if row["path"] == "tuned"]
    assert sorted(tuned) == sorted(facts["tuned"].values()) != []
    assert facts["finished"]
    assert not facts["suspect"]
    assert [look["state"] for look in facts["idle"]] == ["idle", "idle"]
    (session,) = facts["sessions"]
    assert session["wall_s"] < 480


def test_the_committed_page_has_the_readmes_means() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    means = {
        row[""]: row["time over ours"] for row in table_of(report.make([RESULTS]), "Geometric")
    }
    for op in ("forward", "backward"):
        (line,) = re.findall(rf"^\s*\| {op} \| (1\..+) \|$", readme, re.MULTILINE)
        peers = ("quack", "quack searched", "liger", "torch", "compile")
        assert [means[f"{op}, {peer}"] for peer in peers] == line.split(" | ")


def test_tables_carry_the_csvs_figures() -> None:
    made = report.make([RESULTS])
    for op, name, cells in (("fwd", "Forward", 52), ("bwd", "Backward", 52)):
        table = table_of(made, f"{name}, medians")
        assert len(table) == cells
        for row in rows_of(RESULTS / "perf.csv"):
            if row["op"] != op:
                continue
            cell = f"{row['m']}×{row['n']} {row['act']}/{row['weight']}"
            (line,) = (line for line in table if line["rows×columns x/weight"] == cell)
            series = f"{row['provider'].replace('_', ' ')} {row['path']}".strip()
            said = line[f"{series} µs"]
            if row["verdict"] != "PASS":
                assert said == row["verdict"]
                continue
            assert said == f"{float(row['median_us']):.2f}"
            if row["provider"] == "ours":
                matched = "copy" if op == "fwd" else "2r1w"
                assert line["our best GB/s"] == row["gbps"]
                assert line[f"% of {matched}"] == row[f"pct_{matched}"]
                assert line["% of write (best)"] == row["pct_write"]
                assert line["our best config"] == row["config"]


def test_moved_mib_is_the_problems_bytes() -> None:
    table = table_of(report.make([RESULTS]), "Backward, medians")
    moved = {row["rows×columns x/weight"]: row["MiB moved"] for row in table}
    assert moved["32768×8192 bf16/bf16"] == f"{1_610_776_576 / 2**20:.1f}"
    assert moved["1×4096 bf16/bf16"] == f"{40_964 / 2**20:.3f}"


def beside_the_ladder() -> Iterator[Row]:
    """As ``perf.tuned_vs_ladder`` writes it: only forward 4096x4096 fp16 is tuned."""
    blank = dict.fromkeys(
        (*["op", "m", "n", "act", "weight"], "regime", "tuned_us", "ladder_us"), ""
    )
    for row in some_rows():
        if row["provider"] != "ours":
            continue
        mine = blank | {name: row[name] for name in ("op", "m", "n", "act", "weight")}
        if (row["op"], row["m"], row["act"], row["weight"]) == ("fwd", "4096", "fp16", "fp16"):
            for regime in ("cold", "steady"):
                yield mine | {"regime": regime, "tuned_us": "19.1", "ladder_us": "20.1"}
        else:
            yield mine


def test_the_ladder_beside_tuned_comes_from_the_table_beside_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, some_rows())
    rows = list(beside_the_ladder())
    write_run(tmp_path / "tuned_vs_ladder", rows, "tuned_vs_ladder.csv")
    made = report.make([tmp_path])
    counted = {row[""]: row for row in table_of(made, "Gains and losses of tuned")}
    forward = counted["forward, tuned_vs_ladder.csv, cold"]
    assert forward["faster by > 1 %"] == "1"
    assert forward["same config"] == "14"
    assert counted["backward, tuned_vs_ladder.csv, steady"]["same config"] == "15"
    assert "4096×4096 fp16/fp16" in made.files["report_plots/tuned-0.svg"]


def test_what_the_searches_found_is_a_table() -> None:
    made = report.make([RESULTS])
    tuned = [row for row in rows_of(RESULTS / "tune/tune.csv") if row["verdict"] == "TUNED"]
    found = table_of(made, "What the searches found")
    assert {row["rows×columns x/weight"] for row in found} == {
        f"{row['m']}×{row['n']} {row['act']}/{row['weight']}" for row in tuned
    }
    assert all(row["cold"].startswith("1.") for row in found)
    forward = sum(row["op"] == "fwd" for row in tuned)
    assert f"forward, {forward} cell TUNED" in made.files["report.md"]


def test_a_heat_map_is_of_the_widest_row_that_has_all_dtypes() -> None:
    made = report.make([RESULTS])
    (row,) = (
        row
        for row in table_of(made, "Backward 32768×8192: percent of 2r1w by dtypes")
        if row["x/weight"] == "bf16/fp32"
    )
    (ours,) = (
        row
        for row in rows_of(RESULTS / "perf.csv")
        if (row["provider"], row["op"], row["m"], row["n"]) == ("ours", "bwd", "32768", "8192")
        and (row["act"], row["weight"]) == ("bf16", "fp32")
    )
    assert row["ours ladder"] == ours["pct_2r1w"]
    shown = f">{float(ours['pct_2r1w']):.1f}</text>"
    assert shown in made.files["report_plots/dtypes-bwd.svg"]


# ---- files of other shapes -----------------------------------------------------------------------


def test_a_sweep_without_providers_is_ours_alone() -> None:
    run = read_run(RESULTS / "sweep")
    assert run.series == ("ours",)
    assert {timing.cell for timing in run.timings} == study_cells()
    assert "No peer was timed." in report.make([RESULTS / "sweep"]).files["report.md"]


def with_paths(rows: Iterable[Row], tuned: float) -> Iterator[Row]:
    """A sweep's rows: the ladder in every cell, forward also tuned, its times scaled."""
    for row in rows:
        yield row | {"path": "ladder" if row["provider"] == "ours" else "", "module": "m"}
        if row["provider"] == "ours" and row["op"] == "fwd":
            (other,) = scaled([row], tuned)
            yield other | {"path": "tuned", "module": "m", "config": "b256-t256-v8-reg"}


def test_a_sweeps_paths_are_columns_and_dumbbells(tmp_path: Path) -> None:
    rows = list(with_paths(some_rows(), 0.9))
    tuned = {f"forward {row['m']}x{row['n']} {row['act']}/{row['weight']}": row for row in rows}

    def change(facts: dict[str, Any]) -> None:
        facts["tuned"] = dict.fromkeys(tuned, "b256-t256-v8-reg")
        facts["cells"] = ["forward 1x4096 fp16/fp16"] * 90
        facts["roofline_resumed"] = [facts["roofline_closing"]]

    made = report.make([write_run(tmp_path / "a", rows, "sweep.csv", change)])
    first = table_of(made, "Forward, medians")[0]
    ladder, ours = float(first["ours ladder µs"]), float(first["ours tuned µs"])
    assert ours == pytest.approx(0.9 * ladder, abs=0.01)
    counted = {row[""]: row for row in table_of(made, "Gains and losses")}
    assert counted["forward, sweep.csv"]["faster by > 1 %"] == "15"
    assert counted["forward, sweep.csv"]["geometric mean of the speed ratio"].startswith("1.111")
    assert counted["backward, sweep.csv"]["same config"] == "15"  # no record names another
    peers = {
        row[""]: float(row["time over ours"]) for row in table_of(made, "Geometric means over")
    }
    alone = report.make([write_run(tmp_path / "b", some_rows())])
    before = {
        row[""]: float(row["time over ours"]) for row in table_of(alone, "Geometric means ov")
    }
    assert peers["forward, quack"] == pytest.approx(before["forward, quack"] / 0.9, abs=0.002)
    assert "resumed 1 GB/s" in table_of(made, "Probes")[0]
    assert "| cells | 90, see environment.json |" in made.files["report.md"]


def test_a_sweep_that_has_not_ended_says_so_and_a_suspect_one_too(tmp_path: Path) -> None:
    rows = some_rows()
    none = write_run(tmp_path / "none", rows, change=lambda facts: facts.pop("roofline_opening"))
    assert "ended before them" in report.make([none]).files["report.md"]
    half = write_run(tmp_path / "half", rows, change=lambda facts: facts.pop("roofline_closing"))
    assert "did not reach its end" in report.make([half]).files["report.md"]
    left = write_run(tmp_path / "left", rows, change=lambda facts: facts.update(finished=False))
    text = report.make([half, left]).files["comparison.md"]
    assert "B: The run did not end: cells may be missing." in text
    assert "A: The run did not end" not in text

    def drift(facts: dict[str, Any]) -> None:
        facts["suspect"] = True
        facts["roofline_closing"]["copy"]["gbps"] *= 0.9

    suspect = report.make([write_run(tmp_path / "suspect", rows, change=drift)])
    assert "SUSPECT" in suspect.files["report.md"]
    facts = json.loads((tmp_path / "suspect/environment.json").read_text(encoding="utf-8"))
    opening, closing = (
        facts[f"roofline_{when}"]["copy"]["gbps"] for when in ("opening", "closing")
    )
    said = f"({100 * (closing / opening - 1):+.2f} %)"
    assert said.startswith("(-10.")
    assert said in table_of(suspect, "Probes")[0]["closing GB/s"]


def test_a_simulated_run_has_times_that_mean_nothing_and_no_speeds(tmp_path: Path) -> None:
    blank = {name: "" for name in some_rows()[0] if name == "gbps" or name.startswith("pct_")}
    rows = [row | blank | {"rows_run": "67"} for row in some_rows("ours")]

    def simulate(facts: dict[str, Any]) -> None:
        facts["device"]["simulated"] = True
        facts["roofline_opening"] = facts["roofline_closing"] = None

    folder = write_run(tmp_path / "run", rows, "sweep.csv", simulate)
    made = report.make([folder])
    text = made.files["report.md"]
    assert "times of the simulator mean nothing" in text
    assert "ours simulated µs" in text
    assert "fewer rows than they name" in text
    assert "## Forward, simulated, at most 67 rows of each cell" in text
    assert "cold calls" not in text
    assert "run's opening probe" not in text
    assert "our best GB/s" not in text
    assert not any("curves" in name for name in made.files)


def test_a_page_says_what_its_tables_are_of() -> None:
    text = report.make([RESULTS]).files["report.md"]
    said = (
        "Times are of cold calls: the caches are evicted before each. Percentages are of the run's"
    )
    assert text.count(said) == 2  # forward and backward
    assert "are in `perf.csv` alone" in text
    words = re.findall(r"^- (.+?)[:,] ", text.partition("## Glossary")[2], re.MULTILINE)
    assert words == [
        "ladder", "config", "quack", "variant of a probe", "% of write (best)", "cold",
        "dumbbells", "timing protocol",
    ]  # fmt: skip


def environment_of(folder: Path, change: Callable[[dict[str, Any]], object]) -> dict[str, str]:
    made = report.make([write_run(folder, some_rows("ours"), change=change)])
    return {row["what"]: row["found"] for row in table_of(made, "What the run stood on")}


def test_the_environment_says_when_a_fact_was_read_and_of_compilers_the_version(
    tmp_path: Path,
) -> None:
    used = "with what the run itself used: "
    ended = environment_of(tmp_path / "a", lambda facts: facts.update(idle=[{"state": "idle"}]))
    assert ended["nvidia gpus"].startswith(f"at the end, {used}name: NVIDIA H200; ")
    assert ended["idle"].endswith("without what the run itself used: state: idle")
    assert re.fullmatch(
        r"c\+\+: c\+\+ \(.+\) [\d.]+; nvcc: Cuda compilation tools, release [\d.]+, V[\d.]+",
        ended["compilers"],
    )
    killed = environment_of(tmp_path / "b", lambda facts: facts.update(finished=False))
    assert killed["nvidia gpus"].startswith("at the beginning: name: NVIDIA H200; ")


def protocol(number: int) -> Callable[[dict[str, Any]], object]:
    return lambda facts: facts.update(timing_protocol=number)


def test_a_run_without_a_timing_protocol_is_of_the_first(tmp_path: Path) -> None:
    assert environment_of(tmp_path / "a", lambda facts: None)["timing protocol"].startswith("1: ")
    assert environment_of(tmp_path / "b", protocol(2))["timing protocol"] == "2"


@pytest.mark.parametrize("device", ["NVIDIA H200", "AMD Instinct MI355X"])
@pytest.mark.parametrize(("number", "said"), [(None, 0), (1, 0), (2, 1)])
def test_short_calls_of_two_timing_protocols_are_not_compared(
    tmp_path: Path, device: str, number: int | None, said: int
) -> None:
    def change(facts: dict[str, Any]) -> None:
        facts["device"]["name"] = device
        facts |= {} if number is None else {"timing_protocol": number}

    old = write_run(tmp_path / "old", some_rows("ours"))
    new = write_run(tmp_path / "new", some_rows("ours"), change=change)
    text = report.make([old, new]).files["comparison.md"]
    assert (
        text.count("A was timed by protocol 1 and B by 2, so times of short calls do not") == said
    )
    assert text.count("launch's turn") == said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"verdict": "FAIL", "note": "y is wrong"}, "FAIL, y is wrong; its time of 0.5 µs"),
        ({"verdict": "FAIL", "note": ""}, "FAIL, its time of 0.5 µs does not count"),
        ({"median_us": ""}, "PASS, 60 rounds"),
    ],
)
def test_a_row_without_a_median_or_a_pass_has_no_figure(
    tmp_path: Path, change: Row, said: str
) -> None:
    rows = some_rows("ours", "quack")
    index = next(i for i, row in enumerate(rows) if row["provider"] == "ours")
    was = rows[index]
    rows[index] = was | {"median_us": "0.5", "pct_matched": "999", "note": "60 rounds"} | change
    folder = write_run(tmp_path, rows)
    (row,) = (row for row in read_run(folder).timings if row.us is None)
    assert not any((row.interval_us, row.gbps, row.pct, row.times_us))
    made = report.make([folder])
    assert f"- ours, {row.cell}: {said}" in made.files["report.md"]
    assert not any("999" in text for name, text in made.files.items() if name.endswith(".svg"))
    op = {"fwd": "Forward", "bwd": "Backward"}[was["op"]]
    table = {line["rows×columns x/weight"]: line for line in table_of(made, f"{op}, medians")}
    line = table[row.cell.name]
    assert line["ours µs"] == row.verdict
    assert line["our best GB/s"] == line["our best config"] == "–"


@pytest.mark.parametrize("cut", [20, 3000])  # in the last row's samples; in the row before
def test_a_killed_sweeps_last_piece_is_left_out_and_named(run_folder: Path, cut: int) -> None:
    whole = read_run(run_folder)
    data = (run_folder / "perf.csv").read_bytes()
    (run_folder / "perf.csv").write_bytes(data[:-cut])
    torn = read_run(run_folder)
    assert not whole.torn
    assert torn.torn
    assert torn.timings == whole.timings[: len(torn.timings)]
    assert len(torn.timings) == len(data[:-cut].splitlines()) - 2  # its head, and the piece
    assert "ends in a piece of a row" in report.make([run_folder]).files["report.md"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "environment.json").unlink(), "is no run"),
        (lambda folder: (folder / "perf.csv").unlink(), "is no run"),
        (lambda folder: shutil.copy(folder / "perf.csv", folder / "sweep.csv"), "is no run"),
        (lambda folder: (folder / "environment.json").write_text("{"), "is not of a run"),
        (lambda folder: (folder / "environment.json").write_text("{}"), "is not of a run"),
        (lambda folder: (folder / "perf.csv").write_text("op,m\n"), "has no rows"),
        (lambda folder: (folder / "perf.csv").write_text("op,m\nfwd,1\n"), "no column act, config"),
        (lambda folder: (folder / "perf.csv").write_text("op,m\nfwd"), "has no rows"),
    ],
)
def test_what_is_no_run_is_refused(
    run_folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(run_folder)
    code, said = command(run_folder)
    assert code == 2
    assert message in said


@pytest.mark.parametrize(
    ("change", "message"),
    [({"median_us": "fast"}, "row 1, cannot be read"), ({"m": "many"}, "row 1, cannot be read")],
)
def test_a_row_that_is_no_time_is_refused(tmp_path: Path, change: Row, message: str) -> None:
    rows = some_rows("ours")
    with pytest.raises(InvalidInput, match=message):
        read_run(write_run(tmp_path, [rows[0] | change, *rows[1:]]))


def test_a_cell_that_stands_twice_is_refused(tmp_path: Path) -> None:
    rows = some_rows("ours")
    with pytest.raises(InvalidInput, match=r"ours has .* twice"):
        read_run(write_run(tmp_path, [*rows, rows[0]]))


# ---- two runs ------------------------------------------------------------------------------------


def verdicts(made: report.Report, start: str) -> dict[str, str]:
    return {row["rows×columns x/weight"]: row["verdict"] for row in table_of(made, start)}


@pytest.mark.parametrize(
    ("factor", "verdict"), [(0.95, Outcome.FASTER), (1.05, Outcome.SLOWER), (1.0, Outcome.SAME)]
)
@pytest.mark.parametrize("samples", [True, False])
def test_two_runs_are_compared_cell_by_cell(
    tmp_path: Path, factor: float, verdict: Outcome, samples: bool
) -> None:
    wide = [row for row in some_rows("ours") if row["n"] == "8192"]
    if not samples:
        wide = [row | {"times_us": ""} for row in wide]
    before = write_run(tmp_path / "before", wide)
    after = write_run(tmp_path / "after", scaled(wide, factor))
    made = report.make([before, after])
    for op in ("Forward", "Backward"):
        found = verdicts(made, f"{op}, ours: speed of B over A")
        assert len(found) == 5
        assert set(found.values()) == {verdict.value}
    summary = {row[""]: row for row in table_of(made, "Verdicts")}
    assert summary["forward, ours"][verdict.value] == "5"
    assert float(summary["forward, ours"]["geometric mean"]) == pytest.approx(1 / factor, abs=1e-4)


def test_what_the_files_cannot_decide_is_unclear(tmp_path: Path) -> None:
    rows = [row | {"times_us": ""} for row in some_rows("ours") if row["n"] == "8192"]
    (wide,) = scaled(rows[:1], 1.1, "high_us")
    bare = rows[1] | {"low_us": "", "high_us": ""}
    before = write_run(tmp_path / "before", rows)
    after = write_run(tmp_path / "after", [wide, bare, *rows[2:]])
    made = report.make([before, after])
    found = [v for op in ("Forward", "Backward") for v in verdicts(made, f"{op}, ours").values()]
    assert sorted(found) == ["SAME"] * 8 + ["UNCLEAR"] * 2


def test_the_noise_is_stated_and_decides(tmp_path: Path) -> None:
    rows = [row for row in some_rows("ours") if row["n"] == "8192"]
    folders = [
        write_run(tmp_path / "before", rows),
        write_run(tmp_path / "after", scaled(rows, 1.03)),
    ]
    strict, loose = (report.make(folders, noise_pct=noise) for noise in (1.0, 5.0))
    assert set(verdicts(strict, "Forward, ours").values()) == {"SLOWER"}
    assert set(verdicts(loose, "Forward, ours").values()) == {"SAME"}
    assert "at a noise of 5 %" in loose.files["comparison.md"]
    loose.write()
    code, said = command(*folders, "--check")
    assert code == 1
    assert "--noise is not what the page was made of" in said
    assert command(*folders, "--check", "--noise", "5")[0] == 0


def between_of(made: report.Report) -> str:
    """The section of two runs."""
    return made.files["comparison.md"].partition("## B against A")[2].partition("## A: ")[0]


def capped(rows: Iterable[Row], most: int) -> list[Row]:
    return [row | {"rows_run": str(min(int(row["m"]), most))} for row in rows]


def failed(rows: Iterable[Row]) -> list[Row]:
    names = {"median_us", "low_us", "high_us", "times_us", "gbps"}
    return [
        {name: "" if name in names or "pct_" in name else text for name, text in row.items()}
        | {"verdict": "FAIL", "note": "y is wrong"}
        for row in rows
    ]


def test_cells_of_which_other_rows_were_run_have_no_verdict(tmp_path: Path) -> None:
    rows = some_rows("ours")
    before = write_run(tmp_path / "before", rows)
    after = write_run(tmp_path / "after", capped(scaled(rows, 0.1), 4096))
    made = report.make([before, after])
    found = verdicts(made, "Forward, ours: speed")
    assert set(found) == {f"4096×4096 {pair}" for pair in PAIRS}
    (summary, _) = table_of(made, "Verdicts")
    assert (summary["cells"], summary["FASTER"], summary["not compared"]) == ("5", "5", "10")
    items = re.findall("^- (.+)$", between_of(made), re.MULTILINE)
    assert items[0].startswith("forward, ours: A ran 32768 rows and B ran 4096 rows, 10 cells: 32")
    assert len(items) == 2  # and backward's


def test_two_runs_of_as_few_rows_are_compared(tmp_path: Path) -> None:
    rows = capped(some_rows("ours"), 1024)
    folders = [write_run(tmp_path / name, rows) for name in ("before", "after")]
    made = report.make(folders)
    assert [row["not compared"] for row in table_of(made, "Verdicts")] == ["0", "0"]
    assert "Not compared" not in between_of(made)


def test_a_capped_run_stands_beside_no_published_figure(tmp_path: Path) -> None:
    whole = some_rows("ours")
    made = report.make([write_run(tmp_path, capped(whole, 4096))])
    for line in table_of(made, "Forward: our best of"):
        cell = line["rows×columns x/weight"]
        figures = {text for title, text in line.items() if title.startswith("this run ")}
        assert (figures != {"–"}) == cell.startswith("4096×4096 "), cell
    assert made.files["report.md"].count("Of 10 cells this run ran fewer rows") == 2
    none = report.make([write_run(tmp_path, whole)])
    assert "fewer rows" not in none.files["report.md"]


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("other", [False, True], ids=["one device", "two"])
def test_a_cell_that_lost_its_time_is_told(tmp_path: Path, later: bool, other: bool) -> None:
    rows = some_rows("ours")
    lost = [row for row in rows if row["n"] == "8192"]
    gone = [row for row in rows if row["n"] == "1024"]
    rest = [row for row in rows if row["n"] == "4096"]

    def change(facts: dict[str, Any]) -> None:
        facts["device"]["name"] = "AMD Instinct MI355X" if other else "NVIDIA H200"

    folders = [
        write_run(tmp_path / "a", rows),
        write_run(tmp_path / "b", [*rest, *failed(lost)], change=change),
    ]
    assert len(lost) == len(gone) == 10
    made = report.make(folders if later else folders[::-1])
    letter = "B" if later else "A"
    name = "forward" if other else "forward, ours"
    text = between_of(made)
    for said, n in ((f"{letter} has FAIL and no time", 8192), (f"{letter} has no row", 1024)):
        cells = ", ".join(f"32768×{n} {pair}" for pair in PAIRS)
        assert f"\n- {name}: {said}, 5 cells: {cells}\n" in text
    if not other:
        (summary, _) = table_of(made, "Verdicts")
        assert (summary["cells"], summary["not compared"]) == ("5", "10")


def test_a_run_in_which_every_cell_failed_has_no_ratio(tmp_path: Path) -> None:
    rows = some_rows("ours")
    folders = [write_run(tmp_path / "a", rows), write_run(tmp_path / "b", failed(rows))]
    made = report.make(folders)
    (summary, _) = table_of(made, "Verdicts")
    assert (summary["cells"], summary["geometric mean"]) == ("0", "–")
    assert summary["not compared"] == "15"
    assert "no cell of ours to compare" in between_of(made)
    both = report.make([folders[1], write_run(tmp_path / "c", failed(rows))])
    assert table_of(both, "Verdicts") == []  # none lost a time: each run's own sections tell


def test_a_provider_of_one_run_alone_is_told(tmp_path: Path) -> None:
    both = write_run(tmp_path / "a", some_rows())
    ours = write_run(tmp_path / "b", some_rows("ours"))
    assert "- quack: B has no row of it" in between_of(report.make([both, ours]))
    assert "- quack: A has no row of it" in between_of(report.make([ours, both]))


def test_a_path_is_compared_with_a_run_that_has_none(tmp_path: Path) -> None:
    before = write_run(tmp_path / "before", some_rows())
    after = write_run(tmp_path / "after", with_paths(some_rows(), 0.9), "sweep.csv")
    made = report.make([before, after])
    summary = {row[""]: row for row in table_of(made, "Verdicts")}
    assert summary["forward, ours → ours tuned"]["FASTER"] == "15"
    assert summary["forward, ours → ours ladder"]["FASTER"] == "0"
    assert summary["forward, quack"]["cells"] == "15"  # a control
    assert "backward, ours → ours tuned" not in summary  # no record is no loss
    assert {row["not compared"] for row in summary.values()} == {"0"}
    assert "a sweep times a cell by itself" in made.files["comparison.md"]


def test_across_devices_there_is_no_verdict_and_each_percentage_names_its_probe(
    tmp_path: Path,
) -> None:
    rows = some_rows("ours")

    def other(facts: dict[str, Any]) -> None:
        facts["device"]["name"] = "AMD Instinct MI355X"

    before = write_run(tmp_path / "before", rows)
    made = report.make([before, write_run(tmp_path / "after", rows, change=other)])
    text = made.files["comparison.md"]
    assert "Percentages of different probes do not compare" in text
    assert "verdict" not in text
    first = table_of(made, "Forward, our best of each run")[0]
    for probe in ("copy", "write", "2r1w"):
        assert first[f"A NVIDIA H200 % of {probe}"] == first[f"B AMD Instinct MI355X % of {probe}"]
    assert first["A NVIDIA H200 GB/s"] == first["B AMD Instinct MI355X GB/s"]


def test_a_run_is_not_compared_with_itself(run_folder: Path) -> None:
    code, said = command(run_folder, run_folder)
    assert code == 2
    assert "with itself" in said


# ---- pages that cannot go stale ------------------------------------------------------------------


def test_a_page_is_the_same_bytes_in_every_process_and_from_every_folder(
    run_folder: Path, tmp_path: Path
) -> None:
    written = []
    for seed, where, given in (("1", tmp_path, "run"), ("2", ROOT, str(run_folder))):
        out = tmp_path / seed
        code = "from rmsnorm_raw.cli import app; app()"
        subprocess.run(
            [sys.executable, "-c", code, "report", given, "--out", str(out)],
            cwd=where, check=True, capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": package_folder()},
        )  # fmt: skip
        written.append({p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()})
    assert written[0] == written[1]
    assert len(written[0]) > 10


def package_folder() -> str:
    return str(Path(rmsnorm_raw.__file__).parents[1])


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{old!r} is not in {path}"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("report.html", "97.14", "98.14", "report.html differs from line"),
        ("report.md", "97.14", "98.14", "report.md differs from line"),
        ("report_plots/dtypes-bwd.svg", "97.1<", "98.1<", "dtypes-bwd.svg differs from line"),
        ("perf.csv", "373.184", "363.184", "perf.csv is not what the page was made of"),
        ("environment.json", "580.159.04", "580.160", "environment.json is not what the page was"),
    ],
)
def test_check_fails_on_a_page_that_is_not_its_runs(
    run_folder: Path, name: str, old: str, new: str, said: str
) -> None:
    assert command(run_folder)[0] == 0
    assert command(run_folder, "--check")[0] == 0
    edit(run_folder / name, old, new)
    code, output = command(run_folder, "--check")
    assert code == 1
    assert said in output
    assert command(run_folder)[0] == 0
    assert command(run_folder, "--check")[0] == 0


def test_check_fails_without_a_page_and_on_a_plot_of_another(run_folder: Path) -> None:
    code, output = command(run_folder, "--check")
    assert code == 1
    assert "report.html is not there" in output
    command(run_folder)
    (run_folder / "report_plots/old.svg").write_text("<svg/>")
    code, output = command(run_folder, "--check")
    assert code == 1
    assert "old.svg is of no plot" in output
    command(run_folder)
    assert command(run_folder, "--check")[0] == 0


@pytest.mark.parametrize("name", report.CODE)
def test_check_fails_when_the_reports_code_has_changed(
    run_folder: Path, tmp_path: Path, name: str
) -> None:
    package = Path(rmsnorm_raw.__file__).parent
    shutil.copytree(package, tmp_path / "edited/rmsnorm_raw")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "from rmsnorm_raw.cli import app; app()"
        return subprocess.run(
            [sys.executable, "-c", code, "report", str(run_folder), *arguments],
            cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "edited")},
        )  # fmt: skip

    assert command(run_folder)[0] == 0
    with (tmp_path / "edited/rmsnorm_raw/study" / name).open("a", encoding="utf-8") as file:
        file.write("# a change that moves no figure\n")
    stale = run("--check")
    assert stale.returncode == 1
    assert "the report's code is not what the page was made of" in stale.stderr
    assert run().returncode == 0
    assert run("--check").returncode == 0


def test_all_of_the_reports_modules_are_in_its_digest() -> None:
    used = {"report.py"}
    study = Path(report.__file__).parent
    while True:
        text = "".join((study / name).read_text(encoding="utf-8") for name in sorted(used))
        found = set(re.findall(r"^from rmsnorm_raw\.study\.(\w+) import", text, re.MULTILINE))
        for names in re.findall(r"^from rmsnorm_raw\.study import (.+)$", text, re.MULTILINE):
            found |= set(names.split(", "))
        more = {f"{name}.py" for name in found} - used
        if not more:
            break
        used |= more
    assert used - {"cells.py"} == set(report.CODE)  # cells.py reads an archive, which is digested


def test_a_folder_that_cannot_be_written_is_an_error(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, said = command(run_folder, "--out", tmp_path / "file" / "below")
    assert code == 2
    assert "cannot be written" in said


def test_on_a_full_disk_the_old_page_stays(run_folder: Path) -> None:
    assert command(run_folder)[0] == 0
    before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    edit(run_folder / "perf.csv", "373.184", "363.184")
    before[run_folder / "perf.csv"] = (run_folder / "perf.csv").read_bytes()
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        "from rmsnorm_raw.cli import app; app()"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, "report", str(run_folder)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": package_folder(), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert found.returncode == 2, found.stderr
    assert "What was there stays" in found.stderr
    assert "Traceback" not in found.stderr
    assert {p: p.read_bytes() for p in run_folder.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("noise", ["inf", "1e400", "nan", "-1", "-inf"])
def test_a_noise_that_is_no_percentage_is_refused(run_folder: Path, noise: str) -> None:
    code, said = command(run_folder, "--noise", noise)
    assert code == 2
    assert "--noise" in said
    assert not list(run_folder.glob("report*"))
    with pytest.raises(InvalidInput, match="--noise"):
        report.make([run_folder], noise_pct=float(noise))
