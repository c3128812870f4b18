"""The worker: a child that may be lost, and a search that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from planted_lab import PlantedLab

from rmsnorm_raw import ladder, space
from rmsnorm_raw import worker as module
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.backends.cpu import CpuBackend
from rmsnorm_raw.lab import Fault, Lab
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.worker import Worker, WorkerLost

PROBLEM = Problem.forward(9, 256, "bfloat16")


@pytest.fixture(scope="module")
def configs(cpu32: Backend) -> list:
    """The ladder's config and four others, of different machine code."""
    base = ladder.default_config(PROBLEM, cpu32.device)
    kept = space.enumerate_configs(PROBLEM, cpu32.device).kept
    shapes = {(c.block, c.threads_per_row): c for c in kept if c.path == "registers"}
    others = [config for config in shapes.values() if config != base][:4]
    return [base, *others]


def planted(limit_s: float = 60.0, **fates: str) -> Worker:
    return Worker(partial(PlantedLab, fates), limit_s=limit_s)


def lab_with_compiler(command: str) -> Lab:
    """A lab on the simulator, wave 32, with a compiler of one's own."""
    return Lab(CpuBackend(32, compiler=(command,)))


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    asked = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip()[:1] not in ("", "Z")


def within(seconds: float, true: Callable[[], object]) -> bool:
    """Whether something becomes true in time."""
    until = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < until:
        time.sleep(0.1)
    return bool(found)


def interrupt_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_a_healthy_lab_does_all_steps_in_one_child(configs: list) -> None:
    with planted() as worker:
        built = worker.compile(PROBLEM, configs)
        process = worker._process
        assert list(built) == configs
        assert len({found for found in built.values() if isinstance(found, str)}) == len(configs)
        assert worker.gate(PROBLEM, configs) == dict.fromkeys(configs, "")
        assert worker.try_out(PROBLEM, configs) == dict.fromkeys(configs, "")
        taken = worker.time(PROBLEM, configs, "cold", {})
        assert not isinstance(taken, Fault)
        assert list(taken) == configs
        assert all(samples.simulated for samples in taken.values())
        assert worker._process is process
    assert worker._process is None


def test_a_config_that_crashes_costs_its_own_result_alone(configs: list) -> None:
    slug = configs[2].slug
    with planted(**{slug: "crash"}) as worker:
        found = worker.gate(PROBLEM, configs)
    assert [config for config, result in found.items() if result] == [configs[2]]
    fault = found[configs[2]]
    assert isinstance(fault, Fault)
    assert fault.kind == "runtime"
    assert "signal 6" in fault.message
    assert "planted last words" in fault.message
    assert list(found) == configs


def test_a_crash_among_parallel_compilations_finds_its_culprit(configs: list) -> None:
    with planted(**{configs[3].slug: "crash in the compiler"}) as worker:
        built = worker.compile(PROBLEM, configs)
    kinds = [found.kind if isinstance(found, Fault) else "" for found in built.values()]
    assert kinds == ["", "", "", "runtime", ""]


def test_a_config_that_hangs_is_ended_and_the_others_go_on(configs: list) -> None:
    slug = configs[1].slug
    began = time.monotonic()
    with planted(limit_s=15.0, **{slug: "hang"}) as worker:
        found = worker.gate(PROBLEM, configs[:3])
    assert time.monotonic() - began < 60
    fault = found[configs[1]]
    assert isinstance(fault, Fault)
    assert fault.kind == "timeout"
    assert "15 s" in fault.message
    assert [found[configs[0]], found[configs[2]]] == ["", ""]


def test_a_wrong_kernel_and_one_that_does_not_compile_are_results(configs: list) -> None:
    with planted(**{configs[1].slug: "wrong", configs[2].slug: "text"}) as worker:
        built = worker.compile(PROBLEM, configs)
        process = worker._process
        gated = worker.gate(PROBLEM, configs[:2])
        assert worker._process is process  # neither costs the child its life
    kinds = [found.kind if isinstance(found, Fault) else "" for found in built.values()]
    assert kinds == ["", "", "compile", "", ""]
    assert "planted" in getattr(built[configs[2]], "message", "")
    assert gated[configs[0]] == ""
    assert getattr(gated[configs[1]], "kind", "") == "correctness"


def test_what_is_left_at_the_time_limit_has_no_result(configs: list) -> None:
    with planted() as worker:
        worker.start()
        assert worker.compile(PROBLEM, configs, time.monotonic()) == {}
        assert worker.gate(PROBLEM, configs, time.monotonic()) == {}


