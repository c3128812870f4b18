"""The sections of a report on one run: environment, roofline, shapes, dtypes, peers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean

from rmsnorm_raw.bandwidth import DRIFT_PCT, MATCHED, PROBES
from rmsnorm_raw.study.page import Block, Heading, Items, Plots, Table, Text
from rmsnorm_raw.study.plots import Plot, bars, change, curves, heat_map, ratio_strips
from rmsnorm_raw.study.runs import (
    CLOCKS,
    ENVIRONMENT,
    OP_OF,
    PAIRS,
    PEERS,
    Cell,
    Run,
    Timing,
    is_ours,
    study_cells,
)

MIB = 1 << 20
NONE = "–"
#: the title of cells' names
CELL = "rows×columns x/weight"
#: the pair of most curves, and of everything beyond the study's shapes
PAIR = "bf16/bf16"
#: entries of a fact that are told one by one
MOST_SAID = 20
#: of environment.json: those that have a section of their own
ELSEWHERE = ("roofline_opening", "roofline_resumed", "roofline_closing", "drift_pct", "suspect")


def style(series: str) -> int:
    """The colour and mark of a series, the same in every plot."""
    if is_ours(series):
        return 6 if series.endswith("tuned") else 0
    return PEERS.index(series) + 1 if series in PEERS else 7


def shown(series: str) -> str:
    """A series' name in words."""
    return series.replace("_", " ")


def value(number: float | None, digits: int) -> str:
    """A number of a table, or a dash."""
    return NONE if number is None else f"{number:.{digits}f}"


def percent(row: Timing | None, probe: str) -> float | None:
    """Of a probe, "best" or "matched"; None without a row or a percentage."""
    return row.pct.get(probe) if row else None


def environment(run: Run) -> Iterator[Block]:
    """What the run stood on, as its environment.json has it."""
    yield Heading(2, "Environment")
    facts = {"timing_protocol": "1: the run is older than protocol 2, and names none"}
    facts |= run.environment
    if isinstance(compilers := facts.get("compilers"), dict):
        facts["compilers"] = {tool: _version(lines) for tool, lines in compilers.items()}
    when = dict.fromkeys(CLOCKS, "at the end, with what the run itself used")
    if not facts.get("finished", True):
        when = dict.fromkeys(CLOCKS, "at the beginning")
    if not run.simulated:
        when["idle"] = "before anything was timed, without what the run itself used"
    rows = [
        [_words(name), f"{when[name]}: {said}" if name in when else said]
        for name, fact in facts.items()
        if name not in ELSEWHERE and (said := " ".join(fact) if name == "command" else _said(fact))
    ]
    yield Table("What the run stood on", ("what", "found"), rows, words=True)


def _version(lines: object) -> object:
    """Of what a tool says of itself the line with its version; the rest is of rights and dates."""
    if not isinstance(lines, list):
        return lines
    return next((line for line in lines if re.search(r"\d\.\d", str(line))), lines[:1])


def _said(fact: object) -> str:
    """A fact of a JSON file in words; "" for a probe that failed or found nothing."""
    if isinstance(fact, dict | list) and len(fact) > MOST_SAID:
        return f"{len(fact)}, see {ENVIRONMENT}"
    if isinstance(fact, dict):
        if fact.keys() == {"error"}:
            return ""
        parts = ((_words(str(name)), _said(each)) for name, each in fact.items())
        return "; ".join(f"{name}: {said}" for name, said in parts if said)
    if isinstance(fact, list):
        return " · ".join(said for each in fact if (said := _said(each)))
    if fact is None:
        return ""
    if isinstance(fact, float):
        return f"{fact:g}"
    return str(fact).lower() if isinstance(fact, bool) else str(fact)


def _words(name: str) -> str:
    """Of a fact's name; variables, in capitals, stay as they are."""
    return name if name.isupper() else name.replace("_", " ")


