"""A made-up machine, for tests of what is found on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmsnorm_raw import doctor, environment
from rmsnorm_raw.backends.rocm_libraries import VARIABLE

H200 = "NVIDIA H200, 580.159.04, 345, 3201, 29, 76.52, 143771, 0"
GFX950, GFX942, GFX90A = 90500, 90402, 90010  # gfx_target_version, as the kernel driver writes it


class Machine:
    """A made-up machine: its PATH, its installed packages, its AMD GPUs and its ROCm."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.bin = root / "bin"
        self.nodes = root / "nodes"
        self.installed: dict[str, str | None] = {"ziglang": None, "ml_dtypes": None, "torch": None}
        for folder in (self.bin, self.nodes, root / "rocm" / ".info"):
            folder.mkdir(parents=True)
        (root / "kfd").touch()
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("ROCM_HOME", str(root / "rocm"))
        monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(root / "cache"))
        monkeypatch.setattr(environment, "KFD_NODES", self.nodes)
        monkeypatch.setattr(doctor, "KFD_DEVICE", root / "kfd")
        monkeypatch.setattr(environment, "packages", lambda: self.installed)
        monkeypatch.delenv(VARIABLE, raising=False)

    def tool(self, name: str, prints: str = "", exit_code: int = 0) -> None:
        script = self.bin / name
        stream = "&2" if exit_code else "&1"
        script.write_text(f"#!/bin/sh\necho '{prints}' >{stream}\nexit {exit_code}\n")
        script.chmod(0o755)

    def amd_node(self, gfx_target_version: int) -> None:
        node = self.nodes / str(len(list(self.nodes.iterdir())))
        node.mkdir()
        (node / "properties").write_text(
            f"cpu_cores_count 0\ngfx_target_version {gfx_target_version}\nsimd_count 1024\n"
        )

    def rocm(self, version: str) -> None:
        (self.root / "rocm" / ".info" / "version").write_text(f"{version}-38\n")

    def check(self, start: str) -> environment.Check:
        (found,) = (check for check in doctor.checks() if check.name.startswith(start))
        return found
