"""A kernel of a device that is not here, at the REPL and from a shell, by AMD's own compiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rmsnorm_raw as rr
from rmsnorm_raw import cli, space
from rmsnorm_raw.backends.offline import ARCHITECTURES
from rmsnorm_raw.backends.rocm_libraries import VARIABLE, rocm_release
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import BackendUnavailable, CompileError

pytestmark = pytest.mark.gfx950

BACKWARD = rr.Problem.backward(32768, 8192, "bf16")
NORMALISE, DOUBLED = "out[e] = x[e] * rstd;", "out[e] = 2.0f * x[e] * rstd;"


@pytest.fixture(autouse=True)
def chosen(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ROCm under test, where the faces look for one."""
    monkeypatch.setenv(VARIABLE, str(libraries))
    return libraries


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("slug", [None, "b512-lds2-p1", "b256-2p-p2"])
def test_a_built_kernel_says_what_it_takes(slug: str | None, arch: str, chosen: Path) -> None:
    kernel = rr.build(rr.Problem.backward(32768, 4096, "bf16"), slug, device=arch)
    device = KNOWN[arch]
    assert kernel.release == rocm_release(chosen)
    assert list(kernel.resources) == list(kernel.source.entry_points)
    lds = space.lds_bytes(kernel.problem, kernel.config, device)
    for name, taken in kernel.resources.items():
        assert (taken.lds_bytes, taken.dynamic_lds_bytes) == (0, lds[name])
        assert taken.registers is not None
        assert 0 < taken.registers <= 256
        assert taken.bytes_before_first_wait > 0
        lanes = taken.waves_per_simd * 256
        assert taken.cu_bytes_before_first_wait == lanes * taken.bytes_before_first_wait
        assert f"{name}:\n" in kernel.asm
    # the blocks that the persistent grid puts on a CU
    rows = kernel.resources[kernel.source.entry_points[-2]]
    programs = kernel.config.programs * kernel.config.block / 256
    assert rows.waves_per_simd == programs


def test_a_ring_that_fills_lds_says_so() -> None:
    taken = rr.build(BACKWARD, "b256-lds3-p1", device="gfx950").resources["rmsnorm_backward"]
    # three stages of two rows of 16 KiB, all of them in flight
    assert (taken.waves_per_simd, taken.limit) == (1, "LDS")
    assert taken.bytes_before_first_wait == 3 * 2 * 16384 / 256
    assert taken.cu_bytes_before_first_wait == 3 * 2 * 16384
    assert [wait.instruction.text for wait in taken.waits] == ["s_waitcnt vmcnt(24)"]


def test_the_edit_loop_compiles_for_the_same_device() -> None:
    kernel = rr.build(rr.Problem.forward(64, 4096, "bf16"), device="gfx942")
    assert NORMALISE in kernel.source.text
    doubled = kernel.with_source(kernel.source.text.replace(NORMALISE, DOUBLED))
    assert doubled.binary.backend is kernel.binary.backend
    assert doubled.binary.object_digest != kernel.binary.object_digest
    assert doubled.asm != kernel.asm
    with pytest.raises(CompileError, match=r"rmsnorm_forward\.hip:\d+") as caught:
        kernel.with_source(kernel.source.text.replace(NORMALISE, "out[e] = nothing;"))
    assert caught.value.slug == kernel.config.slug


def test_nothing_runs_without_a_device() -> None:
    kernel = rr.build(rr.Problem.forward(64, 4096, "bf16"), device="gfx950")
    for run in (kernel, kernel.check, kernel.bench):
        with pytest.raises(BackendUnavailable, match=r"MI355X.*without a device"):
            run()
    with pytest.raises(BackendUnavailable, match="without a device"):
        rr.compare(kernel, kernel)


def inspect(*args: str) -> str:
    cell = ("--arch", "gfx950", "--op", "backward", "--rows", "32768", "--cols", "8192")
    result = CliRunner().invoke(cli.app, ("inspect", *cell, *args))
    assert result.exit_code == 0, result.output
    assert isinstance(result.stdout, str)
    return result.stdout


@pytest.mark.parametrize("slug", ["b512-reg-p1", "b512-pp-p1", "b256-lds3-p1", "b256-2p-p4"])
def test_inspect_prints_what_the_kernel_says(slug: str, chosen: Path) -> None:
    facts = json.loads(inspect("--config", slug, "--json"))
    kernel = rr.build(BACKWARD, slug, device="gfx950")
    assert facts["compiler"] == f"hiprtc of ROCm {rocm_release(chosen)}"
    for entry, (name, taken) in zip(facts["resources"], kernel.resources.items(), strict=True):
        assert entry.pop("entry_point") == name
        assert entry == {key: getattr(taken, key) for key in entry}
        assert {"sgpr", "waves_per_simd", "limit", "cu_bytes_before_first_wait"} <= entry.keys()
    counts = [wait["vmcnt"] for wait in facts["waits"]]
    waits = [wait for taken in kernel.resources.values() for wait in taken.waits]
    assert counts == [wait.instruction.vmcnt for wait in waits]
    (mix,) = (
        it for it in facts["instructions"] if it["entry_point"] == next(iter(kernel.resources))
    )
    assert mix.pop("entry_point")
    assert mix == next(iter(kernel.resources.values())).mix


def test_inspect_says_what_a_rings_wait_means() -> None:
    text = inspect("--config", "b256-lds3-p1")
    row = next(line for line in text.splitlines() if "to LDS 16 B, " in line)
    assert row.split(maxsplit=3)[2] == "24"
    ends, leaves = "8 buffer load to LDS 16 B, 4 global", "16 buffer load to LDS 16 B, 8 global"
    assert ends in row
    assert leaves in row
    assert "the oldest end first" in text


def test_inspect_prints_the_machine_code_alone() -> None:
    kernel = rr.build(BACKWARD, "b256-lds3-p1", device="gfx950")
    assert inspect("--config", "b256-lds3-p1", "--asm") == kernel.asm + "\n"
    assert "buffer_load_dwordx4" in kernel.asm