def roofline(run: Run, prefix: str = "") -> Iterator[Block]:
    """The probes at the start and at the end, and how far they moved."""
    yield Heading(2, "Roofline")
    opening, closing = run.probes("opening"), run.probes("closing")
    if run.simulated:
        yield Text("No probes: the times are simulated, they mean nothing and have no percentage.")
        return
    if not opening:
        yield Text("No probes: the run has ended before them, and has no percentage.")
        return
    resumed = run.environment.get("roofline_resumed") or ()
    times = [("opening", opening), *((f"resumed {i}", each) for i, each in enumerate(resumed, 1))]
    times += [("closing", closing)] if closing else []
    rows, drawn = [], []
    for probe in (probe for probe in PROBES if probe in opening):
        before = opening[probe]
        line: list[str] = [probe]
        for when, probes in times:
            gbps = probes[probe]["gbps"]
            drift = f"({100 * gbps / before['gbps'] - 100:+.2f} %)" if probes is not opening else ""
            line.append(f"{gbps:.1f} {drift}".strip())
            drawn.append((f"{probe}, {when}", 6 if drift else 0, gbps, drift))
        line += [value(before.get("median_us"), 3), str(before.get("variant", NONE))]
        rows.append(line)
    yield Table(
        "Probes: copy reads one buffer and writes one, write writes one, 2r1w reads two and writes "
        "one; in brackets the drift since the opening",
        ("probe", *(f"{when} GB/s" for when, _ in times), "opening µs", "variant"), rows,
    )  # fmt: skip
    if not closing:
        yield Text("There are no closing probes: the run did not reach its end.")
    elif run.environment.get("suspect"):
        yield Text(f"SUSPECT: a probe moved by more than {DRIFT_PCT:g} % during the run.")
    else:
        yield Text(f"No probe moved by more than {DRIFT_PCT:g} %.")
    yield Plots([bars(f"{prefix}roofline", "Roofline by probe", drawn, "GB/s")])


def shapes(run: Run, op: str, prefix: str = "") -> Iterator[Block]:
    """Times, speeds and percentages of an operation's cells, and curves over the shapes."""
    name, matched = OP_OF[op], MATCHED[OP_OF[op]]
    found = run.cells(op)
    capped = [r.rows_run for r in run.timings if r.cell.op == op and r.rows_run < r.cell.m]
    title = name.capitalize() + ", simulated" * run.simulated
    yield Heading(2, title + (f", at most {max(capped)} rows of each cell" if capped else ""))
    if not found:
        yield Text("The run has no cell of it.")
        return
    timed = [series for series in run.series if any((cell, series) in run.by_key for cell in found)]
    speeds = not run.simulated and bool(run.probes("opening"))
    rows: list[list[str]] = []
    strong = set()
    for cell in found:
        every = [run.by_key.get((cell, series)) for series in timed]
        times = [row.us for row in every if row and row.us]
        for column, row in enumerate(every):
            if row and row.us and row.us == min(times):
                strong.add((len(rows), 2 + column))
        best = run.best(cell)
        line = [cell.name, _mib(every), *map(_time, every)]
        if speeds:
            line.append(value(best.gbps, 1) if best else NONE)
            line += [value(percent(best, key), 2) for key in ("matched", "best")]
        rows.append([*line, best.config if best else NONE])
    probes = run.probes("opening")
    best_probe = max(probes, key=lambda probe: float(probes[probe]["gbps"])) if speeds else ""
    unit = "simulated µs" if run.simulated else "µs"
    titles = [CELL, "MiB moved", *(f"{shown(s)} {unit}" for s in timed)]
    titles += ["our best GB/s", f"% of {matched}", f"% of {best_probe} (best)"] if speeds else []
    titles.append("our best config")
    if speeds:
        yield Plots(list(_curves(run, op, found, timed, prefix)))
    if capped:
        yield Text("Rows were capped: the cells ran with fewer rows than they name.")
    yield Text(
        "Times are of cold calls: the caches are evicted before each. " * (not run.simulated)
        + "Percentages are of the run's opening probe of that name. " * speeds
        + "MiB are of 2^20 bytes, GB/s of 10^9. The 95 % intervals of the medians and the numbers "
        f"of samples are in `{run.table}` alone."
    )
    yield Table(
        f"{name.capitalize()}, medians; the fastest of a cell stands out; percentages are of our "
        "best",
        titles, rows, strong=frozenset(strong),
    )  # fmt: skip
    lost = [row for row in run.timings if row.cell.op == op and row.us is None]
    if lost:
        yield Text("Without a time:")
        yield Items([f"{row.series}, {row.cell}: {row.verdict}, {row.note}" for row in lost])


