"""The worker: a lab in a process of its own, which a search may lose.

A kernel with a fault ends its process's hold on the GPU (on CUDA an illegal address poisons the
context), and one that never ends takes its process with it. So the lab works in a child: it reports
each config as it begins and as it ends. Where the child dies, or gives no sign of life for too
long, the config that had begun is to blame; a new child goes on with those that are left. One child
serves many searches, for its start costs seconds. The caller's own context is never touched.

A child has the parent's ``sys.path`` and says which kernels that made it import, for what it times
is recorded as the parent's. It ends with its parent, and its compilers end with it.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args

from rmsnorm_raw.backends import Backend, get_backend
from rmsnorm_raw.backends.cupy_backend import backend_of_device
from rmsnorm_raw.config import Config
from rmsnorm_raw.errors import RmsnormRawError
from rmsnorm_raw.gate_device import DeviceEngine
from rmsnorm_raw.lab import Fault, Lab, Unhealthy
from rmsnorm_raw.measure import Limits, Regime, Samples
from rmsnorm_raw.problem import Op, Problem
from rmsnorm_raw.records import sha256
from rmsnorm_raw.source import whole_text

#: without a sign of life for longer, a child hangs. The longest honest silence on a GPU is one
#: compilation among many, or one timing; the simulator gates a wide row in minutes
LIMIT_S, SIMULATOR_LIMIT_S = 30.0, 900.0
#: the child imports, makes a context and opens its lab in that time
START_S = 180.0
UNHEALTHY_EXIT = 3
QUOTED = 2000  # characters of what a child printed before its end
PARENT_CHECK_S = 1.0


class WorkerLost(RmsnormRawError, RuntimeError):
    """The worker does not start, or fails in a way that no config explains."""


@dataclass
class _Heard:
    """What a child said of one step, and what ended it."""

    begun: list[Config] = field(default_factory=list)
    ended: dict[Config, str | Fault] = field(default_factory=dict)
    value: Any = None
    lost: Fault | None = None


class Worker:
    """The steps of :class:`.lab.Steps`, done by a child; use it in a ``with``.

    Args:
        open_lab: makes the child's lab; it is pickled.
        limit_s: silence after which the child is ended.
    """

    def __init__(self, open_lab: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
        self._open_lab = open_lab
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._printed: Any = None

    @classmethod
    def on(cls, backend: Backend) -> Worker:
        """A worker on the same device as a backend of this process."""
        simulated = backend.device.simulated
        where = _Where(backend.name, backend.index, backend.device.wave)
        return cls(where, SIMULATOR_LIMIT_S if simulated else LIMIT_S)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Have the child ready: its imports, its context and the gate's own kernels take seconds.

        Raises:
            WorkerLost: it does not start, with what it printed.
        """
        if self._connection is None:
            self._start()

    def close(self) -> None:
        """End the child, and the compilers that it runs: they are the group it leads."""
        if self._process is not None:
            # none is left, or (macOS says so) only zombies
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold on to it
                self._process.wait(10)
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # ---- the steps -------------------------------------------------------------------------------

    def compile(
        self, problem: Problem, configs: Sequence[Config], until: float = math.inf
    ) -> dict[Config, str | Fault]:
        """See :class:`.lab.Steps`."""
        return self._each("compile", problem, configs, until)

    def gate(
        self, problem: Problem, configs: Sequence[Config], until: float = math.inf
    ) -> dict[Config, str | Fault]:
        """See :class:`.lab.Steps`."""
        return self._each("gate", problem, configs, until)

    def try_out(
        self, problem: Problem, configs: Sequence[Config], until: float = math.inf
    ) -> dict[Config, str | Fault]:
        """See :class:`.lab.Steps`."""
        return self._each("try_out", problem, configs, until)

    def time(
        self, problem: Problem, configs: Sequence[Config], regime: Regime, limits: Limits
    ) -> dict[Config, Samples] | Fault:
        """See :class:`.lab.Steps`."""
        patience_s = self._limit_s + len(configs) * limits.get("budget_s", 0.5)
        heard = self._ask("time", (problem, list(configs), regime, limits), patience_s)
        if heard.lost:
            return heard.lost
        taken: dict[Config, Samples] | Fault = heard.value
        return taken

    def _each(
        self, step: str, problem: Problem, configs: Sequence[Config], until: float
    ) -> dict[Config, str | Fault]:
        """A step on each config, through as many children as it takes."""
        found: dict[Config, str | Fault] = {}
        batches, idle = [list(configs)], 0
        while batches:
            batch = batches.pop()
            heard = self._ask(step, (problem, batch, until), self._limit_s)
            found |= heard.ended
            if heard.lost is None:
                continue
            suspects = [config for config in heard.begun if config not in heard.ended]
            left = [c for c in batch if c not in heard.ended and c not in suspects]
            if len(suspects) == 1:
                found[suspects[0]] = heard.lost
            else:  # several compiled side by side: the culprit shows itself alone
                batches += [[config] for config in suspects]
            idle = 0 if heard.begun else idle + 1
            if left and idle > 1:
                raise WorkerLost(f"{step}: {heard.lost.message}, twice before it began")
            batches += [left] * bool(left)
        return {config: found[config] for config in configs if config in found}

    # ---- the child -------------------------------------------------------------------------------

    def _ask(self, step: str, args: tuple[Any, ...], patience_s: float) -> _Heard:
        heard = _Heard()
        try:
            connection = self._connection or self._start()
            connection.send((step, args))
            while True:
                if not connection.poll(patience_s):
                    self.close()
                    heard.lost = Fault("timeout", f"no sign of life for {patience_s:.0f} s")
                    return heard
                word, *said = connection.recv()
                if word == "begun":
                    heard.begun.append(said[0])
                elif word == "ended":
                    heard.ended[said[0]] = said[1]
                elif word == "done":
                    heard.value = said[0]
                    return heard
                else:
                    raise WorkerLost(f"{step} failed in the search's own code:\n{said[0]}")
        except (EOFError, ConnectionError):
            heard.lost = Fault("runtime", self._obituary())
            return heard
        except BaseException:  # an interrupt: what the child is at belongs to nobody any more
            self.close()
            raise

    def _start(self) -> Connection[Any, Any]:
        ours, theirs = multiprocessing.Pipe()
        self._connection = ours
        try:
            with theirs:
                self._process = self._spawn(theirs.fileno())
            try:
                ours.send(self._open_lab)
                word, *said = ours.recv() if ours.poll(START_S) else ("silent", "")
            except (EOFError, ConnectionError):
                word, said = "dead", [self._obituary()]
            if word != "ready":
                raise WorkerLost(f"the worker does not start ({word}): {said[0]}")
            if said != [*_kernels()]:
                raise WorkerLost(
                    f"the worker has other kernels, of {said[0]}, than this process has of "
                    f"{_kernels()[0]}: start Python anew if these were changed since, and look at "
                    "sys.path if they are of two checkouts"
                )
        except BaseException:
            self.close()
            raise
        return ours

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        folders = [folder or os.getcwd() for folder in sys.path if isinstance(folder, str)]
        code = (
            f"import sys; sys.path[:] = {folders!r}; "
            f"from rmsnorm_raw.worker import serve; serve({descriptor}, {os.getpid()})"
        )
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the child
        try:
            return subprocess.Popen(
                [sys.executable or "", "-c", code],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        except OSError as error:
            raise WorkerLost(
                f"the worker does not start: sys.executable is {sys.executable!r} ({error}), and "
                "should be the Python that this process runs"
            ) from error

    def _obituary(self) -> str:
        process, printed = self._process, self._printed
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)  # it has hung up, and is about to end
        self.close()
        code = None if process is None else process.returncode
        if code == UNHEALTHY_EXIT:
            return "the device no longer answers its process"
        printed.seek(0)
        words = printed.read().decode(errors="replace").strip()[-QUOTED:]
        ended = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"the process died ({ended}){': ' + words if words else ''}"


