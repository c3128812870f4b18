"""The whole operator beside its peers: residual and norm, norms of heads, 8-bit outputs.

    python -m perf.whole_operator [--out DIR] [--cells PART,PART] [--no-peers]
                                  [--try SLUG,SLUG] [--search N | --search all]

Device time of the ladder's kernels, Quack, Liger and torch.compile, cold, interleaved, each after
its gate, on clones that all read alike; the plain operation at the same shapes beside them. Writes
operator.csv, operator.txt and environment.json; exit code 1 where a bar fails. ``--cells`` takes
the cells that have one of the parts in their names. ``--try`` and ``--search`` also time those
configs of ours, or N that the space keeps from the ladder's outward: gated, screened, the fastest
measured again, sorted in search.csv.
"""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from time import perf_counter

from rmsnorm_raw import bandwidth, environment, measure, module, stats, workbench
from rmsnorm_raw.bandwidth import Roofline
from rmsnorm_raw.candidates import Explorer
from rmsnorm_raw.config import Config
from rmsnorm_raw.errors import RmsnormRawError
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.measure import Limits, Samples
from rmsnorm_raw.space import enumerate_configs, reject_reason
from rmsnorm_raw.study import rooflines, sweep
from rmsnorm_raw.study.providers import Contender, current_stream
from rmsnorm_raw.study.runs import OURS
from rmsnorm_raw.study.table_file import Row
from rmsnorm_raw.study.whole_cells import WholeCell, whole_cells
from rmsnorm_raw.study.whole_providers import of_config, whole_providers

COLUMNS = (
    "cell", "problem", "provider", "version", "module", "config", "verdict", "worst", "median_us",
    "low_us", "high_us", "samples", "discarded", "gbps", "pct_matched", "note",
)  # fmt: skip
SEARCH_COLUMNS = ("cell", "config", "verdict", "median_us", "low_us", "high_us", "ratio", "note")
#: of every contender of a cell
LIMITS: Limits = {"goal_pct": 0.5, "min_samples": 36, "max_samples": 120, "budget_s": 0.3}
#: of a config that a search looks at once, and of the fastest of them
SCREEN: Limits = {"min_samples": 12, "max_samples": 12, "warmup_s": 0.004}
FINAL: Limits = {"min_samples": 60, "max_samples": 60}
#: configs that are screened between two samplings of the ladder's, and that are measured again
GROUP, FINALISTS = 8, 6
#: the note of a config that was not among those
SCREENED = "screened"
#: the probe in the place of a peer: the time that it would take to move as many bytes
PROBE = "copy"


@dataclass(frozen=True)
class Bar:
    """What is asked of the cells of a kind, in times of others over ours.

    Attributes:
        kind: of :attr:`WholeCell.kind`.
        others: of whom the fastest counts.
        mean: the geometric mean over the cells, at least.
        least: any cell, at least.
    """

    kind: str
    others: tuple[str, ...]
    mean: float = 0.0
    least: float = 0.0


BARS = (
    Bar("residual-forward", ("quack", "compile"), mean=1.0, least=0.98),
    Bar("residual-backward", ("quack",), mean=1.05),
    Bar("heads-forward", ("quack",), mean=1.0),
    Bar("fp8-dynamic", (PROBE,), least=1 / 1.15),
)


# ---- the cells -----------------------------------------------------------------------------------


def rows_of(plan: WholeCell, opening: Roofline | None, peers: bool = True) -> list[Row]:
    """A row for each provider of a cell, those that pass their gates timed by turns."""
    cell = replace(plan)  # its tensors go when it does
    rows: list[Row] = []
    timed: list[tuple[Row, Contender]] = []
    for provider in whole_providers(cell.problem):
        if provider.missing() or not (peers or provider.name == OURS):
            continue
        row = dict.fromkeys(COLUMNS, "") | {
            "cell": cell.name, "problem": str(cell.problem), "provider": provider.name,
            "version": provider.version, "module": provider.module,
        }  # fmt: skip
        rows.append(row)
        try:
            timed.append((row, provider.prepare(cell)))
        except Exception as error:  # noqa: BLE001 - a peer raises whatever it likes, and has a row
            row |= {"verdict": type(error).__name__, "note": str(error) or repr(error)}
    calls = [contender.calls for _, contender in timed]
    taken = calls and measure.time_interleaved(calls, cell.backend, stream=cell.stream, **LIMITS)
    for (row, contender), samples in zip(timed, taken, strict=True):
        found = sweep.time_columns(cell.problem, contender.verdict, samples, opening)
        row |= {name: found[name] for name in COLUMNS if name in found}
        row["config"] = contender.config
    if opening is not None and cell.kind.startswith("fp8"):
        rows.append(_probe_row(cell, opening))
    return rows


