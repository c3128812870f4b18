"""How the commands beside the suites begin: ``python -m perf.<name> [--out DIR]``, on a GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rmsnorm_raw.backends import Backend, get_backend


def start(name: str, description: str) -> tuple[Backend, Path]:
    """The device, and the folder for what a command writes; exits where there is no GPU."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("rmsnorm-raw-results", name))
    out: Path = parser.parse_args().out
    backend = get_backend()
    if backend.device.simulated:
        sys.exit(f"perf.{name} needs a GPU: what the simulator takes says nothing about speed")
    out.mkdir(parents=True, exist_ok=True)
    return backend, out