def _mib(rows: Iterable[Timing | None]) -> str:
    mib = next(row.moved_bytes for row in rows if row) / MIB
    return f"{mib:.1f}" if mib >= 1 else f"{mib:.3f}"


def _time(row: Timing | None) -> str:
    if row is None:
        return NONE
    return row.verdict if row.us is None else f"{row.us:.2f}"


def _curves(
    run: Run, op: str, found: Sequence[Cell], timed: Sequence[str], prefix: str
) -> Iterator[Plot]:
    unit = f"percent of {MATCHED[OP_OF[op]]}"
    pairs = Counter(cell.pair for cell in found)
    pair = PAIR if PAIR in pairs else pairs.most_common(1)[0][0]
    # apart, for the peers have no time in most cells beyond the study
    for name, over, inside in (("curves", "shapes", True), ("beyond", "other shapes", False)):
        columns = [c for c in found if c.pair == pair and (c in study_cells()) == inside]
        lines = [
            (shown(series), style(series), [_pct(run, cell, series) for cell in columns])
            for series in timed
        ]
        lines = [line for line in lines if any(each is not None for each in line[2])]
        if lines:
            title = f"{OP_OF[op].capitalize()}, {pair}: percent of roofline over {over}"
            names = [cell.shape for cell in columns]
            yield curves(f"{prefix}{name}-{op}", title, names, lines, unit)
    shapes_of = {cell.shape: cell for cell in found}
    wide = [s for s in shapes_of if sum(cell.shape == s for cell in found) == len(pairs)]
    by_pair = []
    for index, each in enumerate(sorted(pairs, key=_pair_order)):
        mine = {cell.shape: run.best(cell) for cell in found if cell.pair == each}
        values = [percent(mine.get(shape), "matched") for shape in wide]
        if any(v is not None for v in values):
            by_pair.append((each, index, values))
    if len(by_pair) > 1:
        title = f"{OP_OF[op].capitalize()}, ours by dtypes: percent of roofline over shapes"
        yield curves(f"{prefix}pairs-{op}", title, wide, by_pair, unit)


def _pair_order(pair: str) -> tuple[int, str]:
    return (PAIRS.index(pair) if pair in PAIRS else len(PAIRS)), pair


def _pct(run: Run, cell: Cell, series: str) -> float | None:
    return percent(run.by_key.get((cell, series)), "matched")


# ---- dtypes --------------------------------------------------------------------------------------


def dtypes(run: Run, prefix: str = "") -> Iterator[Block]:
    """A heat map of dtype pairs at the widest row that has most of them."""
    yield Heading(2, "Dtypes at the widest row")
    plots, tables = [], []
    for op in OP_OF:
        found = run.cells(op)
        pairs_at = Counter((cell.n, cell.m) for cell in found)
        if not found or run.simulated:
            continue
        most = max(pairs_at.values())
        n, m = max(shape for shape, count in pairs_at.items() if count == most)
        here = [cell for cell in found if (cell.n, cell.m) == (n, m)]
        series = [s for s in run.series if any(_pct(run, cell, s) is not None for cell in here)]
        grid = [[_pct(run, cell, s) for s in series] for cell in here]
        if not series:
            continue
        title = f"{OP_OF[op].capitalize()} {m}×{n}: percent of {MATCHED[OP_OF[op]]} by dtypes"
        names, columns = [cell.pair for cell in here], [shown(s) for s in series]
        plots.append(heat_map(f"{prefix}dtypes-{op}", title, names, columns, grid))
        said = [[value(each, 2) for each in line] for line in grid]
        rows = [[pair, *line] for pair, line in zip(names, said, strict=True)]
        tables.append(Table(title, ("x/weight", *columns), rows))
    if plots:
        yield Plots(plots)
        yield from tables
    else:
        yield Text("No percentages.")


# ---- peers ---------------------------------------------------------------------------------------


