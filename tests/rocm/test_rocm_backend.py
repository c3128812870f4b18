"""The backend's calls one by one: arguments, memory, LDS, events, and every kind of failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gfx950_stand_in import StandIn, require_stand_in

from rmsnorm_raw.backends import Backend
from rmsnorm_raw.errors import CompileError, LaunchError
from rmsnorm_raw.source import Source

require_stand_in()

WAVE = 64


def source(
    body: str, parameters: str = "unsigned* out", *, bounds: int = 1024, slug: str = ""
) -> Source:
    head = f'extern "C" __global__ void __launch_bounds__({bounds}) probe({parameters})'
    return Source("probe.hip", f"{head} {{\n{body}\n}}\n", DEFINES, ("probe",), slug)


DEFINES = (("RR_WAVE", "64"), ("RR_GFX", "950"), ("WORD", "7"))
LANES = "out[threadIdx.x] = WORD + threadIdx.x;"


class Buffer:
    """Words on the device."""

    def __init__(self, rocm: Backend, count: int = WAVE) -> None:
        self.rocm, self.size_bytes = rocm, 4 * count
        self.address, self._owner = rocm.allocate(self.size_bytes)
        rocm.fill(self.address, 0, self.size_bytes, 0)

    def words(self) -> list[int]:
        words: list[int] = self.rocm.to_host(self.address, self.size_bytes, 0).view("u4").tolist()
        return words


@pytest.fixture
def out(rocm: Backend) -> Buffer:
    return Buffer(rocm)


def launch(
    rocm: Backend, made: Source, *args: Any, grid: int = 1, block: int = WAVE, lds_bytes: int = 0
) -> None:
    function = rocm.compile(made).functions["probe"]
    given = [np.uint64(arg.address) if isinstance(arg, Buffer) else arg for arg in args]
    rocm.launch(function, grid, block, given, lds_bytes, 0)


def check_usable(rocm: Backend) -> None:
    """The device works, whatever was refused before."""
    out = Buffer(rocm)
    launch(rocm, source(LANES), out)
    assert out.words() == list(range(7, 7 + WAVE))


# ---- arguments -----------------------------------------------------------------------------------

#: (the kernel's type, what the host passes, its bits); 2**31 and more where a sign could be lost
SCALARS = [
    ("int", np.int32(-5)),
    ("unsigned", np.uint32(0xFFFFFFF1)),
    ("long long", np.int64(-(2**40) - 3)),
    ("unsigned long long", np.uint64(2**63 + 9)),
    ("float", np.float32(-1.5e-39)),  # a denormal is an argument like any other
    ("float", np.float32(0.1)),
]


@pytest.mark.parametrize("seed", range(24))
def test_arguments_arrive_whatever_their_order(rocm: Backend, seed: int) -> None:
    """Narrow ones leave holes before wide ones; the pointer is anywhere among them."""
    draw = np.random.default_rng(seed)
    chosen = [SCALARS[k] for k in draw.integers(len(SCALARS), size=draw.integers(1, 12))]
    at = int(draw.integers(len(chosen) + 1))
    names = [f"{kind} a{k}" for k, (kind, _) in enumerate(chosen)]
    body = ["if (threadIdx.x) return;"]
    for k in range(len(chosen)):
        body.append(f"for (unsigned b = 0; b < sizeof a{k}; ++b)")
        body.append(f"  ((unsigned char*)out)[{16 * k} + b] = ((unsigned char*)&a{k})[b];")
    out = Buffer(rocm, 64)
    args: list[Any] = [value for _, value in chosen]
    made = source("\n".join(body), ", ".join([*names[:at], "unsigned* out", *names[at:]]))
    launch(rocm, made, *args[:at], out, *args[at:])
    told = rocm.to_host(out.address, out.size_bytes, 0).tobytes()
    for k, (_, value) in enumerate(chosen):
        assert told[16 * k : 16 * k + value.nbytes] == value.tobytes(), (k, chosen)


def test_grid_and_block_arrive(rocm: Backend, stand_in: StandIn) -> None:
    out = Buffer(rocm, 6 * 256)
    body = "out[blockIdx.x * blockDim.x + threadIdx.x] = gridDim.x * 1000 + blockIdx.x;"
    launch(rocm, source(body), out, grid=6, block=256)
    assert out.words() == [6000 + block for block in range(6) for _ in range(256)]
    (ran,) = stand_in.ran
    assert (ran.grid, ran.block, ran.lds_bytes) == (6, 256, 0)


def test_a_source_is_compiled_once(rocm: Backend, stand_in: StandIn) -> None:
    made = source("out[0] = WORD + 1;")
    code = rocm.compile(made)
    loaded = len(stand_in.loaded)
    assert rocm.compile(source("out[0] = WORD + 1;")) is code
    assert len(stand_in.loaded) == loaded
    assert rocm.compile(source("out[0] = WORD + 2;")) is not code


# ---- memory --------------------------------------------------------------------------------------


def test_memory_goes_there_and_back(rocm: Backend, out: Buffer) -> None:
    rocm.fill(out.address, 0xAB, 128, 0)
    assert (rocm.to_host(out.address, 128, 0) == 0xAB).all()
    launch(rocm, source(LANES), out, block=WAVE)
    rocm.copy(out.address + 128, out.address, 128, 0)
    assert out.words() == 2 * list(range(7, 39))
    numbers = np.arange(WAVE, dtype=np.uint32)
    rocm.from_host(out.address, numbers, 0)
    numbers[:] = 0
    assert out.words() == list(range(WAVE))


def test_static_lds_is_counted(rocm: Backend) -> None:
    body = "__shared__ unsigned a[64]; a[threadIdx.x] = *out; __syncthreads(); *out = a[WORD];"
    assert rocm.compile(source(body)).resources["probe"].lds_bytes == 256


DYNAMIC = """
#if defined(RR_SIMULATOR)
    unsigned* words = (unsigned*)rr_sim_lds();