def measure_all(
    cells: Sequence[WholeCell], opening: Roofline, out: Path, *, peers: bool
) -> list[Row]:
    """The rows of all cells, printed and written cell by cell."""
    rows: list[Row] = []
    with (out / "operator.csv").open("w", newline="") as file:
        written = csv.DictWriter(file, COLUMNS)
        written.writeheader()
        for cell in cells:
            found = rows_of(cell, opening, peers)
            rows += found
            written.writerows(found)
            file.flush()
            print("\n".join([*table(found)][1:]), flush=True)
    return rows


def missing(cells: Sequence[WholeCell]) -> list[str]:
    """Whom of the peers to install."""
    reasons = (it.missing() for cell in cells for it in whole_providers(cell.problem))
    return sorted({reason for reason in reasons if reason})


def _probe_row(cell: WholeCell, opening: Roofline) -> Row:
    reading = opening.reading(PROBE)
    us = cell.problem.logical_bytes() / reading.gbps / 1e3
    return dict.fromkeys(COLUMNS, "") | {
        "cell": cell.name, "problem": str(cell.problem), "provider": PROBE, "verdict": "PASS",
        "config": reading.variant.slug, "median_us": f"{us:.3f}", "gbps": f"{reading.gbps:.1f}",
        "note": "as many bytes at the probe's speed",
    }  # fmt: skip