@dataclass(frozen=True, slots=True)
class _Where:
    """Opens the lab on a device, by what a backend is known by."""

    name: str
    index: int
    wave: int

    def __call__(self) -> Lab:
        if self.name == "cpu":
            return Lab(get_backend("cpu", wave=self.wave))
        backend = backend_of_device(self.name, self.index)
        DeviceEngine(backend)  # builds the gate's kernels
        return Lab(backend)


def _kernels() -> tuple[str, str]:
    """(the folder of this package, the digest of its kernels' text)."""
    return str(Path(__file__).resolve().parent), sha256([whole_text(op) for op in get_args(Op)])


def _end_with(parent: int) -> None:
    """End this process, and its group, soon after its parent: a kernel that hangs hears nothing."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os.killpg(0, signal.SIGKILL)


def serve(descriptor: int, parent: int) -> None:
    """The child, leader of its group: does step after step, until the parent hangs up or ends."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection: Connection[Any, Any] = Connection(descriptor)
    lock = threading.Lock()  # compilations begin on threads of their own

    def say(*message: Any) -> None:
        with lock:
            connection.send(message)

    lab = connection.recv()()
    say("ready", *_kernels())
    while True:
        try:
            step, args = connection.recv()
        except EOFError:
            return
        reports = () if step == "time" else (_saying(say, "begun"), _saying(say, "ended"))
        try:
            say("done", getattr(lab, step)(*args, *reports))
        except Unhealthy:
            os._exit(UNHEALTHY_EXIT)  # a driver in that state need not be asked to tidy up
        except (EOFError, ConnectionError):
            return
        except Exception:  # noqa: BLE001 - it is reported, and the parent raises
            say("failed", traceback.format_exc())


def _saying(say: Callable[..., None], word: str) -> Callable[..., None]:
    def report(*said: Any) -> None:
        say(word, *said)

    return report
