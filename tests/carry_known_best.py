"""Carries the shipped records of sm_90 over a change of kernel text that left the code alone.

    python tests/carry_known_best.py REVISION

A record's key has the digest of the kernel text, so that any change of it retires the record. Where
NVRTC, of the release that the record was measured with, makes the very same code of the text at
REVISION and of the text here, for the record's config and for the ladder's at both ends of the rows
that it serves, its times still hold: it gets the key of the text here. Others are dropped, and
named: they want ``rmsnorm-raw tune``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import nvrtc
from plain_code import cubin_digest

from rmsnorm_raw import ladder, records, store
from rmsnorm_raw.backends import Toolchain
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN, DeviceSpec
from rmsnorm_raw.source import render

HERE = Path(__file__).parents[1]
SHIPPED = Path("rmsnorm_raw", "known_best", "sm_90.json")


def name_of(key: records.Key) -> str:
    """Which record it is: its digest differs between trees whose keys have other fields."""
    return f"{key.problem} {key.weight_dtype} {key.vec}"


def device_of(key: records.Key) -> DeviceSpec:
    """Where a record was measured."""
    return replace(KNOWN["sm_90"], name=key.device, compute_units=key.compute_units)


def codes(shipped: Path) -> dict[str, list[str]]:
    """By a record's name: digests of its config's code, and of the ladder's, in this tree."""
    found = {}
    for key, record in records.parse(shipped.read_bytes()).items():
        device = device_of(key)
        made = [render(key.problem, record.config, device)]
        for rows in store.bucket(key.rows_from):
            end = replace(key.problem, rows=rows)
            config: Config = ladder.default_config(end, device)
            made.append(render(end, config, device))
        found[name_of(key)] = [cubin_digest(source) for source in made]
    return found


def carry(revision: str) -> None:
    """Rewrite the shipped records."""
    archive = subprocess.run(
        ["git", "archive", revision, "rmsnorm_raw"], cwd=HERE, capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as tree:
            tree.extractall(folder, filter="data")
        shipped = Path(folder, SHIPPED)
        path = os.pathsep.join([folder, *sys.path])
        old = subprocess.run(
            [sys.executable, __file__, "--codes", str(shipped)],
            env=os.environ | {"PYTHONPATH": path}, cwd=folder, stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        before, now = json.loads(old.stdout), codes(shipped)
        kept, dropped = [], []
        for key, record in records.parse(shipped.read_bytes()).items():
            name = name_of(key)
            if key.compiler != f"NVRTC {nvrtc.release()}":
                raise SystemExit(
                    f"records are {key.compiler}'s, and this is {nvrtc.release()}: pip install "
                    f"'nvidia-cuda-nvrtc=={key.compiler.removeprefix('NVRTC ')}.*'"
                )
            if before[name] != now[name]:
                dropped.append(name)
                continue
            toolchain = Toolchain(key.compiler, key.cupy)
            kept.append((store.key_of(key.problem, device_of(key), toolchain), record))
    (HERE / SHIPPED).write_text(records.document(kept), encoding="utf-8")
    print(f"{len(kept)} records carried over, {len(dropped)} dropped")
    print("\n".join(dropped))


if __name__ == "__main__":
    if sys.argv[1] == "--codes":
        print(json.dumps(codes(Path(sys.argv[2]))))
    else:
        carry(sys.argv[1])