def findings(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """A line for each bar, and whether it holds; one whose peer is not installed is named."""
    found = []
    for bar in BARS:
        cells: dict[str, dict[str, Row]] = {}
        for row in rows:
            name = row["cell"]
            if name.rpartition("-")[0] == bar.kind and row["provider"] in (OURS, *bar.others):
                cells.setdefault(name, {})[row["provider"]] = row
        there = [name for name in bar.others if any(name in each for each in cells.values())]
        what = f"{bar.kind}, {' or '.join(there or bar.others)} / ours"
        failed = [
            f"{cell} {name}: {row['verdict']}"
            for cell, each in cells.items()
            for name, row in each.items()
            if not _us(row)
        ]
        if failed:
            found.append((f"{what}: {'; '.join(failed)}: FAILS", False))
        elif not there:
            why = f"{' and '.join(bar.others)} not here" if cells else "not run"
            found.append((f"{what}: {why}, so there is no figure", True))
        else:
            ratios = {
                cell: min(_us(each[name]) for name in there) / _us(each[OURS])
                for cell, each in cells.items()
            }
            line, holds = _held(bar, ratios)
            found.append((f"{what}: {line}: {'holds' if holds else 'FAILS'}", holds))
    return found


def _held(bar: Bar, ratios: dict[str, float]) -> tuple[str, bool]:
    mean, worst = geometric_mean(ratios.values()), min(ratios, key=ratios.__getitem__)
    asked = {"mean": bar.mean, "each": bar.least}
    wanted = ", ".join(f"{what} >= {least:.3f}" for what, least in asked.items() if least)
    line = f"geometric mean {mean:.3f} over {len(ratios)} cells, least {ratios[worst]:.3f}"
    return f"{line} ({worst}); bar {wanted}", mean >= bar.mean and ratios[worst] >= bar.least


def _us(row: Row) -> float:
    return float(row["median_us"] or 0)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line a row; the ratio is to ours in the cell."""
    ours = {row["cell"]: _us(row) for row in rows if row["provider"] == OURS}
    yield (
        f"{'cell':32} {'provider':9} {'us':>9} {'low':>9} {'high':>9} {'GB/s':>7} {'% match':>7} "
        f"{'/ ours':>6}  config"
    )
    for row in rows:
        head = f"{row['cell']:32} {row['provider']:9}"
        if not _us(row):
            yield f"{head} {row['verdict']}: {row['note'].partition(chr(10))[0]}"
            continue
        figures = " ".join(f"{row[name]:>9}" for name in ("median_us", "low_us", "high_us"))
        ratio = f"{_us(row) / ours[row['cell']]:.3f}" if ours.get(row["cell"]) else "-"
        speeds = f"{row['gbps']:>7} {row['pct_matched']:>7}"
        yield f"{head} {figures} {speeds} {ratio:>6}  {row['config']}"


# ---- our other configs ---------------------------------------------------------------------------


def chosen(cell: WholeCell, slugs: Sequence[str], count: int) -> tuple[list[Config], list[Row]]:
    """The ladder's config, those of the slugs, ``count`` kept ones; a row for each that is refused.

    Kept ones come in the order in which a search tries them: from the ladder's outward.
    """
    problem, device = cell.problem, cell.backend.device
    ladder = default_config(problem, device)
    given = [Config.parse(slug) for slug in slugs]
    reasons = {config: reject_reason(problem, device, config) for config in given}
    kept = Explorer(enumerate_configs(problem, device).kept, ladder).take(count)
    fit = [config for config in given if not reasons[config]]
    refused = [_failed(cell, it, "constraints", why) for it, why in reasons.items() if why]
    return list(dict.fromkeys((ladder, *fit, *kept))), refused


def _failed(cell: WholeCell, config: Config, verdict: str, why: str) -> Row:
    named = {"cell": cell.name, "config": config.slug, "verdict": verdict}
    return dict.fromkeys(SEARCH_COLUMNS, "") | named | {"note": why.partition("\n")[0]}


def search(plan: WholeCell, configs: Sequence[Config]) -> list[Row]:
    """A row for each config, the fastest first; speeds are over the first one's, the ladder's.

    Each is gated, then sampled beside the ladder's; the fastest are measured again, all by turns.
    """
    cell = replace(plan)
    gated = {config: _gated(cell, config) for config in configs}
    contenders = {config: it for config, it in gated.items() if isinstance(it, Contender)}
    rows = [it for it in gated.values() if not isinstance(it, Contender)]
    ladder, *others = configs
    if ladder not in contenders:
        return rows
    others = [config for config in others if config in contenders]

    def time(group: Sequence[Config], limits: Limits) -> dict[Config, Samples]:
        calls = [contenders[config].calls for config in group]
        taken = measure.time_interleaved(calls, cell.backend, stream=cell.stream, **limits)
        return dict(zip(group, taken, strict=True))

    taken: dict[Config, Samples] = {}
    ratios = {ladder: 1.0}
    for start in range(0, len(others), GROUP):
        group = time([ladder, *others[start : start + GROUP]], SCREEN)
        taken |= group
        ratios |= {c: group[ladder].median_us / it.median_us for c, it in group.items()}
    finalists = sorted(others, key=ratios.__getitem__, reverse=True)[:FINALISTS]
    final = time([ladder, *finalists], FINAL)
    taken |= final
    notes = dict.fromkeys(taken, SCREENED)
    for config, it in final.items():
        found = stats.compare(final[ladder].times_us, it.times_us)
        ratios[config], notes[config] = found.ratio, "the ladder's"
        if config != ladder:
            notes[config] = str(found)
    timed = sorted(taken, key=lambda config: (config not in final, -ratios[config]))
    measured = [
        {
            "cell": cell.name, "config": config.slug, "verdict": "PASS", "note": notes[config],
            "median_us": f"{it.median_us:.3f}", "low_us": f"{it.low_us:.3f}",
            "high_us": f"{it.high_us:.3f}", "ratio": f"{ratios[config]:.4f}",
        }
        for config in timed
        if (it := taken[config])
    ]  # fmt: skip
    return [*measured, *rows]


def _gated(cell: WholeCell, config: Config) -> Contender | Row:
    """A config ready to be timed, or its row, which says why it is not."""
    try:
        rendered = workbench.render(cell.problem, config, cell.backend.device)
        return of_config(cell, config, module.build(rendered, cell.backend))
    except RmsnormRawError as error:
        cell.backend.synchronize(cell.stream)  # raises where the device is lost
        return _failed(cell, config, type(error).__name__, str(error))


def search_all(cells: Sequence[WholeCell], slugs: Sequence[str], count: int, out: Path) -> None:
    """Build all configs of all cells, a core each; then search, print and write cell by cell."""
    began = perf_counter()
    planned = [(cell, *chosen(cell, slugs, count)) for cell in cells]
    backend = cells[0].backend
    sweep.build_all([(cell.problem, c) for cell, configs, _ in planned for c in configs], backend)
    print(f"\nbuilt in {perf_counter() - began:.0f} s", flush=True)
    with (out / "search.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, SEARCH_COLUMNS)
        table.writeheader()
        for cell, configs, refused in planned:
            rows = search(cell, configs) + refused
            table.writerows(rows)
            file.flush()
            print("\n".join(search_lines(cell.name, rows)), flush=True)


def search_lines(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """The fastest and the ladder's, as measured again; then what failed, counted by why."""
    yield f"\n{name}: {len(rows)} configs, speed over the ladder's"
    for row in rows:
        if row["median_us"] and row["note"] != SCREENED:
            interval = f"[{row['low_us']}, {row['high_us']}]"
            yield f"  {row['median_us']:>9} us {interval:21} {row['config']:34} {row['note']}"
    why = Counter(f"{row['verdict']}: {row['note']}" for row in rows if not row["median_us"])
    yield from (f"  {count} of {len(rows)} {reason[:160]}" for reason, count in why.most_common(5))


# ---- the command ---------------------------------------------------------------------------------


def _count(text: str) -> int:
    return sys.maxsize if text == "all" else int(text)


def main() -> int:
    """The command line."""
    from perf.command_line import on_gpu, parser  # the suites import this file without the package

    options = parser("whole_operator", __doc__)
    options.add_argument(
        "--cells",
        default="",
        metavar="PART,PART",
        help="cells with one of these in the name",
    )
    options.add_argument("--no-peers", action="store_true", help="time ours alone")
    options.add_argument(
        "--try", dest="slugs", default="", metavar="SLUG,SLUG",
        help="then time these configs too, beside the ladder's",
    )  # fmt: skip
    options.add_argument(
        "--search", default=0, type=_count, metavar="N",
        help="then time N configs of each cell's space, or all, beside the ladder's",
    )  # fmt: skip
    args, began = options.parse_args(), perf_counter()
    backend, out = on_gpu("whole_operator", args.out), args.out
    if importlib.util.find_spec("torch") is None:
        sys.exit("perf.whole_operator works on torch's tensors: pip install torch")
    stream = current_stream(backend)
    parts = args.cells.split(",")
    cells = [cell for cell in whole_cells(backend, stream) if any(p in cell.name for p in parts)]
    if not cells:
        sys.exit(f"--cells {args.cells}: no cell has one of these in its name")
    ladders = [(cell.problem, default_config(cell.problem, backend.device)) for cell in cells]
    sweep.build_all(ladders, backend)
    opening = bandwidth.roofline(backend, stream=stream)
    print(opening, flush=True)
    rows = measure_all(cells, opening, out, peers=not args.no_peers)
    closing = bandwidth.remeasure(opening, backend, stream=stream)
    held, absent = findings(rows), missing(cells)
    facts = {
        "command": " ".join(["python -m perf.whole_operator", *environment.command(sys.argv[1:])]),
        "timing_protocol": measure.TIMING_PROTOCOL,
        "roofline_opening": rooflines.roofline_facts(opening),
        **rooflines.closing_facts(opening, closing),
        "missing": absent,
        "wall_s": perf_counter() - began,
        "bars": [line for line, _ in held],
    }
    drift = f"drift {facts['drift_pct']:.3f} %{', suspect' * bool(facts['suspect'])}"
    lines = [str(opening), *table(rows), drift, *absent, *(line for line, _ in held)]
    (out / "operator.txt").write_text("\n".join((*lines, "")), encoding="utf-8")
    environment.write(out / "environment.json", facts)
    print("\n".join(lines[-len(held) - len(absent) - 1 :]), flush=True)
    slugs = [slug for slug in args.slugs.split(",") if slug]
    if slugs or args.search:
        search_all(cells, slugs, args.search, out)
    return int(not all(holds for _, holds in held))


if __name__ == "__main__":
    sys.exit(main())
