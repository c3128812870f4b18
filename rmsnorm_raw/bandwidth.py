"""The roofline: what this device, in this run, gives to three probes.

``copy`` reads one buffer and writes one, ``write`` writes one, ``2r1w`` reads two and writes their
sum. Each is the best over launch shapes, cache policies and placements of the buffers, for the best
differs per vendor: an H200 gives its most to writes, and on an MI355X copy moves by 16-19 % with
where source and destination sit. A percentage therefore names its probe. The probes run again when
the work is done; where one moved by more than 2 % the run is suspect.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from rmsnorm_raw import launch
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.config import POLICY_SLUG, Policy
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.errors import InvalidInput, WrongResult
from rmsnorm_raw.kernels import prelude, probes
from rmsnorm_raw.measure import Call, Limits, Samples, Unmeasurable, time_interleaved
from rmsnorm_raw.module import Binary, build
from rmsnorm_raw.problem import Op
from rmsnorm_raw.source import Source, target_defines
from rmsnorm_raw.space import MAX_RESIDENT_THREADS, POLICIES

Probe = Literal["copy", "write", "2r1w"]
PROBES: tuple[Probe, ...] = get_args(Probe)
ENTRY_POINT = dict(zip(PROBES, probes.ENTRY_POINTS, strict=True))
#: buffers that a probe moves, read and written
BUFFERS_MOVED: dict[Probe, int] = {"copy": 2, "write": 1, "2r1w": 3}
#: the probe with the reads and writes of an operation
MATCHED: dict[Op, Probe] = {"forward": "copy", "backward": "2r1w"}

BUFFER_BYTES = 1 << 30
#: a buffer is at least this many last-level caches, or the probes would measure the cache
BUFFER_CACHES = 4
SIMULATED_BUFFER_BYTES = 1 << 18
DRIFT_PCT = 2.0

BLOCKS = (256, 512, 1024)
UNROLLS = (1, 2, 4, 8)
#: bytes between buffers. Memory channels interleave at a few hundred bytes to a few pages and large
#: pages are 2 MiB, so each of these moves the buffers against each other in another way
GAPS_BYTES = (0, 256, 4 << 10, 64 << 10, 256 << 10, 2 << 20, 18 << 20)
FINALISTS = 3
#: the largest step of a block; buffers are whole steps of every shape
STEP_BYTES = 16 * max(BLOCKS) * max(UNROLLS)

SCREEN: Limits = {"min_samples": 6, "max_samples": 6, "warmup_s": 0.005}
#: for a figure that everything else is divided by: half the interval of an ordinary measurement
FINAL: Limits = {"min_samples": 24, "goal_pct": 0.5}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a probe.

    Attributes:
        block: threads of a block.
        unroll: 16-byte accesses of a lane to a buffer in one step.
        persistent: as many blocks as are resident at once, each going round; else one step a block.
        load_policy: of the reads.
        store_policy: of the writes.
        gap_bytes: between one buffer's end and the next one's start.
    """

    block: int = 512
    unroll: int = 4
    persistent: bool = False
    load_policy: Policy = "default"
    store_policy: Policy = "default"
    gap_bytes: int = 0

    @property
    def slug(self) -> str:
        """Its name in tables, e.g. ``b512-u4-p-lk-ss-g4096``."""
        parts = [f"b{self.block}", f"u{self.unroll}"]
        if self.persistent:
            parts.append("p")
        if self.load_policy != "default":
            parts.append(f"l{POLICY_SLUG[self.load_policy]}")
        if self.store_policy != "default":
            parts.append(f"s{POLICY_SLUG[self.store_policy]}")
        if self.gap_bytes:
            parts.append(f"g{self.gap_bytes}")
        return "-".join(parts)


@dataclass(frozen=True, slots=True)
class Reading:
    """One probe's figure.

    Attributes:
        probe: "copy", "write" or "2r1w".
        variant: how it was run.
        moved_bytes: read and written by a call.
        samples: its times.
    """

    probe: Probe
    variant: Variant
    moved_bytes: int
    samples: Samples

    @property
    def gbps(self) -> float:
        """Decimal GB/s."""
        return self.samples.gbps(self.moved_bytes)


