"""``rmsnorm-raw``: the workbench from a shell.

Results go to stdout and into files, progress and errors to stderr. Exit code 1: a cell of a sweep
or a search failed, a search was interrupted, or nothing can run here; 2: a wrong argument or
another error of the package's own, as one message. Modules are imported by the commands that need
them, so that ``--help`` is quick.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rmsnorm_raw import console
from rmsnorm_raw.errors import BackendUnavailable, InvalidInput, RmsnormRawError

if TYPE_CHECKING:
    from rmsnorm_raw.problem import Problem


class _OwnErrors(TyperGroup):
    """Commands whose errors of the package's own are one message and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RmsnormRawError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from error
        except MemoryError as error:  # NumPy's, and CuPy's
            print(f"error: {error}: take fewer rows or columns", file=sys.stderr)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_OwnErrors,
    help="RMSNorm kernels as inline HIP source: verified, timed, set beside a roofline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Op(str, enum.Enum):
    """The values of --op."""

    forward = "forward"
    backward = "backward"


class Effort(str, enum.Enum):
    """The values of --effort."""

    none = "none"
    quick = "quick"
    full = "full"


class Regime(str, enum.Enum):
    """The values of --regime."""

    cold = "cold"
    steady = "steady"


OpOption = Annotated[Op, typer.Option("--op", help="The operation.")]
RowsOption = Annotated[int, typer.Option("--rows", help="M, the number of rows.")]
ColsOption = Annotated[int, typer.Option("--cols", help="N, the elements of a row.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Of x: fp16, bf16 or fp32.")]
WeightOption = Annotated[
    str, typer.Option("--weight-dtype", help="fp16, bf16, fp32, same (as x) or none (no weight).")
]
ConfigOption = Annotated[
    str | None,
    typer.Option("--config", help="A slug, or ladder; by default the best config known here."),
]
BackendOption = Annotated[
    str | None,
    typer.Option("--backend", help="rocm, cuda or cpu; by default what is here, in this order."),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", file_okay=False, help="By default ./rmsnorm-raw-results/<device>/<time>."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """What is here, what is missing, and the command that mends it; exit code 1 if nothing runs."""
    from rmsnorm_raw import backends, environment, store

    checks = environment.checks()
    refusals = {name: backends.available(name) for name in backends.NAMES}
    here = next((name for name, refusal in refusals.items() if refusal is None), None)
    if here is not None:
        try:
            checks.append(store.check(backends.get_backend(here)))
        except BackendUnavailable as error:  # a device that no kernel is written for
            refusals[here] = str(error)
    if as_json:
        console.print_json({"checks": [asdict(check) for check in checks], "backends": refusals})
    else:
        mark = {True: "ok", False: "MEND", None: "-"}
        rows = [(mark[check.ok], check.name, check.found, check.mend) for check in checks]
        console.print_table(("", "what", "found", "mend it with"), rows)
        states = [(name, refusal or "runs here") for name, refusal in refusals.items()]
        console.print_table(("backend", "state"), states)
    if None not in refusals.values():
        raise typer.Exit(1)


@app.command()
def inspect(
    op: OpOption,
    rows: RowsOption,
    cols: ColsOption,
    dtype: DtypeOption = "bf16",
    weight_dtype: WeightOption = "same",
    config: ConfigOption = None,
    backend: BackendOption = None,
    arch: Annotated[
        str | None,
        typer.Option("--arch", help="gfx950 or gfx942: by AMD's own compiler, with no device."),
    ] = None,
    source: Annotated[bool, typer.Option("--source", help="Print the HIP text alone.")] = False,
    asm: Annotated[
        bool, typer.Option("--asm", help="With --arch: print the machine code alone.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """What a problem is compiled to: config, space, launches, resources, waits, defines, source."""
    from rmsnorm_raw import workbench

    problem = _problem(op, rows, cols, dtype, weight_dtype)
    if asm and arch is None:
        raise InvalidInput("--asm prints AMD's machine code: add --arch gfx950 or --arch gfx942")
    if arch is None:
        kernel = workbench.build(problem, config, backend=backend)
    elif backend is None:
        kernel = workbench.build(problem, config, device=arch)
    else:
        raise InvalidInput("--arch needs no device and --backend names one: leave one of them out")
    if source:
        print(kernel.source.text)
        return
    if isinstance(kernel, workbench.OfflineKernel) and asm:
        print(kernel.asm)
        return
    device = kernel.binary.backend.device
    space = workbench.enumerate_configs(problem, device)
    facts = {
        "problem": str(problem),
        "device": f"{device.name} ({device.arch})",
        "config": kernel.config.slug,
        "chosen_by": kernel.origin,
        "kept_configs": len(space.kept),
        "rejected_configs": len(space.rejected),
        "logical_bytes": problem.logical_bytes(),
        "source_digest": kernel.source.digest,
    }
    lists = {
        "launches": [
            {
                "entry_point": it.entry_point,
                "grid": it.grid,
                "block": it.block,
                "lds_bytes": it.lds_bytes,
            }
            for it in kernel.launches
        ],
        "resources": [
            {"entry_point": name} | console.counts(taken)
            for name, taken in kernel.resources.items()
        ],
    }
    if isinstance(kernel, workbench.OfflineKernel):
        faults = kernel.faults
        facts["compiler"] = f"hiprtc of ROCm {kernel.release}"
        facts["static_gate"] = f"{len(faults)} faults" if faults else "passed"
        lists |= {"faults": [{"fault": fault} for fault in faults]} if faults else {}
        lists |= console.machine_code(kernel.resources)
    lists["defines"] = [{"name": name, "value": value} for name, value in kernel.source.defines]
    if as_json:
        console.print_json(facts | lists)
        return
    console.print_table(("", ""), facts.items())
    for title, entries in lists.items():
        print(f"\n{title}{console.WAITS_MEAN if title == 'waits' else ''}")
        if title in ("resources", "instructions"):  # many facts of few kernels
            names = dict.fromkeys(name for entry in entries for name in entry)
            rows_of_facts = ([name, *(entry.get(name) for entry in entries)] for name in names)
            console.print_table(("", *("" for _ in entries)), rows_of_facts)
        else:
            console.print_table(
                entries[0].keys() if entries else (), (it.values() for it in entries)
            )


@app.command()
def bench(
    op: OpOption,
    rows: RowsOption,
    cols: ColsOption,
    dtype: DtypeOption = "bf16",
    weight_dtype: WeightOption = "same",
    config: ConfigOption = None,
    regime: Annotated[
        Regime,
        typer.Option(
            "--regime", help="cold: one call on an evicted cache; steady: trains of calls."
        ),
    ] = Regime.cold,
    backend: BackendOption = None,
    out: OutOption = None,
) -> None:
    """Verify one kernel, time it and set it beside the roofline; writes bench.json."""
    from rmsnorm_raw import environment, measure, workbench
    from rmsnorm_raw.study.rooflines import roofline_facts
    from rmsnorm_raw.study.summary import printed
    from rmsnorm_raw.study.sweep import cell_columns, time_columns

    problem = _problem(op, rows, cols, dtype, weight_dtype)
    with console.progress() as step:
        step(0, 4, "build")
        kernel = workbench.build(problem, config, backend=backend)
        where = kernel.binary.backend
        path = console.out_dir(out, where.device) / "bench.json"
        step(1, 4, "verify")
        verdict = kernel.check()
        step(2, 4, "time")
        samples = measure.measure(
            problem, kernel.config, kernel.binary, verdict, regime=regime.value
        )
        step(3, 4, "roofline")
        roofline = None if where.device.simulated else workbench.roofline(where)
        step(4, 4, "done")
    row = cell_columns(problem, kernel.config, where.device) | time_columns(
        problem, verdict, samples, roofline
    )
    facts = {
        "command": environment.command(sys.argv),
        "chosen_by": kernel.origin,
        "backend": where.name,
        "device": asdict(where.device),
        "row": row,
        "verdict": asdict(verdict),
        "samples": asdict(samples),
        "roofline": roofline and roofline_facts(roofline),
    }
    environment.write(path, facts)
    console.print_table(*printed([row]))
    print(f"gate: {verdict}")
    print(f"time: {samples}")
    if roofline is not None:
        print(f"roofline: {roofline}")
    print(f"written: {path}")


@app.command()
def sweep(
    quick: Annotated[
        bool, typer.Option("--quick", help="At most 0.3 s of sampling a cell, instead of 2 s.")
    ] = False,
    backend: BackendOption = None,
    rows_cap: Annotated[
        int | None,
        typer.Option("--rows-cap", min=1, help="The most rows a cell is run with."),
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option("--provider", "--providers", help="Peers beside ours: quack,liger,torch ..."),
    ] = None,
    allow_busy: Annotated[
        bool, typer.Option("--allow-busy", help="Begin on a GPU that is not idle; it is recorded.")
    ] = False,
    out: OutOption = None,
) -> None:
    """Verify and time the study's 90 cells; --out of an unfinished sweep goes on with it."""
    from rmsnorm_raw import backends
    from rmsnorm_raw.study import sweep_command

    where, budget_s = backends.get_backend(backend), 0.3 if quick else 2.0
    raise typer.Exit(sweep_command.run(where, out, provider or (), rows_cap, budget_s, allow_busy))


@app.command()
def tune(
    op: Annotated[Op | None, typer.Option("--op", help="The operation.")] = None,
    rows: Annotated[int | None, typer.Option("--rows", help="M, the number of rows.")] = None,
    cols: Annotated[int | None, typer.Option("--cols", help="N, the elements of a row.")] = None,
    dtype: DtypeOption = "bf16",
    weight_dtype: WeightOption = "same",
    all_cells: Annotated[
        bool, typer.Option("--all", help="The study's 90 cells, in place of --op, --rows, --cols.")
    ] = False,
    effort: Annotated[
        Effort, typer.Option("--effort", help="none: what is known; quick: seconds; full: minutes.")
    ] = Effort.quick,
    budget: Annotated[
        float | None, typer.Option("--budget", min=0.0, help="Seconds a search; by the effort.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--anew", help="Take the record of an earlier search.")
    ] = True,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="What each knob of the ladder's config is worth.")
    ] = False,
    regime: Annotated[
        Regime, typer.Option("--regime", help="With --ablate: cold or steady.")
    ] = Regime.cold,
    backend: BackendOption = None,
    out: OutOption = None,
) -> None:
    """Search for a config that beats the ladder's; writes tune.csv, or ablation.csv."""
    from rmsnorm_raw import backends
    from rmsnorm_raw.study import cells, tuning

    if all_cells:
        if ablate or (op, rows, cols) != (None, None, None):
            raise InvalidInput("--all is 90 cells: leave out --op, --rows, --cols, --ablate")
        problems = cells.cells()
    elif op is None or rows is None or cols is None:
        raise InvalidInput("give --op, --rows and --cols, or --all")
    else:
        problems = (_problem(op, rows, cols, dtype, weight_dtype),)
    where = backends.get_backend(backend)
    out_dir = console.out_dir(out, where.device)
    if ablate:
        with console.progress() as step:
            changes = tuning.ablate(problems[0], where, out_dir, regime=regime.value, progress=step)
        console.print_table(tuning.CHANGE_TITLES, tuning.change_rows(changes))
        print(f"written: {out_dir / 'ablation.csv'}")
        return
    with console.progress() as step:
        table, decisions = tuning.tune_all(
            problems, where, out_dir, effort=effort.value, budget_s=budget, resume=resume,
            progress=step,
        )  # fmt: skip
    if all_cells:
        console.print_table(tuning.TITLES, tuning.table_rows(table))
    print("\n".join([*tuning.summary(table), *(str(each) for each in decisions if not all_cells)]))
    print(f"written: {out_dir / 'tune.csv'}", file=sys.stderr)
    if len(decisions) < len(problems) or decisions[-1].interrupted:
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of sweeps or suites; the first is the baseline.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 where the page is not what the runs give.")
    ] = False,
    noise: Annotated[
        float, typer.Option("--noise", min=0.0, help="Percent; changes within it count as none.")
    ] = 1.0,
    out: Annotated[
        Path | None, typer.Option("--out", file_okay=False, help="By default the last RUN.")
    ] = None,
) -> None:
    """A page of a run, or of several compared: report.html or comparison.html, and Markdown."""
    from rmsnorm_raw.study import report as study

    raise typer.Exit(study.run(runs, out, noise, check))


def _problem(op: Op, rows: int, cols: int, dtype: str, weight_dtype: str) -> Problem:
    from rmsnorm_raw.problem import Problem

    build = Problem.forward if op is Op.forward else Problem.backward
    return build(rows, cols, dtype, weight_dtype=None if weight_dtype == "none" else weight_dtype)