def peers(run: Run, noise: float, prefix: str = "") -> Iterator[Block]:
    """Peers' times over our best: geometric means over the study's cells, and cell by cell."""
    yield Heading(2, "Peers")
    others = [series for series in run.series if not is_ours(series)]
    if not others or run.simulated:
        yield Text("No peer was timed.")
        return
    study = study_cells()
    means, plots, tables = [], [], []
    for op in OP_OF:
        found = run.cells(op)
        ratios = {
            series: {cell: ratio for cell in found if (ratio := _peer_ratio(run, cell, series))}
            for series in others
        }
        strips = []
        for series in others:
            inside = {cell: ratio for cell, ratio in ratios[series].items() if cell in study}
            if not inside:
                continue
            mean = geometric_mean(inside.values())
            kinds = Counter(change(ratio, noise) for ratio in inside.values())
            means.append(
                [
                    f"{OP_OF[op]}, {shown(series)}", str(len(inside)), f"{mean:.3f}",
                    *(str(kinds[kind]) for kind in ("good", "bad", "same")),
                ]
            )  # fmt: skip
            dots = [(cell.name, ratio) for cell, ratio in inside.items()]
            strips.append((shown(series), style(series), dots, mean))
        if strips:
            title = f"{OP_OF[op].capitalize()}: peers' time over ours"
            plots.append(ratio_strips(f"{prefix}peers-{op}", title, strips, "time over ours"))
        tables.append(_peer_table(op, found, ratios, noise))
    yield Table(
        "Geometric means over the study's cells; above 1 we are faster",
        (
            "", "cells", "time over ours", f"slower than ours by > {noise:g} %",
            f"faster by > {noise:g} %", "within",
        ),
        means,
    )  # fmt: skip
    yield Plots(plots)
    yield from tables


def _peer_table(
    op: str, cells: Sequence[Cell], ratios: Mapping[str, Mapping[Cell, float]], noise: float
) -> Table:
    rows: list[list[str]] = []
    strong = set()
    for cell in cells:
        line = [of_peer.get(cell) for of_peer in ratios.values()]
        for column, ratio in enumerate(line, 1):
            if ratio and change(ratio, noise) == "bad":
                strong.add((len(rows), column))
        rows.append([cell.name, *(value(ratio, 3) for ratio in line)])
    return Table(
        f"{OP_OF[op].capitalize()}, a peer's median over our best; cells where the peer is "
        f"faster by more than {noise:g} % stand out",
        (CELL, *map(shown, ratios)), rows, strong=frozenset(strong),
    )  # fmt: skip


def _peer_ratio(run: Run, cell: Cell, series: str) -> float | None:
    peer, best = run.by_key.get((cell, series)), run.best(cell)
    return peer.us / best.us if peer and peer.us and best and best.us else None


# ---- words ---------------------------------------------------------------------------------------


def glossary(noise: float) -> Iterator[Block]:
    """What the page's words mean."""
    yield Heading(2, "Glossary")
    yield Items(
        [
            "ladder: the default config, which follows from shape, dtypes and device without a "
            f"measurement. tuned: the config that a search has recorded; {NONE} where that is the "
            "ladder's.",
            "config, e.g. `b256-t256-v16-reg-p1-fl`: threads of a block, threads of a row, bytes "
            "of a load, how a row travels, then what is not the default; `rmsnorm_raw/config.py` "
            "has every part.",
            "quack: by its own default config. quack searched: by the fastest config known of it, "
            "of a search on an H200 or in the run; where none is known, by its default.",
            "variant of a probe, e.g. `b256-u1-lk-g256`: threads of a block, 16-byte accesses of a "
            "lane in a step; `p` persistent blocks; `lk`, `ls` loads that the caches keep or "
            "stream, `sk`, `ss` stores likewise; `g` bytes between buffers.",
            "% of write (best): of the fastest of the three opening probes, which the title names; "
            "the percentage beside is of the probe that reads and writes as the operation does.",
            "cold: one call, the caches evicted before it. steady: trains of calls over more "
            "tensors than the caches hold.",
            "dumbbells: a row a cell, from the first config's percentage to the second's; green "
            f"where the second is faster by more than the noise of {noise:g} %, red where it is "
            "slower by more, grey within it.",
            "timing protocol: which rules of `rmsnorm_raw/measure.py` the times are by.",
        ]
    )