@dataclass(frozen=True, slots=True, repr=False)
class Roofline:
    """The three probes of one device at one time.

    Attributes:
        device: the device's name.
        buffer_bytes: of each of the buffers.
        readings: one a probe, in the order of :data:`PROBES`.
        simulated: the simulator took part in place of a device; there is no percentage of it.
    """

    device: str
    buffer_bytes: int
    readings: tuple[Reading, ...]
    simulated: bool = False

    def reading(self, probe: str = "best", op: Op | None = None) -> Reading:
        """The reading that a percentage is taken of.

        Args:
            probe: "copy", "write" or "2r1w"; "best", the highest of the three (the published rule);
                or "matched", the one that reads and writes as ``op`` does.
            op: "forward" or "backward"; wanted for "matched" alone.

        Raises:
            InvalidInput: no such probe, or "matched" without an operation.
        """
        if probe == "best":
            return max(self.readings, key=lambda reading: reading.gbps)
        if probe == "matched":
            if op is None:
                raise InvalidInput("the matched probe depends on the operation: give op=...")
            probe = MATCHED[op]
        for reading in self.readings:
            if reading.probe == probe:
                return reading
        raise InvalidInput(f"probe {probe!r} is not one of {', '.join(PROBES)}, best, matched")

    def percent(self, gbps: float, probe: str = "best", op: Op | None = None) -> float:
        """``gbps`` in percent of a probe; the arguments are those of :meth:`reading`.

        Raises:
            Unmeasurable: a simulated roofline, which no speed is a percentage of; print "-".
        """
        if self.simulated:
            raise Unmeasurable("the simulator has no roofline: print '-' for its percentages")
        return 100 * gbps / self.reading(probe, op).gbps

    def drift_pct(self, *later: Roofline) -> float:
        """The largest change of a probe from this roofline to a later one, in percent, unsigned."""
        return max(
            abs(100 * each.reading(opening.probe).gbps / opening.gbps - 100)
            for each in later
            for opening in self.readings
        )

    def is_suspect(self, *later: Roofline) -> bool:
        """Whether the device has changed by more than 2 % since, so that figures mislead."""
        return self.drift_pct(*later) > DRIFT_PCT

    def __str__(self) -> str:
        lines = [f"{self.device}, buffers of {self.buffer_bytes:,} B"]
        for reading in self.readings:
            speed = "simulated" if self.simulated else f"{reading.gbps:7.1f} GB/s"
            lines.append(
                f"{reading.probe:>5}  {speed}  {reading.samples.median_us:8.1f} us  "
                f"{reading.variant.slug}"
            )
        return "\n".join(lines)

    __repr__ = __str__  # for the REPL


def roofline(backend: Backend, *, buffer_bytes: int | None = None, stream: int = 0) -> Roofline:
    """Search each probe's best variant and measure it.

    Launch shapes first, then the policies of the best three, then the placements of the best three:
    screened on six samples each. The three leaders of a probe are measured again, interleaved, to
    a 0.5 % interval, and the fastest of them is its reading. Every variant's result is checked
    before it is timed.

    Args:
        buffer_bytes: of each of three buffers; by default 1 GiB, or four last-level caches where
            that is more.

    Raises:
        InvalidInput: the buffers are smaller than four last-level caches, or not whole 128 KiB.
        WrongResult: a probe computed something else than it should.
    """
    device = backend.device
    if buffer_bytes is None:
        buffer_bytes = max(BUFFER_BYTES, BUFFER_CACHES * device.last_level_cache_bytes)
        if device.simulated:
            buffer_bytes = SIMULATED_BUFFER_BYTES
    fewest_bytes = 0 if device.simulated else BUFFER_CACHES * device.last_level_cache_bytes
    if buffer_bytes < max(fewest_bytes, STEP_BYTES) or buffer_bytes % STEP_BYTES:
        raise InvalidInput(
            f"buffer_bytes is {buffer_bytes:,}: at least {fewest_bytes:,} ({BUFFER_CACHES} "
            f"last-level caches) and a multiple of {STEP_BYTES:,} is needed"
        )
    bench = _Bench(backend, buffer_bytes, stream)
    search = _simulated if device.simulated else _search
    readings = tuple(search(bench, probe) for probe in PROBES)
    return Roofline(device.name, buffer_bytes, readings, device.simulated)


