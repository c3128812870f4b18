"""The roofline: what is searched, what wins, what is counted, and what a wrong probe gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from virtual_gpu import VirtualGpu

from rmsnorm_raw import bandwidth, measure
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.bandwidth import (
    GAPS_BYTES,
    PROBES,
    STEP_BYTES,
    Probe,
    Reading,
    Roofline,
    Variant,
    remeasure,
    roofline,
)
from rmsnorm_raw.device import KNOWN, DeviceSpec
from rmsnorm_raw.errors import InvalidInput, WrongResult
from rmsnorm_raw.measure import Samples, Unmeasurable

CUDA = replace(KNOWN["sm_90"], compute_units=1, last_level_cache_bytes=32 << 10)
AMD = replace(KNOWN["gfx950"], compute_units=1, last_level_cache_bytes=32 << 10)
BUFFER_BYTES = 2 * STEP_BYTES

#: GB/s of a probe's variant
Speed = Callable[[Probe, Variant], float]


class MemoryGpu(VirtualGpu):
    """A virtual GPU with memory, on which the probes compute, at speeds that the test sets."""

    def __init__(self, device: DeviceSpec, speed: Speed, fault: str = "") -> None:
        super().__init__(device)
        self.speed = speed
        self.fault = fault
        self.ran: list[tuple[Probe, Variant]] = []
        self.memory = np.zeros(1 << 28, np.uint8)  # pages that nothing touches cost nothing
        self.free = 0

    def allocate(self, size_bytes: int) -> tuple[int, Any]:
        base, self.free = self.free, self.free + size_bytes
        return base, object()

    def copy(self, target: int, origin: int, size_bytes: int, stream: int) -> None:
        super().copy(target, origin, size_bytes, stream)
        self.memory[target : target + size_bytes] = self.memory[origin : origin + size_bytes]

    def fill(self, target: int, byte: int, size_bytes: int, stream: int) -> None:
        self.memory[target : target + size_bytes] = byte

    def to_host(self, origin: int, size_bytes: int, stream: int) -> np.ndarray:
        return self.memory[origin : origin + size_bytes].copy()

    def from_host(self, target: int, data: np.ndarray, stream: int) -> None:
        self.memory[target : target + data.nbytes] = data.reshape(-1).view(np.uint8)

    def launch(
        self,
        function: Any,
        grid: int,
        block: int,
        args: Sequence[np.generic],
        lds_bytes: int,
        stream: int,
        early: bool = False,
    ) -> None:
        entry, defines = function
        probe = PROBES[("probe_copy", "probe_write", "probe_add").index(entry)]
        out, a, b, vectors = (int(arg) for arg in args)
        size = 16 * vectors
        unroll = int(defines["RR_UNROLL"])
        assert block == int(defines["RR_BLOCK"])
        assert size % (16 * block * unroll) == 0, "the kernels mask nothing"
        assert out + size <= a, "the output lies before the inputs"
        assert a + size <= b
        variant = Variant(
            block,
            unroll,
            grid < vectors // (block * unroll),
            defines["RR_LOAD_POLICY"].removeprefix("POLICY_").lower(),
            defines["RR_STORE_POLICY"].removeprefix("POLICY_").lower(),
            a - out - size,
        )
        words = [self.memory[at : at + size].view(np.uint32) for at in (out, a, b)]
        if probe == "copy":
            words[0][:] = words[1]
        elif probe == "write":
            words[0][:] = np.repeat(np.arange(vectors, dtype=np.uint32), 4)
        else:
            total = words[1].view(np.float32) + words[2].view(np.float32)
            words[0][:] = total.view(np.uint32)
        if probe == self.fault:
            words[0][-4:] = 0xFFFFFFFF  # the last vector was never written
        moved = {"copy": 2, "write": 1, "2r1w": 3}[probe] * size
        self.ran.append((probe, variant))
        self.enqueue(probe, moved / self.speed(probe, variant) / 1e3, self.host_cost_us)


@pytest.fixture
def make_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MemoryGpu]:
    def make(device: DeviceSpec = CUDA, speed: Speed = flat, fault: str = "") -> MemoryGpu:
        gpu = MemoryGpu(device, speed, fault)
        monkeypatch.setattr(measure, "perf_counter", gpu.perf_counter)
        return gpu

    return make


Make = Callable[..., MemoryGpu]
FLAT = {"copy": 4200.0, "write": 4600.0, "2r1w": 4300.0}


def flat(probe: Probe, variant: Variant) -> float:
    return FLAT[probe]


def measured(**gbps: float) -> Roofline:
    """A roofline with these speeds, "add" for 2r1w."""
    readings = tuple(
        Reading(
            probe,
            Variant(),
            bandwidth.BUFFERS_MOVED[probe] * 10**9,
            Samples((1e6 * bandwidth.BUFFERS_MOVED[probe] / speed,) * 6, "cold", "", 1),
        )
        for probe, speed in zip(PROBES, gbps.values(), strict=True)
    )
    return Roofline("a device", 10**9, readings)


H200 = measured(copy=4250.0, write=4650.0, add=4370.0)


# ---- the search --------------------------------------------------------------------------------


def test_each_probe_finds_its_own_best_variant(make_gpu: Make) -> None:
    best = {
        "copy": Variant(1024, 2, True, "keep", "stream", GAPS_BYTES[2]),
        "write": Variant(256, 1, False, "default", "stream"),
        "2r1w": Variant(256, 4, True, "default", "default", GAPS_BYTES[-1]),
    }

    def speed(probe: Probe, variant: Variant) -> float:
        wanted = best[probe]
        alike = sum(
            getattr(variant, field) == getattr(wanted, field) for field in Variant.__slots__
        )
        return 4000.0 + 50 * alike

    found = roofline(make_gpu(speed=speed), buffer_bytes=BUFFER_BYTES)
    assert {reading.probe: reading.variant for reading in found.readings} == best
    for reading in found.readings:
        assert reading.gbps == pytest.approx(4300.0)
    assert found.buffer_bytes == BUFFER_BYTES
    assert not found.simulated


def test_finalists_are_measured_again_and_the_best_of_that_wins(make_gpu: Make) -> None:
    """A variant that is fast while it is screened, and no longer, does not win."""
    seen: dict[tuple[Probe, Variant], int] = {}
    flash = Variant(256, 2)

    def speed(probe: Probe, variant: Variant) -> float:
        seen[probe, variant] = seen.get((probe, variant), 0) + 1
        if variant != flash:
            return 4000.0
        return 5000.0 if seen[probe, variant] < 150 else 3900.0

    found = roofline(make_gpu(speed=speed), buffer_bytes=BUFFER_BYTES)
    for reading in found.readings:
        assert reading.variant != flash
        assert reading.gbps == pytest.approx(4000.0)
        assert len(reading.samples.times_us) >= 24


def test_bytes_are_those_of_the_buffers_that_a_probe_moves(make_gpu: Make) -> None:
    found = roofline(make_gpu(), buffer_bytes=BUFFER_BYTES)
    moved = {reading.probe: reading.moved_bytes for reading in found.readings}
    assert moved == {"copy": 2 * BUFFER_BYTES, "write": BUFFER_BYTES, "2r1w": 3 * BUFFER_BYTES}
    for reading in found.readings:
        assert reading.gbps == pytest.approx(FLAT[reading.probe])


@pytest.mark.parametrize(("device", "policies"), [(CUDA, 7), (AMD, 4)], ids=["cuda", "amd"])
def test_shapes_policies_and_placements_are_all_tried(
    make_gpu: Make, device: DeviceSpec, policies: int
) -> None:
    gpu = make_gpu(device)
    roofline(gpu, buffer_bytes=BUFFER_BYTES)
    tried = {probe: {v for p, v in gpu.ran if p == probe} for probe in PROBES}
    for probe in PROBES:
        shapes = {(v.block, v.unroll) for v in tried[probe]}
        assert shapes == set(itertools.product((256, 512, 1024), (1, 2, 4, 8)))
        assert {v.persistent for v in tried[probe]} == {False, True}
    for probe in ("copy", "2r1w"):
        pairs = {(v.load_policy, v.store_policy) for v in tried[probe]}
        assert len(pairs) == policies
        assert ("keep" in {load for load, _ in pairs}) == (device.dialect == "cuda")
        assert {v.gap_bytes for v in tried[probe]} == set(GAPS_BYTES)
    assert {v.load_policy for v in tried["write"]} == {"default"}
    assert "stream" in {v.store_policy for v in tried["write"]}
    assert {v.gap_bytes for v in tried["write"]} == {0}


def test_slugs_tell_variants_apart() -> None:
    variants = list(
        itertools.starmap(
            Variant,
            itertools.product(
                (256, 512),
                (1, 8),
                (False, True),
                ("default", "keep", "stream"),
                ("default", "keep", "stream"),
                (0, 256, 4096),
            ),
        )
    )
    assert len({variant.slug for variant in variants}) == len(variants)
    assert Variant(512, 4, True, "keep", "stream", 4096).slug == "b512-u4-p-lk-ss-g4096"


# ---- the gate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", PROBES)
def test_a_wrong_probe_gets_no_figure(make_gpu: Make, probe: Probe) -> None:
    with pytest.raises(WrongResult, match=f"probe {probe} b"):
        roofline(make_gpu(fault=probe), buffer_bytes=BUFFER_BYTES)


def test_buffers_that_fit_the_cache_are_refused(make_gpu: Make) -> None:
    gpu = make_gpu(replace(CUDA, last_level_cache_bytes=STEP_BYTES))
    with pytest.raises(InvalidInput, match="4 last-level caches"):
        roofline(gpu, buffer_bytes=3 * STEP_BYTES)
    with pytest.raises(InvalidInput, match="multiple of 131,072"):
        roofline(gpu, buffer_bytes=4 * STEP_BYTES + 16)


# ---- percentages and drift ---------------------------------------------------------------------


def test_a_percentage_names_its_probe() -> None:
    assert H200.percent(4250.0, "copy") == pytest.approx(100)
    assert H200.percent(4650.0) == pytest.approx(100)
    assert H200.reading("best").probe == "write"
    assert H200.percent(4370.0, "matched", "backward") == pytest.approx(100)
    assert H200.reading("matched", "forward").probe == "copy"
    with pytest.raises(InvalidInput, match="give op"):
        H200.percent(4000.0, "matched")
    with pytest.raises(InvalidInput, match="not one of copy, write, 2r1w, best, matched"):
        H200.percent(4000.0, "read")


@pytest.mark.parametrize(
    ("closing", "drift_pct", "suspect"),
    [
        (measured(copy=4250.0, write=4650.0, add=4370.0), 0.0, False),
        (measured(copy=4250.0 * 0.981, write=4650.0, add=4370.0), 1.9, False),
        (measured(copy=4250.0 * 0.979, write=4650.0, add=4370.0 * 1.01), 2.1, True),
        (measured(copy=4250.0, write=4650.0, add=4370.0 * 1.021), 2.1, True),
    ],
)
def test_a_probe_that_drifts_over_two_percent_makes_a_run_suspect(
    closing: Roofline, drift_pct: float, suspect: bool
) -> None:
    assert H200.drift_pct(closing) == pytest.approx(drift_pct)
    assert H200.is_suspect(closing) is suspect


def test_closing_runs_the_winners_alone(make_gpu: Make) -> None:
    gpu = make_gpu()
    opening = roofline(gpu, buffer_bytes=BUFFER_BYTES)
    gpu.ran.clear()
    gpu.speed = lambda probe, variant: 0.97 * flat(probe, variant)
    closing = remeasure(opening, gpu)
    winners = {(reading.probe, reading.variant) for reading in opening.readings}
    assert set(gpu.ran) == winners
    assert {(reading.probe, reading.variant) for reading in closing.readings} == winners
    assert opening.drift_pct(closing) == pytest.approx(3.0)
    assert opening.is_suspect(closing)


# ---- the simulator -----------------------------------------------------------------------------


@pytest.mark.parametrize("wave", ["cpu64", "cpu32"])
def test_the_simulator_runs_the_probes_and_has_no_roofline(
    wave: str, request: pytest.FixtureRequest
) -> None:
    backend: Backend = request.getfixturevalue(wave)
    found = roofline(backend)
    assert found.simulated
    assert [reading.probe for reading in found.readings] == list(PROBES)
    assert "GB/s" not in str(found)
    assert str(found).count("simulated") == len(PROBES)
    with pytest.raises(Unmeasurable, match="no roofline"):
        found.percent(1.0)
    assert remeasure(found, backend).simulated


def test_a_roofline_prints_a_line_a_probe() -> None:
    assert str(H200).splitlines()[1:] == [
        " copy   4250.0 GB/s     470.6 us  b512-u4",
        "write   4650.0 GB/s     215.1 us  b512-u4",
        " 2r1w   4370.0 GB/s     686.5 us  b512-u4",
    ]