#else
    extern __shared__ __attribute__((aligned(16))) unsigned char room[];
    unsigned* words = (unsigned*)room;
#endif
    words[COUNT - 1 - threadIdx.x] = WORD + threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = words[COUNT - 64 + threadIdx.x];
"""


@pytest.mark.parametrize("size_bytes", [256, 48 << 10, 64 << 10, 96 << 10, 160 << 10])
def test_dynamic_lds(rocm: Backend, out: Buffer, stand_in: StandIn, size_bytes: int) -> None:
    """Up to all of it, and without the opt-in that CUDA wants above 48 KiB."""
    made = source(DYNAMIC.replace("COUNT", str(size_bytes // 4)))
    launch(rocm, made, out, lds_bytes=size_bytes)
    assert out.words() == list(range(70, 6, -1))
    assert stand_in.ran[-1].lds_bytes == size_bytes


def test_events_lie_in_the_order_of_the_stream(rocm: Backend, out: Buffer) -> None:
    start = rocm.record(0)
    launch(rocm, source(LANES), out)
    middle = rocm.record(0)
    rocm.fill(out.address, 0, 4, 0)
    end = rocm.record(0)
    first, second = rocm.elapsed_us(start, middle), rocm.elapsed_us(middle, end)
    assert min(first, second) >= 0
    assert rocm.elapsed_us(start, end) == pytest.approx(first + second, abs=0.5)
    assert out.words()[1] == 8


# ---- failures ------------------------------------------------------------------------------------


def test_a_compile_error_has_the_slug_the_log_and_the_line(rocm: Backend) -> None:
    with pytest.raises(CompileError, match=r"probe\.hip:2:\d+: error: .*nonsense") as caught:
        rocm.compile(source("nonsense;", slug="b256-t256-v16-reg"))
    assert caught.value.slug == "b256-t256-v16-reg"
    check_usable(rocm)


def test_too_much_static_lds_is_a_compile_error(rocm: Backend) -> None:
    body = "__shared__ unsigned a[41000]; a[WORD * *out] = 1; __syncthreads(); *out = a[WORD];"
    with pytest.raises(CompileError, match=r"local memory|LDS"):
        rocm.compile(source(body))
    check_usable(rocm)


def test_a_missing_entry_point_is_named_and_poisons_nothing(rocm: Backend) -> None:
    whole = source("out[0] = WORD;")
    with pytest.raises(CompileError, match="entry points"):
        rocm.compile(Source(whole.name, whole.text, whole.defines, ("absent",)))
    check_usable(rocm)


@pytest.mark.parametrize(
    ("why", "geometry"),
    [
        ("2048 threads", {"block": 2048}),
        ("256 threads", {"block": 256}),  # over __launch_bounds__
        ("67108864 blocks", {"grid": 1 << 26}),  # 2**32 threads
        ("163841 bytes", {"lds_bytes": 160 * 1024 + 1}),
    ],
)
def test_a_refused_launch_is_named_and_poisons_nothing(
    rocm: Backend, out: Buffer, why: str, geometry: dict[str, int]
) -> None:
    with pytest.raises(LaunchError, match=why):
        launch(rocm, source(LANES, bounds=128), out, **geometry)
    check_usable(rocm)
    assert out.words() == WAVE * [0]


@pytest.fixture
def mended(stand_in: StandIn) -> Iterator[None]:
    """The next test gets a device that works."""
    yield
    stand_in.mend()


def test_a_fault_is_a_launch_error_from_then_on(
    rocm: Backend, out: Buffer, mended: None, stand_in: StandIn
) -> None:
    made = source("if (threadIdx.x < 32) __syncthreads();", "unsigned* out")
    launch(rocm, made, out)  # as on a GPU, the launch itself succeeds
    assert not stand_in.faults
    with pytest.raises(LaunchError, match="only a new process helps"):
        rocm.synchronize(0)
    assert "probe.hip:2" in str(stand_in.faults[0])
    with pytest.raises(LaunchError, match="only a new process helps"):
        launch(rocm, source(LANES), out)


def test_a_host_address_is_a_fault(rocm: Backend, mended: None, stand_in: StandIn) -> None:
    """The simulator could read it; a GPU, and so the stand-in, does not."""
    host = np.zeros(WAVE, np.uint32)
    launch(rocm, source(LANES), np.uint64(host.ctypes.data))
    with pytest.raises(LaunchError, match="IllegalAddress"):
        rocm.synchronize(0)
    assert not host.any()


def test_an_argument_of_another_size_is_a_fault(
    rocm: Backend, out: Buffer, mended: None, stand_in: StandIn
) -> None:
    """That the two builds of a text agree is checked: here one is told another text."""
    narrow, wide = source("out[0] = a;", "unsigned* out, int a"), "unsigned* out, long long a"
    rocm.compile(narrow)
    number = max(stand_in.loaded)
    stand_in.loaded[number] = stand_in.loaded[number]._replace(source=source("out[0] = a;", wide))
    launch(rocm, narrow, out, np.int32(1))
    with pytest.raises(LaunchError):
        rocm.synchronize(0)
    assert isinstance(stand_in.faults[0], TypeError)


def test_a_stale_stream_is_refused(rocm: Backend, cupy: Any, out: Buffer) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    handle = stream.ptr
    del stream
    with pytest.raises(LaunchError, match="InvalidHandle"):
        rocm.fill(out.address, 1, 4, handle)
    check_usable(rocm)
