"""What a call costs the host, beside Quack and torch, and what torch.compile makes of the kernels.

    python -m perf.overhead [--out DIR]

Host time of a call at 8x4096 bf16, where kernels are done before the host is: the mean of 2000
calls, the median of five such rounds, the providers by turns. And device time of the operators
under ``torch.compile(mode="reduce-overhead")`` beside their eager launches, inputs where the graph
finds them. Writes overhead.csv and environment.json; exit code 1 where a bar fails.
"""

from __future__ import annotations

import csv
import functools
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

try:
    import torch
except ModuleNotFoundError:
    sys.exit("perf.overhead calls torch and Quack: pip install torch quack-kernels")

from torch.nn import functional

import rmsnorm_raw as rr
from rmsnorm_raw import environment

SHAPE, EPS = (8, 4096), 1e-6
CALLS, ROUNDS, WARM_UP = 2000, 5, 200
#: (what, whose time ours is divided by, most)
BARS = (
    ("forward, no grad", "quack", 1.0),
    ("forward, no grad", "torch", 1.4),
    ("forward, grad", "quack", 1.0),
    ("forward + backward", "quack", 1.0),
    ("compiled forward", "eager", 1.05),
    ("compiled forward + backward", "eager", 1.05),
)
COMPILED_SHAPE, COMPILED_CALLS = (32768, 4096), 20
SLEEP_TICKS = 200_000_000  # some 0.1 s on an H200: everything is enqueued before it ends

Call = Callable[[], Any]
Contests = dict[str, dict[str, Call]]
Times = dict[str, dict[str, float]]  # microseconds by what and by whom


def tensors(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and dout."""
    make = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    return make(SHAPE), make(SHAPE[1]), make(SHAPE)


def contests(x: torch.Tensor, weight: torch.Tensor, dout: torch.Tensor) -> Contests:
    """Calls by what they do and who does it; each returns what it computed."""
    functions: dict[str, Callable[..., Any]] = {
        "ours": lambda x, w: rr.nn.rms_norm(x, w, EPS),
        "torch": lambda x, w: functional.rms_norm(x, (SHAPE[1],), w, EPS),
    }
    plain = dict(functions)
    if importlib.util.find_spec("quack") is not None:
        quack = importlib.import_module("quack.rmsnorm")
        functions["quack"] = lambda x, w: quack.rmsnorm(x, w, eps=EPS)
        plain["quack"] = lambda x, w: quack.rmsnorm_fwd(x, w, eps=EPS)
    wanting = x.clone().requires_grad_(), weight.clone().requires_grad_()

    def step(function: Callable[..., Any]) -> Any:
        return torch.autograd.grad(function(*wanting), wanting, dout)

    return {
        "forward, no grad": {n: functools.partial(f, x, weight) for n, f in plain.items()},
        "forward, grad": {n: functools.partial(f, *wanting) for n, f in functions.items()},
        "forward + backward": {n: functools.partial(step, f) for n, f in functions.items()},
    }


def host_us(call: Call, calls: int) -> float:
    """Mean microseconds of the host."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def host_times() -> Times:
    """The median of the rounds."""
    times: Times = {}
    for what, calls in contests(*tensors("cuda")).items():
        for call in calls.values():
            host_us(call, WARM_UP)
        rounds = [
            {name: host_us(call, CALLS) for name, call in calls.items()} for _ in range(ROUNDS)
        ]
        times[what] = {name: median(each[name] for each in rounds) for name in calls}
    return times


def device_us(call: Call) -> float:
    """Microseconds of the device a call, over calls enqueued while it sleeps."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_TICKS)
    begin.record()
    for _ in range(COMPILED_CALLS):
        torch.compiler.cudagraph_mark_step_begin()
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / COMPILED_CALLS * 1e3


def compiled_times() -> Times:
    """Device time of the operators in one graph, and eagerly."""
    operators = torch.ops.rmsnorm_raw

    def forward(x: Any, weight: Any, dout: Any) -> Any:
        return rr.nn.rms_norm(x, weight, EPS)

    def both(x: Any, weight: Any, dout: Any) -> Any:
        y, rstd = operators.rmsnorm_fwd(x, weight, EPS)
        return y, operators.rmsnorm_bwd(dout, x, weight, rstd, True, True)

    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    tensors = make(COMPILED_SHAPE), make(COMPILED_SHAPE[1]), make(COMPILED_SHAPE)
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)
    times: Times = {}
    for name, function in (("forward", forward), ("forward + backward", both)):
        compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True, dynamic=False)
        calls = {
            "eager": functools.partial(function, *tensors),
            "ours": functools.partial(compiled, *tensors),
        }
        with torch.no_grad():
            for call in calls.values():
                device_us(call)  # compiles, captures
            rounds = [{who: device_us(call) for who, call in calls.items()} for _ in range(ROUNDS)]
        times[f"compiled {name}"] = {who: median(r[who] for r in rounds) for who in calls}
    return times


def findings(times: Times) -> list[tuple[str, bool]]:
    """A line for each bar, and whether it holds; one whose peer is not installed is named."""
    found = []
    for what, peer, most in BARS:
        if peer not in times[what]:
            found.append((f"{what}: {peer} is not installed, so there is no figure", True))
            continue
        ours, theirs = times[what]["ours"], times[what][peer]
        holds = ours <= most * theirs
        line = f"{what}: {ours:.2f} us, {ours / theirs:.3f} of {peer}'s {theirs:.2f}, bar {most}"
        found.append((f"{line}: {'holds' if holds else 'FAILS'}", holds))
    return found


def main() -> int:
    """The command line."""
    from perf.command_line import start  # the suites import this file without the package

    _, out = start("overhead", __doc__)
    times = host_times() | compiled_times()
    with (out / "overhead.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("what", "who", "us"))
        table.writerows(
            (what, who, f"{us:.3f}") for what, row in times.items() for who, us in row.items()
        )
    for what, row in times.items():
        print(f"{what:28}", ", ".join(f"{who} {us:.2f} us" for who, us in row.items()))
    found = findings(times)
    print("\n".join(line for line, _ in found))
    environment.write(out / "environment.json", {"command": "python -m perf.overhead"})
    return int(not all(holds for _, holds in found))


if __name__ == "__main__":
    sys.exit(main())