def remeasure(opening: Roofline, backend: Backend, *, stream: int = 0) -> Roofline:
    """The opening's winners once more, at the end of a run, for :meth:`Roofline.drift_pct`."""
    bench = _Bench(backend, opening.buffer_bytes, stream)
    readings = tuple(
        bench.read(reading.probe, [reading.variant], FINAL)[0] for reading in opening.readings
    )
    return replace(opening, readings=readings)


def call_of(reading: Reading, backend: Backend, *, stream: int = 0) -> Call:
    """A probe as a reading was taken of it, for another clock; it has passed its check.

    Raises:
        WrongResult: it computed something else than it should.
    """
    bench = _Bench(backend, reading.moved_bytes // BUFFERS_MOVED[reading.probe], stream)
    return bench.call(reading.probe, reading.variant)


def _simulated(bench: _Bench, probe: Probe) -> Reading:
    return bench.read(probe, [Variant(block=256, unroll=2)], SCREEN)[0]


def _search(bench: _Bench, probe: Probe) -> Reading:
    screened: dict[Variant, float] = {}
    leaders = [Variant()]
    for widen in (_shapes, _policies, _placements):
        for variant in widen(leaders, probe, bench.backend.device):
            if variant not in screened:
                screened[variant] = bench.read(probe, [variant], SCREEN)[0].samples.median_us
        leaders = sorted(screened, key=screened.__getitem__)[:FINALISTS]
    return max(bench.read(probe, leaders, FINAL), key=lambda reading: reading.gbps)


def _shapes(leaders: Sequence[Variant], probe: Probe, device: DeviceSpec) -> Iterable[Variant]:
    for block, unroll, persistent in itertools.product(BLOCKS, UNROLLS, (False, True)):
        yield replace(leaders[0], block=block, unroll=unroll, persistent=persistent)


def _policies(leaders: Sequence[Variant], probe: Probe, device: DeviceSpec) -> Iterable[Variant]:
    for leader, (load, store) in itertools.product(leaders, POLICIES):
        if device.dialect == "amd" and "keep" in (load, store):
            continue
        used = "default" if probe == "write" else load
        yield replace(leader, load_policy=used, store_policy=store)


def _placements(leaders: Sequence[Variant], probe: Probe, device: DeviceSpec) -> Iterable[Variant]:
    if BUFFERS_MOVED[probe] > 1:  # one buffer has no place relative to another
        for leader, gap_bytes in itertools.product(leaders, GAPS_BYTES):
            yield replace(leader, gap_bytes=gap_bytes)


#: vectors of the inputs' pattern; a prime, so that no launch stride maps the pattern onto itself
PATTERN_VECTORS = 1_000_003
WINDOWS = 16
WINDOW_BYTES = 4096


class _Bench:
    """The probes' buffers and built kernels: the output first, then the inputs, ``gap`` apart."""

    def __init__(self, backend: Backend, buffer_bytes: int, stream: int) -> None:
        self.backend = backend
        self._bytes = buffer_bytes
        self._stream = stream
        inputs_bytes = 2 * (buffer_bytes + max(GAPS_BYTES))
        self._out, self._owner = backend.allocate(buffer_bytes + inputs_bytes)
        # uniform in [0, 1): zeros can run faster than data (a product of zeros did, by 13 %)
        rng = np.random.default_rng(0)
        self._pattern = rng.random((min(PATTERN_VECTORS, inputs_bytes // 16), 4), dtype=np.float32)
        self._write_inputs(self._out + buffer_bytes, inputs_bytes)

    def read(self, probe: Probe, variants: Sequence[Variant], limits: Limits) -> list[Reading]:
        """Checks the variants, then times them, interleaved."""
        contenders = [[self.call(probe, variant)] for variant in variants]
        timed = time_interleaved(contenders, self.backend, stream=self._stream, **limits)
        moved_bytes = BUFFERS_MOVED[probe] * self._bytes
        return [
            Reading(probe, variant, moved_bytes, samples)
            for variant, samples in zip(variants, timed, strict=True)
        ]

    def call(self, probe: Probe, variant: Variant) -> Call:
        """A variant that has passed its check; the call keeps the buffers."""
        plan = self._plan(probe, variant)
        self._gate(probe, variant, plan)

        def run(owner: _Bench = self) -> None:
            launch.run(plan, owner._stream)

        return run

    def _write_inputs(self, base: int, size_bytes: int) -> None:
        """The pattern, over and over: what is written is copied behind itself, twice as far."""
        self.backend.from_host(base, self._pattern, self._stream)
        written = self._pattern.nbytes
        while written < size_bytes:
            more = min(written, size_bytes - written)
            self.backend.copy(base + written, base, more, self._stream)
            written += more

    def _binary(self, variant: Variant) -> Binary:
        defines = (
            *target_defines(self.backend.device),
            ("RR_BLOCK", str(variant.block)),
            ("RR_UNROLL", str(variant.unroll)),
            ("RR_LOAD_POLICY", f"POLICY_{variant.load_policy.upper()}"),
            ("RR_STORE_POLICY", f"POLICY_{variant.store_policy.upper()}"),
        )
        text = prelude.TEXT + probes.TEXT
        return build(Source("probes.hip", text, defines, probes.ENTRY_POINTS), self.backend)

    def _plan(self, probe: Probe, variant: Variant) -> launch.Plan:
        grid = self._bytes // (16 * variant.block * variant.unroll)
        if variant.persistent:
            resident = MAX_RESIDENT_THREADS // variant.block * self.backend.device.compute_units
            grid = min(grid, resident)
        first, second = self._inputs(variant)
        pointers = tuple(np.uint64(address) for address in (self._out, first, second))
        args = (*pointers, np.uint64(self._bytes // 16))
        only = launch.Launch(ENTRY_POINT[probe], grid, variant.block, args)
        return launch.Plan(self._binary(variant), (only,))

    def _inputs(self, variant: Variant) -> tuple[int, int]:
        apart = self._bytes + variant.gap_bytes
        return self._out + apart, self._out + 2 * apart

    def _gate(self, probe: Probe, variant: Variant, plan: launch.Plan) -> None:
        """Poisons the output, runs the probe once and compares windows from end to end."""
        self.backend.fill(self._out, 0xFF, self._bytes, self._stream)
        launch.run(plan, self._stream)
        window_bytes = min(WINDOW_BYTES, self._bytes // WINDOWS)
        for at in np.linspace(0, self._bytes - window_bytes, WINDOWS, dtype=np.int64) // 16 * 16:
            got = self.backend.to_host(self._out + int(at), window_bytes, self._stream)
            want = self._expected(probe, variant, int(at), window_bytes)
            if not np.array_equal(got.view(np.uint32), want):
                raise WrongResult(
                    f"probe {probe} {variant.slug} is wrong between bytes {at:,} and "
                    f"{at + window_bytes:,} of {self._bytes:,}: it gets no figure; "
                    f"check the compiler and rmsnorm_raw/kernels/probes.py"
                )

    def _expected(self, probe: Probe, variant: Variant, at: int, size_bytes: int) -> np.ndarray:
        vectors = np.arange(at // 16, (at + size_bytes) // 16)
        if probe == "write":
            return np.repeat(vectors.astype(np.uint32), 4)
        begin = self._out + self._bytes  # of the pattern
        first, second = (
            self._pattern[((address - begin) // 16 + vectors) % len(self._pattern)]
            for address in self._inputs(variant)
        )
        result = first if probe == "copy" else first + second
        return result.reshape(-1).view(np.uint32)
