from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rmsnorm_raw as rr
from rmsnorm_raw import backends, cli, console, launch, measure, store, tuner, workbench
from rmsnorm_raw.backends import Backend, offline
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.environment import Check
from rmsnorm_raw.errors import BackendUnavailable, CompileError
from rmsnorm_raw.source import Source
from rmsnorm_raw.study import origin
from rmsnorm_raw.study import sweep as study
from rmsnorm_raw.study.idle import Busy
from rmsnorm_raw.study.providers import Provider
from rmsnorm_raw.study.table_file import whole_records

CELL = ("--op", "forward", "--rows", "5", "--cols", "256", "--backend", "cpu")
WIDER = ("--op", "backward", "--rows", "100", "--cols", "3000", "--backend", "cpu")


def run(*args: str) -> Any:
    return CliRunner().invoke(cli.app, args)


def done(*args: str) -> str:
    """The stdout of a command that must succeed."""
    result = run(*args)
    assert result.exit_code == 0, result.output
    assert isinstance(result.stdout, str)
    return result.stdout


def refused(*args: str) -> str:
    """The one message of a command that must end with exit code 2."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert isinstance(result.stderr, str)
    return result.stderr


def test_help_lists_the_commands_and_loads_no_numpy() -> None:
    text = "import sys\nfrom rmsnorm_raw.cli import app\ntry:\n    app(['--help'])\nfinally:\n"
    text += "    print('loaded', 'numpy' in sys.modules, 'rich.progress' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    for command in ("doctor", "inspect", "bench", "tune", "sweep"):
        assert re.search(rf"\b{command}\b", shown.stdout)
    assert shown.stdout.endswith("loaded False False\n")


def test_version() -> None:
    assert done("--version") == f"rmsnorm-raw {rr.__version__}\n"


@pytest.mark.parametrize(("short", "op"), [("fwd", "forward"), ("bwd", "backward")])
def test_an_operation_has_a_short_name(short: str, op: str) -> None:
    facts = json.loads(done("inspect", *CELL, "--op", short, "--json"))
    assert facts["problem"] == f"{op} 5x256 bf16/bf16"


# ---- doctor ------------------------------------------------------------------------------------


def test_doctor_says_what_runs_here() -> None:
    text = done("doctor")
    assert re.search(r"^ *cpu +runs here", text, re.MULTILINE)
    assert "C++ compiler" in text


def test_doctor_fails_where_nothing_can_run_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = Check("C++ compiler", False, "neither c++ nor ziglang", "pip install ziglang")
    monkeypatch.setattr("rmsnorm_raw.doctor.checks", lambda: [check])
    monkeypatch.setattr(backends, "available", lambda name: f"no {name}: pip install [{name}]")
    result = run("doctor")
    assert result.exit_code == 1
    assert re.search(r"MEND +C\+\+ compiler +neither .* +pip install ziglang", result.stdout)
    assert "no rocm: pip install [rocm]" in result.stdout  # brackets are not markup
    as_json = run("doctor", "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["checks"][0]["mend"] == "pip install ziglang"


def test_doctor_says_where_the_records_lie_and_how_many_apply(
    cpu64: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "folder", lambda: tmp_path)
    monkeypatch.setattr(backends, "available", lambda name: None if name == "cpu" else "missing")
    (line,) = (check for check in doctors_checks() if check["name"] == "tuned records")
    assert line["ok"] is None
    problem = rr.Problem.forward(64, 256, "bf16")
    found = store.Record(rr.Config.parse("b128-t32"), "FASTER", {}, {}, "", "quick")
    store.save(store.key(problem, cpu64), found)
    (line,) = (check for check in doctors_checks() if check["name"] == "tuned records")
    assert line["ok"] is True
    assert f"{tmp_path}: 1 of 1 apply to CPU simulator, wave 64" in line["found"]


def doctors_checks() -> list[dict[str, Any]]:
    checks: list[dict[str, Any]] = json.loads(done("doctor", "--json"))["checks"]
    return checks


def test_doctor_passes_on_why_a_device_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise BackendUnavailable("waves of 16 lanes: use another device")

    monkeypatch.setattr(backends, "available", lambda name: None if name == "cuda" else "missing")
    monkeypatch.setattr(backends, "get_backend", refuse)
    result = run("doctor")
    assert result.exit_code == 1
    assert re.search(r"^ *cuda +waves of 16 lanes", result.stdout, re.MULTILINE)


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--config", "b256-v32x"), r"'b256-v32x'.*nearest valid slug is 'b256-v"),
        (("--config", "b96"), "'b96.*whole waves"),
        (("--cols", "-4"), "cols is -4"),
        (("--rows", "-1"), "rows is -1"),
        (("--dtype", "float64"), "'float64' is not supported"),
        (("--backend", "metal"), "'metal' is not one of rocm, cuda, cpu"),
        (("--op", "sideways"), r"'--op': 'sideways' is not one of"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "bench"])
def test_a_wrong_argument_is_one_message(
    command: str,
    args: tuple[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    stderr = refused(command, *CELL, *args)
    assert re.search(message, stderr)
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_bench_refuses_what_has_no_elements_before_it_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(workbench, "build")
    assert "nothing to time" in refused("bench", *CELL, "--rows", "0")
    assert list(tmp_path.iterdir()) == []


def test_more_than_there_is_memory_for_is_one_message() -> None:
    size = ("--op", "forward", "--rows", "100000000000", "--cols", "4096", "--backend", "cpu")
    assert re.search(
        "error: Unable to allocate .* take fewer rows or columns", refused("bench", *size)
    )


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(workbench, "build", build)
    assert isinstance(run("inspect", *CELL).exception, ZeroDivisionError)


# ---- inspect -----------------------------------------------------------------------------------


def test_inspect_gives_what_the_kernel_is(cpu64: Backend) -> None:
    facts = json.loads(done("inspect", *WIDER, "--weight-dtype", "fp32", "--json"))
    problem = rr.Problem.backward(100, 3000, "bf16", weight_dtype="fp32")
    kernel = rr.build(problem, backend=cpu64)
    space = rr.enumerate_configs(problem, cpu64.device)
    assert (facts["config"], facts["chosen_by"]) == (kernel.config.slug, "ladder")
    assert facts["kept_configs"] == len(space.kept)
    assert facts["rejected_configs"] == len(space.rejected)
    assert facts["logical_bytes"] == problem.logical_bytes()
    assert facts["source_digest"] == kernel.source.digest
    assert [it["entry_point"] for it in facts["launches"]] == list(kernel.source.entry_points)
    assert {(it["name"], it["value"]) for it in facts["defines"]} == set(kernel.source.defines)


def test_inspect_gives_the_launches_that_a_call_makes(
    cpu64: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = json.loads(done("inspect", *WIDER, "--json"))
    launched: list[dict[str, object]] = []

    def keep(plan: launch.Plan, stream: int = 0) -> None:
        launched.extend(
            {
                "entry_point": it.entry_point,
                "grid": it.grid,
                "block": it.block,
                "lds_bytes": it.lds_bytes,
            }
            for it in plan.launches
        )

    monkeypatch.setattr(launch, "run", keep)
    rr.build(rr.Problem.backward(100, 3000, "bf16"), backend=cpu64).check()
    assert launched[: len(facts["launches"])] == facts["launches"]


def test_inspect_says_who_chose_the_config() -> None:
    facts = json.loads(done("inspect", *CELL, "--config", "b128-t32", "--json"))
    assert (facts["config"], facts["chosen_by"]) == ("b128-t32-v16-reg", "given")


def test_inspect_source_is_the_text_that_is_compiled(cpu64: Backend) -> None:
    kernel = rr.build(rr.Problem.forward(5, 256, "bf16"), backend=cpu64)
    assert done("inspect", *CELL, "--source") == kernel.source.text + "\n"


def test_inspect_prints_every_entry_point_and_define() -> None:
    text = done("inspect", *WIDER)
    for word in ("rmsnorm_backward", "rmsnorm_dweight", "RR_THREADS_PER_ROW", "lds_bytes"):
        assert word in text


ABSENT = ("--op", "backward", "--rows", "32768", "--cols", "8192", "--arch", "gfx950")


@pytest.mark.usefixtures("rocm_stand_in")
def test_inspect_of_an_absent_device_says_what_its_kernels_take() -> None:
    facts = json.loads(done("inspect", *ABSENT, "--config", "b512-lds3-p1", "--json"))
    kernel = rr.build(rr.Problem.backward(32768, 8192, "bf16"), "b512-lds3-p1", device="gfx950")
    assert facts["device"] == "AMD Instinct MI355X (gfx950)"
    assert facts["compiler"] == "hiprtc of ROCm 7.0.0"
    rows = facts["resources"][0]
    taken = kernel.resources[rows.pop("entry_point")]
    assert rows == {name: getattr(taken, name) for name in rows}
    assert rows["limit"] == "LDS"
    assert facts["waits"][0] == {
        "entry_point": "rmsnorm_backward",
        "at": "0x8",
        "vmcnt": 2,
        "waits_for": "1 buffer load to LDS 16 B, 1 global store 16 B",
        "leaves_in_flight": "1 buffer load to LDS 16 B, 1 global store 16 B",
    }
    assert facts["instructions"][0]["buffer load to LDS 16 B"] == 1
    assert facts["in_flight"][0]["in_flight"] == taken.in_flight
    # the stand-in's loop is nobody's kernel
    assert facts["static_gate"] == f"{len(kernel.faults)} faults"
    assert [entry["fault"] for entry in facts["faults"]] == kernel.faults
    assert any("copies before the row loop" in fault for fault in kernel.faults)


@pytest.mark.usefixtures("rocm_stand_in")
def test_inspect_prints_facts_of_kernels_side_by_side() -> None:
    text = done("inspect", *ABSENT)
    assert re.search(r"^ entry_point +rmsnorm_backward +rmsnorm_dweight *$", text, re.MULTILINE)
    assert re.search(r"^ registers +64 +64 *$", text, re.MULTILINE)
    assert "waits, in the row loop once it has settled" in text
    assert "1 buffer load to LDS 16 B, 1 global store 16 B" in text


@pytest.mark.usefixtures("rocm_stand_in")
def test_inspect_prints_machine_code_or_source_alone() -> None:
    kernel = rr.build(rr.Problem.backward(32768, 8192, "bf16"), device="gfx950")
    assert done("inspect", *ABSENT, "--asm") == kernel.asm + "\n"
    assert done("inspect", *ABSENT, "--source") == kernel.source.text + "\n"


def test_inspect_without_amds_compiler_names_the_command_that_fetches_it(no_rocm: Path) -> None:
    stderr = refused("inspect", *ABSENT)
    assert "python -m rmsnorm_raw.backends.rocm_libraries fetch 7.0.0" in stderr


@pytest.mark.usefixtures("rocm_stand_in")
def test_inspect_gives_the_log_of_a_compiler_that_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(source: Source, *args: object, **kwargs: object) -> None:
        raise CompileError(source.slug, "hiprtc died with SIGABRT\nLLVM ERROR: of its own", "do so")

    monkeypatch.setattr(offline, "compile_offline", crash)
    stderr = refused("inspect", *ABSENT, "--config", "b512-pp-p1")
    assert stderr.splitlines() == [
        "error: config 'b512-t512-v16-pp-p1' does not compile",
        "hiprtc died with SIGABRT",
        "LLVM ERROR: of its own",
        "do so",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*ABSENT, "--backend", "cpu"), "leave one of them out"),
        ((*CELL, "--asm"), "add --arch gfx950 or --arch gfx942"),
        ((*CELL, "--source", "--json"), "each print one thing alone"),
        ((*ABSENT, "--source", "--asm"), "each print one thing alone"),
        ((*ABSENT[:-1], "sm_90"), "'sm_90': use one of gfx950, gfx942"),
        ((*ABSENT[:-1], "gfx90a"), "'gfx90a': use one of gfx950, gfx942"),
    ],
)
def test_inspect_says_which_arguments_do_not_go_together(
    args: tuple[str, ...], message: str
) -> None:
    assert message in refused("inspect", *args)


# ---- bench -------------------------------------------------------------------------------------


def test_bench_prints_simulated_times_without_percent(tmp_path: Path) -> None:
    text = done("bench", *CELL, "--weight-dtype", "fp32", "--out", str(tmp_path))
    assert "simulated us" in text
    assert "%" not in text
    assert "GB/s" not in text
    assert "gate: passed" in text
    facts = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert facts["row"]["config"] == rr.default_config(
        rr.Problem.forward(5, 256, "bf16", weight_dtype="fp32"), rr.get_backend("cpu").device
    ).slug  # fmt: skip
    assert facts["samples"]["simulated"] is True
    assert len(facts["samples"]["times_us"]) == int(facts["row"]["samples"])
    assert facts["verdict"]["passed"] is True
    assert facts["roofline"] is None
    assert facts["timing_protocol"] == measure.TIMING_PROTOCOL
    assert facts["device"]["simulated"] is True
    assert "packages" in facts


def test_bench_without_a_weight(tmp_path: Path) -> None:
    done("bench", *CELL, "--weight-dtype", "none", "--out", str(tmp_path))
    facts = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert facts["row"]["weight"] == "none"


def test_files_go_to_a_folder_by_device_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = done("bench", *CELL)
    (found,) = tmp_path.rglob("bench.json")
    assert re.fullmatch(
        r"rmsnorm-raw-results/CPU-simulator-wave-64/\d{8}T\d{6}Z/bench\.json",
        str(found.relative_to(tmp_path)),
    )
    assert f"written: {found.relative_to(tmp_path)}" in text


def test_runs_of_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console.time, "strftime", lambda *args: "20261130T120000Z")
    device = rr.get_backend("cpu").device
    folders = [console.out_dir(None, device) for _ in range(3)]
    assert [folder.name for folder in folders] == [
        "20261130T120000Z", "20261130T120000Z-2", "20261130T120000Z-3",
    ]  # fmt: skip
    assert len([path for path in tmp_path.rglob("*") if not list(path.iterdir())]) == 3


def test_steady_times_of_the_simulator_are_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workbench, "build", None)
    assert "has no steady times" in refused("bench", *CELL, "--regime", "steady")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_kernel_is_not_benched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_a_wrong_forward(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for out in ((), ("--out", "new")):
        stderr = refused("bench", *CELL, *out)
        assert "computes forward 5x256 bf16/bf16 wrongly" in stderr
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    refused("bench", *CELL, "--out", "mine")
    assert (tmp_path / "mine").is_dir()


# ---- sweep -------------------------------------------------------------------------------------

FEW = (rr.Problem.forward(3, 256, "bf16"), rr.Problem.backward(3, 256, "fp16"))


def plant_a_wrong_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    render: Callable[..., Source] = workbench.render

    def planted(*args: Any) -> Source:
        source = render(*args)
        right, wrong = "out[e] = x[e] * rstd;", "out[e] = 1.01f * x[e] * rstd;"
        return replace(source, text=source.text.replace(right, wrong))

    monkeypatch.setattr(workbench, "render", planted)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "cells", lambda: FEW)


@pytest.mark.usefixtures("few")
def test_sweep_writes_its_table_and_its_environment(tmp_path: Path) -> None:
    text = done("sweep", "--quick", "--backend", "cpu", "--rows-cap", "2", "--out", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.csv", "environment.json"}
    assert "rows are capped at 2" in text
    assert "simulated us" in text
    assert "%" not in text
    assert text.count("PASS") == 2
    assert json.loads((tmp_path / "environment.json").read_text())["rows_cap"] == 2


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("quick", "budget_s"), [(("--quick",), 0.3), ((), 2.0)])
def test_quick_gives_a_cell_less_time(
    quick: tuple[str, ...], budget_s: float, tmp_path: Path
) -> None:
    done("sweep", *quick, "--backend", "cpu", "--out", str(tmp_path))
    assert json.loads((tmp_path / "environment.json").read_text())["budget_s"] == budget_s


@pytest.mark.usefixtures("few")
def test_a_failed_cell_is_listed_and_ends_the_sweep_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_a_wrong_forward(monkeypatch)
    result = run("sweep", "--quick", "--backend", "cpu", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "1 of 2 rows passed" in result.stdout
    assert re.search(r"^FAIL: fwd 3x256 bf16/bf16 b\S+: y\[", result.stdout, re.MULTILINE)


@pytest.mark.usefixtures("few")
def test_a_sweep_says_whose_modules_it_calls_before_it_begins(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = ("sweep", "--quick", "--backend", "cpu", "--rows-cap", "2", "--out", str(tmp_path))
    result = run(*command, "--providers", "torch")
    assert result.exit_code == 0, result.output
    ours, torch, *_ = result.stderr.splitlines()
    assert re.fullmatch(r"ours +rmsnorm_raw\.workbench \S+ /\S+/rmsnorm_raw/workbench\.py", ours)
    assert re.fullmatch(r"torch +torch\.nn\.functional \S+ /\S+/nn/functional\.py", torch)
    assert result.stdout.count("PASS") == 4


@pytest.mark.usefixtures("few")
def test_what_a_sweep_cannot_begin_with_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("sweep", "--backend", "cpu", "--rows-cap", "2", "--out", str(tmp_path / "out"))
    assert "no provider is called nobody: there are ours, quack" in refused(
        *command, "--provider", "nobody"
    )
    monkeypatch.setattr(Provider, "missing", lambda self: f"{self.name} is not installed: pip it")
    assert "liger is not installed: pip it" in refused(*command, "--provider", "liger")
    monkeypatch.undo()
    monkeypatch.setitem(origin.CALLED, "ours", ("build", "no_such_function"))
    assert "has no no_such_function" in refused(*command)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("few")
def test_a_sweep_says_where_it_writes_only_if_it_writes_there(tmp_path: Path) -> None:
    command = ("sweep", "--quick", "--backend", "cpu", "--rows-cap", "2", "--out", str(tmp_path))
    assert f"writing to {tmp_path}" in run(*command).stderr.splitlines()
    stderr = refused(*command)
    assert "sweep.csv is finished" in stderr
    assert "writing to" not in stderr


def busy(device: DeviceSpec, *, allow_busy: bool) -> dict[str, object]:
    if not allow_busy:
        raise Busy("12 train.py has it")
    return {"state": "busy", "allow_busy": True}


@pytest.mark.usefixtures("few")
def test_a_busy_gpu_is_refused_unless_that_is_allowed_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmsnorm_raw.study.idle.check", busy)
    out = tmp_path / "out"
    command = ("sweep", "--backend", "cpu", "--rows-cap", "2", "--out", str(out))
    assert "error: 12 train.py has it" in refused(*command)
    assert not out.exists()
    assert "BUSY: the GPU was not idle" in done(*command, "--allow-busy")
    looks = json.loads((out / "environment.json").read_text())["idle"]
    assert [each["state"] for each in looks] == ["busy", "busy"]


@pytest.mark.usefixtures("few")
def test_a_full_disk_ends_a_sweep_with_a_message_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("sweep", "--backend", "cpu", "--rows-cap", "2", "--out", str(tmp_path))
    room = [600]

    def write(file: int, data: bytes, write: Callable[[int, bytes], int] = os.write) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(file, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr("rmsnorm_raw.study.folder.os.write", write)
    said = refused(*command)
    assert f"error: {tmp_path} cannot be written: No space left on device. 1 rows are kept" in said
    monkeypatch.undo()
    monkeypatch.setattr(study, "cells", lambda: FEW)
    kept = whole_records((tmp_path / "sweep.csv").read_bytes())
    assert kept.count(b"\r\n") == 2
    done(*command)
    text = (tmp_path / "sweep.csv").read_bytes()
    assert text.startswith(kept)
    assert text.count(b"\r\n") == 3


@pytest.mark.usefixtures("few")
def test_a_folder_that_cannot_be_written_ends_a_sweep_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, text: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("rmsnorm_raw.environment.replace_text", denied)
    said = refused("sweep", "--backend", "cpu", "--rows-cap", "2", "--out", str(tmp_path))
    assert f"{tmp_path} cannot be written: Permission denied. 0 rows are kept" in said
    (tmp_path / "file").touch()
    assert "give a folder that you can write" in refused(
        "sweep", "--backend", "cpu", "--out", str(tmp_path / "file" / "under")
    )


# ---- tune --------------------------------------------------------------------------------------


def test_tune_prints_its_decision_and_writes_its_table(tmp_path: Path) -> None:
    text = done("tune", *CELL, "--out", str(tmp_path))
    assert text.startswith("on the simulator: its times mean nothing, and no record is kept\n")
    assert {path.name for path in tmp_path.iterdir()} == {"tune.csv", "environment.json"}
    assert "simulated times say nothing about speed, so the ladder stays" in text
    assert re.search(r'^rr\.rmsnorm_fwd\(x, w, config="b\S+"\)$', text.strip().splitlines()[-1])


def test_tune_without_effort_says_what_is_known(tmp_path: Path) -> None:
    assert "no search: ladder" in done("tune", *CELL, "--effort", "none", "--out", str(tmp_path))


def test_tune_of_all_cells_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmsnorm_raw.study.cells.cells", lambda: FEW)
    text = done("tune", "--all", "--effort", "none", "--backend", "cpu", "--out", str(tmp_path))
    assert len(re.findall(r"^ *(?:fwd|bwd) .* LADDER ", text, re.MULTILINE)) == len(FEW)
    assert f"0 of {len(FEW)} problems tuned" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give --op, --rows and --cols, or --all"),
        (("--op", "forward", "--rows", "4"), "give --op, --rows and --cols, or --all"),
        (("--all", "--op", "forward"), "--all is 90 cells"),
        (("--all", "--ablate"), "--all is 90 cells"),
        (("--all", "--residual", "--dtype", "fp32"), "--all is 90 cells"),
        ((*CELL, "--ablate"), "simulated ones say nothing: use a GPU"),
        (("--op", "forward", "--rows", "0", "--cols", "8"), "nothing to tune"),
        ((*CELL, "--budget", "0"), "give seconds above 0"),
        ((*CELL, "--budget", "nan"), "give seconds above 0"),
        ((*CELL, "--regime", "steady"), "--regime is of --ablate"),
        ((*CELL, "--effort", "thorough"), "thorough"),
    ],
)
def test_tune_refuses_in_one_message_and_leaves_no_folder(
    args: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu")
    monkeypatch.chdir(tmp_path)
    assert message in re.sub(r"\s+", " ", refused("tune", *args))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_tune_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[rr.Problem] = []

    def tune(problem: rr.Problem, effort: str, **options: Any) -> tuner.Decision:
        asked.append(problem)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return tuner_tune(problem, "none", **options)

    tuner_tune = tuner.tune
    monkeypatch.setattr(tuner, "tune", tune)
    monkeypatch.setattr("rmsnorm_raw.study.cells.cells", lambda: FEW)
    result = run("tune", "--all", "--backend", "cpu", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "interrupted with 1 of 2 problems done" in result.stdout


# ---- progress ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("few")
def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    result = run("sweep", "--quick", "--backend", "cpu", "--out", str(tmp_path))
    assert re.search(rf"^\[1/2\] {FEW[1]} ladder \(0:\d\d left\)$", result.stderr, re.MULTILINE)
    assert "\x1b" not in result.stderr
    assert str(FEW[1]) not in result.stdout


@pytest.mark.parametrize(("steps", "lines"), [(90, 11), (11, 11), (10, 11), (4, 5), (0, 1)])
def test_progress_of_many_steps_is_a_line_for_each_tenth(
    capsys: pytest.CaptureFixture[str], steps: int, lines: int
) -> None:
    with console.progress() as step:
        for done in range(steps + 1):
            step(done, steps, "a cell")
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == lines
    assert shown[0].startswith(f"[0/{steps}] a cell")
    assert shown[-1].startswith(f"[{steps}/{steps}] a cell")


def test_progress_of_few_steps_has_all_that_is_done_in_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with console.progress() as step:
        for what in ("compiles", "gates", "times"):
            step(0, 1, what)
    assert capsys.readouterr().err.splitlines() == [
        "[0/1] compiles", "[0/1] gates", "[0/1] times"
    ]  # fmt: skip


@pytest.mark.usefixtures("few")
def test_progress_is_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take stderr for a terminal
    monkeypatch.setenv("TERM", "xterm")
    result = run("sweep", "--quick", "--backend", "cpu", "--out", str(tmp_path))
    assert "━" in result.stderr
    assert "[1/2]" not in result.stderr


def test_the_module_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rmsnorm_raw", "--help"], capture_output=True, text=True, check=True
    )
    assert all(name in done.stdout for name in ("doctor", "bench", "tune", "sweep", "inspect"))