def test_a_child_that_does_not_start_is_an_error_with_its_words() -> None:
    class Here:  # no module of the child has it
        pass

    with Worker(partial(PlantedLab, {"a": Here})) as worker, pytest.raises(Exception, match="Here"):  # type: ignore[dict-item]
        worker.start()
    with (
        Worker(partial(os.abort)) as worker,
        pytest.raises(WorkerLost, match=r"does not start.*signal 6"),
    ):
        worker.start()


def test_an_interrupt_ends_the_child(configs: list) -> None:
    """Ctrl-C reaches the parent while the child is busy: the next step gets a fresh child."""
    worker = planted(**{configs[1].slug: "hang"})
    with worker:
        worker.start()
        process = worker._process
        assert process is not None
        interrupt_after(1.0)
        with pytest.raises(KeyboardInterrupt):
            worker.gate(PROBLEM, configs[1:2])
        assert process.poll() is not None
        assert worker.gate(PROBLEM, configs[:1]) == {configs[0]: ""}


def test_an_interrupt_of_the_start_ends_the_child() -> None:
    with Worker(partial(time.sleep, 60)) as worker:
        interrupt_after(1.0)
        with pytest.raises(KeyboardInterrupt):
            worker.start()
        assert (worker._process, worker._connection) == (None, None)


def test_an_interrupt_ends_the_compilers_too(configs: list, tmp_path: Path) -> None:
    compiler, started = tmp_path / "compiler", tmp_path / "pid"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho $$ > {started}\nexec sleep 600\n'
    )
    compiler.chmod(0o755)
    with Worker(partial(lab_with_compiler, str(compiler))) as worker:
        worker.start()
        interrupt_after(3.0)
        with pytest.raises(KeyboardInterrupt):
            worker.compile(PROBLEM, configs[:1])
    pid = int(started.read_text())
    assert within(10, lambda: not running(pid))


def test_a_child_that_hangs_ends_with_its_parent(configs: list, tmp_path: Path) -> None:
    slug, script = configs[0].slug, tmp_path / "parent.py"
    script.write_text(
        "from functools import partial\n"
        "from planted_lab import PlantedLab\n"
        "from rmsnorm_raw.config import Config\n"
        "from rmsnorm_raw.problem import Problem\n"
        "from rmsnorm_raw.worker import Worker\n"
        f"with Worker(partial(PlantedLab, {{{slug!r}: 'hang'}})) as worker:\n"
        "    worker.start()\n"
        "    print(worker._process.pid, flush=True)\n"
        f"    worker.gate(Problem.forward(9, 256, 'bfloat16'), [Config.parse({slug!r})])\n"
    )
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(1.0)  # it is in the gate by now
        assert running(child)
        parent.kill()
    assert within(10, lambda: not running(child))


# ---- whose kernels -------------------------------------------------------------------------------


def test_a_package_in_the_current_folder_is_not_the_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rmsnorm_raw").mkdir()
    (tmp_path / "rmsnorm_raw" / "__init__.py").write_text("raise SystemExit('another checkout')")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    monkeypatch.chdir(tmp_path)
    with planted() as worker:
        worker.start()


def test_what_python_passes_over_in_its_path_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    with planted() as worker:
        worker.start()


@pytest.mark.parametrize("at", [0, 1], ids=["folder", "text"])
def test_a_child_with_other_kernels_is_refused(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = module._kernels()
    ours = [*theirs]
    ours[at] = "another"
    monkeypatch.setattr(module, "_kernels", lambda: tuple(ours))
    with planted() as worker:
        with pytest.raises(WorkerLost, match="other kernels") as caught:
            worker.start()
        assert theirs[0] in str(caught.value)
        assert ours[0] in str(caught.value)
        assert worker._process is None


@pytest.mark.parametrize("executable", ["", None, "/nowhere/python"])
def test_without_a_python_to_start_no_pipe_is_left(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    pipes: list = []
    make = module.multiprocessing.Pipe
    monkeypatch.setattr(module.multiprocessing, "Pipe", lambda: pipes.extend(make()) or pipes)
    with planted() as worker, pytest.raises(WorkerLost, match=r"sys\.executable is"):
        worker.start()
    assert [end.closed for end in pipes] == [True, True]


def test_a_script_without_a_guard_can_tune(tmp_path) -> None:
    """The child imports the package alone, never the caller's script."""
    script = tmp_path / "script.py"
    script.write_text(
        "import rmsnorm_raw as rr\n"
        "print('once')\n"
        "p = rr.Problem.forward(3, 64, 'fp32')\n"
        "print(rr.tune(p, backend='cpu', budget_s=3).simulated)\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert done.stdout.split() == ["once", "True"]
