"""How the commands beside the suites begin: ``python -m perf.<name> [--out DIR]``, on a GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rmsnorm_raw.backends import Backend, get_backend


def start(name: str, description: str) -> tuple[Backend, Path]:
    """The device, and the folder for what a command writes; exits where there is no GPU."""
    out: Path = parser(name, description).parse_args().out
    return on_gpu(name, out), out


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Of a command that has more options than ``--out``."""
    made = argparse.ArgumentParser(
        f"python -m perf.{name}", description=description.splitlines()[0]
    )
    default = Path("rmsnorm-raw-results", name)
    made.add_argument("--out", type=Path, default=default, help=f"folder, by default {default}")
    return made


def on_gpu(name: str, out: Path) -> Backend:
    """The device, the folder made; exits where there is no GPU."""
    backend = get_backend()
    if backend.device.simulated:
        sys.exit(f"perf.{name} needs a GPU: what the simulator takes says nothing about speed")
    out.mkdir(parents=True, exist_ok=True)
    return backend
