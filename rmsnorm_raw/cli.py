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
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rmsnorm_raw import __version__, console
from rmsnorm_raw.errors import InvalidInput, RmsnormRawError
from rmsnorm_raw.options import Asked, takes_problem


class _OwnErrors(TyperGroup):
    """Commands whose errors of the package's own are one message and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's, inside typer
            raise
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


class Effort(str, enum.Enum):
    """The values of --effort."""

    none = "none"
    quick = "quick"
    full = "full"


class Regime(str, enum.Enum):
    """The values of --regime."""

    cold = "cold"
    steady = "steady"


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


def _version(asked: bool) -> None:
    if asked:
        print(f"rmsnorm-raw {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """What stands before a command; the help's own text is the app's."""


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """What is here, what is missing, and the command that mends it; exit code 1 if nothing runs."""
    from rmsnorm_raw.doctor import examine

    checks, refusals = examine()
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
@takes_problem(required=True)
def inspect(
    asked: Asked,
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
    from rmsnorm_raw import backends, inspection, workbench

    if source + asm + as_json > 1:
        raise InvalidInput("--source, --asm and --json each print one thing alone: give one")
    if asm and arch is None:
        raise InvalidInput("--asm prints AMD's machine code: add --arch gfx950 or --arch gfx942")
    if arch is None:
        where = backends.get_backend(backend)
        kernel = workbench.build(asked.problem(where.device.arch), config, backend=where)
    elif backend is None:
        kernel = workbench.build(asked.problem(arch), config, device=arch)
    else:
        raise InvalidInput("--arch needs no device and --backend names one: leave one of them out")
    if source:
        print(kernel.source.text)
        return
    if isinstance(kernel, workbench.OfflineKernel) and asm:
        print(kernel.asm)
        return
    facts, lists = inspection.facts(kernel)
    if as_json:
        console.print_json(facts | lists)
    else:
        inspection.print_facts(facts, lists)


@app.command()
@takes_problem(required=True)
def bench(
    asked: Asked,
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
    from rmsnorm_raw import backends, clones, environment, measure, workbench
    from rmsnorm_raw.study.rooflines import roofline_facts
    from rmsnorm_raw.study.summary import printed
    from rmsnorm_raw.study.sweep import cell_columns, time_columns

    where = backends.get_backend(backend)
    problem = asked.problem(where.device.arch)
    if regime is Regime.steady and where.device.simulated:
        raise InvalidInput("the simulator has no steady times: leave out --regime steady")
    clones.require_launches(problem)
    with console.progress() as step:
        step(0, 4, "build")
        kernel = workbench.build(problem, config, backend=where)
        with console.results(out, where.device) as folder:
            step(1, 4, "verify")
            verdict = kernel.check()
            step(2, 4, "time")
            samples = measure.measure(
                problem, kernel.config, kernel.binary, verdict, regime=regime.value
            )
            step(3, 4, "roofline")
            roofline = None if where.device.simulated else workbench.roofline(where)
        step(4, 4, "done")
    row = cell_columns(problem, where.device) | {"config": kernel.config.slug}
    row |= time_columns(problem, verdict, samples, roofline)
    facts = {
        "command": environment.command(sys.argv),
        "problem": repr(problem),
        "chosen_by": kernel.origin,
        "backend": where.name,
        "device": asdict(where.device),
        "timing_protocol": measure.TIMING_PROTOCOL,
        "row": row,
        "verdict": asdict(verdict),
        "samples": asdict(samples),
        "roofline": roofline and roofline_facts(roofline),
    }
    path = folder / "bench.json"
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
@takes_problem(required=False)
def tune(
    asked: Asked,
    all_cells: Annotated[
        bool, typer.Option("--all", help="The study's 90 cells, in place of --op, --rows, --cols.")
    ] = False,
    effort: Annotated[
        Effort, typer.Option("--effort", help="none: what is known; quick: seconds; full: minutes.")
    ] = Effort.quick,
    budget: Annotated[
        float | None, typer.Option("--budget", help="Seconds a search; by the effort.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--anew", help="Take the record of an earlier search.")
    ] = True,
    ablate: Annotated[
        bool,
        typer.Option("--ablate", help="On a GPU: what each knob of the ladder's config is worth."),
    ] = False,
    regime: Annotated[
        Regime | None,
        typer.Option("--regime", help="With --ablate: cold (if not given) or steady."),
    ] = None,
    backend: BackendOption = None,
    out: OutOption = None,
) -> None:
    """Search for a config that beats the ladder's; writes tune.csv, or ablation.csv."""
    from rmsnorm_raw import backends, tuner
    from rmsnorm_raw.study import cells, tuning

    if regime is not None and not ablate:
        raise InvalidInput("--regime is of --ablate: a search plays its finals in both regimes")
    if all_cells and (ablate or asked.names_a_problem):
        raise InvalidInput("--all is 90 cells: leave out --ablate, and all that names a problem")
    where = backends.get_backend(backend)
    problems = cells.cells() if all_cells else (asked.problem(where.device.arch),)
    for problem in problems:
        tuner.require_tunable(problem, effort.value, budget)
    simulated = where.device.simulated
    if ablate and simulated:
        raise InvalidInput("an ablation is of times, and simulated ones say nothing: use a GPU")
    if ablate:
        with console.results(out, where.device) as folder, console.progress() as step:
            changes = tuning.ablate(
                problems[0], where, folder, regime=(regime or Regime.cold).value, progress=step
            )
        console.print_table(tuning.CHANGE_TITLES, tuning.change_rows(changes))
        print(f"written: {folder / 'ablation.csv'}")
        return
    if simulated and effort is not Effort.none:
        print("on the simulator: its times mean nothing, and no record is kept")
    with console.results(out, where.device) as folder, console.progress() as step:
        table, decisions = tuning.tune_all(
            problems, where, folder, effort=effort.value, budget_s=budget, resume=resume,
            progress=step,
        )  # fmt: skip
    if all_cells:
        console.print_table(tuning.TITLES, tuning.table_rows(table))
    print("\n".join(tuning.summary(table, len(problems), simulated=simulated)))
    if not all_cells:
        print("\n".join(map(str, decisions)))
    print(f"written: {folder / 'tune.csv'}", file=sys.stderr)
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
