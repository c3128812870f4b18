"""Reports from users of such kernels, about where data lies; see test_cases.py."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from by_hand import SEED
from planted import replaced, simulated

from rmsnorm_raw import check, launch
from rmsnorm_raw.backends.cpu import CpuBackend
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import SimulatorError
from rmsnorm_raw.launch import Tensor, make_plan
from rmsnorm_raw.module import Binary, build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import Source, render

MAKE = [Problem.forward, Problem.backward]


# ---- 12: Liger#803, flashinfer#3005, more than 2^31 elements -------------------------------------

#: elements from one row to the next: the second row is past 2^31 elements, the third past 2^32
FAR = (1 << 31) + 128
FAR_ROWS, FAR_COLS = 3, 512


class Sparse:
    """Matrices whose rows lie 4 GiB apart; of the memory only pages that are touched exist."""

    def __init__(self, element_bytes: int) -> None:
        self.stride_bytes = FAR * element_bytes
        size = FAR_ROWS * self.stride_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._map = mmap.mmap(-1, size, flags=flags)
        except OSError as error:
            pytest.skip(f"no {size >> 30} GiB of addresses here: {error}")
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.tensor = Tensor(self._bytes.ctypes.data, FAR)

    def rows(self, bits: np.dtype[Any]) -> np.ndarray:
        shape, strides = (FAR_ROWS, FAR_COLS), (self.stride_bytes, bits.itemsize)
        return np.ndarray(shape, bits, self._map, strides=strides)


def run_far(problem: Problem, config: Config, binary: Binary) -> tuple[dict[str, Any], ...]:
    """(outputs with rows far apart, outputs of dense tensors), as stored."""
    backend = binary.backend
    sizes = launch.tensor_bytes(problem, config, backend.device)
    made = {name: backend.allocate(size) for name, size in sizes.items()}
    dense = {n: launch.dense_tensor(problem, n, address) for n, (address, _) in made.items()}
    check.write_inputs(problem, backend, dense, SEED)
    bits = np.dtype(f"u{problem.element_bytes}")
    matrices = [operand for operand in problem.operands if operand.is_matrix]
    far = {operand.name: Sparse(problem.element_bytes) for operand in matrices}
    for operand in matrices:
        if not operand.is_output:
            rows = made[operand.name][1].view(bits).reshape(FAR_ROWS, FAR_COLS)
            far[operand.name].rows(bits)[:] = rows
    tensors = dense | {name: sparse.tensor for name, sparse in far.items()}
    results = []
    for places in (dense, tensors):
        launch.run(make_plan(problem, config, binary, places))
        found = {o.name: made[o.name][1].copy() for o in problem.operands if o.is_output}
        results.append(found)
    results[1] |= {
        o.name: np.ascontiguousarray(far[o.name].rows(bits)).view(np.uint8).reshape(-1)
        for o in matrices if o.is_output
    }  # fmt: skip
    return results[1], results[0]


FAR_SLUGS = [
    (make, slug, arch)
    for make, slugs in (
        (Problem.forward, ("b64-t32-v16-reg", "b256-t256-v16-pp-p1", "b128-t64-v16-lds3-p1",
                           "b64-t64-v16-2p", "b64-t128-v8-reg", "b128-t32-v16-lds2b-p1")),
        (Problem.backward, ("b64-t32-v16-reg-p1", "b256-t256-v16-pp-p1", "b128-t64-v16-lds3-p1",
                            "b256-t256-v16-2p-p1", "b128-t32-v16-lds2b-p1")),
    )
    for slug in slugs
    for arch in ("gfx950", "gfx942", "sm_90")
    if "b-p1" not in slug or arch == "sm_90"
]  # fmt: skip


@pytest.mark.parametrize(("make", "slug", "arch"), FAR_SLUGS)
def test_rows_more_than_two_to_the_32_elements_apart_case_12(
    make: Callable[..., Problem], slug: str, arch: str
) -> None:
    problem, config = make(FAR_ROWS, FAR_COLS, "bf16"), Config.parse(slug)
    backend = CpuBackend(KNOWN[arch].wave)
    far, dense = run_far(problem, config, build(render(problem, config, simulated(arch)), backend))
    for name, want in dense.items():
        np.testing.assert_array_equal(far[name], want, name)


# ---- 28: quack-FlyDSL, a buffer descriptor over the whole tensor wraps at 4 GiB ------------------


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize("make", MAKE)
def test_a_descriptor_of_the_whole_tensor_would_wrap_at_4_gib_and_a_rows_does_not_case_28(
    make: Callable[..., Problem], arch: str
) -> None:
    problem, config = make(FAR_ROWS, FAR_COLS, "bf16"), Config.parse("b64-t64-v8-lds2-p1")
    backend, right = CpuBackend(64), render(problem, config, simulated(arch))
    far, dense = run_far(problem, config, build(right, backend))
    name = "y" if problem.op == "forward" else "dx"
    np.testing.assert_array_equal(far[name], dense[name])
    whole = replaced(
        right,
        ("uniform((u64)row_address(which, exists ? row : 0))", "uniform((u64)tensor[which].base)"),
        ("uniform(exists ? vectors * VEC_BYTES : 0)", "exists ? 0xffffffffu : 0"),
        ("skip + lane % RR_WAVE * COPY_BYTES, 0, 0, NT",
         "(u32)((u64)row_address(which, row) - from) + skip + lane % RR_WAVE * COPY_BYTES, 0, 0, "
         "NT"),
    )  # fmt: skip
    far, dense = run_far(problem, config, build(whole, backend))
    near = dense[name].reshape(FAR_ROWS, -1)
    wrapped = far[name].reshape(FAR_ROWS, -1)
    assert (wrapped[1:] != near[1:]).any()
    np.testing.assert_array_equal(wrapped[0], near[0])


def test_a_lane_past_the_end_of_its_row_copies_zeros_and_not_the_next_row_case_28() -> None:
    """Rows of 2000 in chunks of 2048: the descriptor ends with the row."""
    problem, config = Problem.forward(5, 2000, "bf16"), Config.parse("b128-t128-v16-lds3-p1")
    backend = CpuBackend(64)
    right = render(problem, config, backend.device)
    summed_whole = replaced(right, ("if (in_row(c, lane, vectors)) add_squares", "add_squares"))
    assert verify(problem, config, build(summed_whole, backend)).passed
    tensor = replaced(summed_whole, ("uniform(exists ? vectors * VEC_BYTES : 0)", "0xffffffffu"))
    assert not verify(problem, config, build(tensor, backend)).passed


# ---- 30: tilelang PR#2051, where a lane's copy to LDS lands --------------------------------------


@pytest.mark.parametrize("landing", ["issue", "wait"])
@pytest.mark.parametrize(
    ("arch", "slug", "dtype"),
    [
        ("gfx950", "b128-t128-v16-lds3-p1", "float32"), ("gfx950", "b64-t64-v8-lds2-p1", "float32"),
        ("gfx950", "b128-t64-v4-lds2r-p1", "float16"),
        ("gfx942", "b128-t128-v16-lds3-p1", "float32"),
        ("gfx942", "b128-t64-v16-lds2r-p1", "float32"),
    ],
)  # fmt: skip
def test_each_element_of_a_ring_comes_back_in_its_own_place_case_30(
    arch: str, slug: str, dtype: str, landing: Any
) -> None:
    """Every element has a number of its own: y has them in order, so no lane read another's."""
    element = np.dtype(dtype).itemsize
    config = Config.parse(slug)
    cols = config.threads_per_row * config.vec // element * 3 // 2
    problem = Problem.forward(
        9, cols, dtype, weight_dtype=None, eps=0.0, alignment=min(16, 2 * config.vec)
    )
    backend = CpuBackend(64, landing=landing)
    source = render(problem, config, simulated(arch))
    x = np.broadcast_to(1.0 + np.arange(cols), (9, cols)) * 2.0 ** np.arange(9)[:, None]
    x = x.astype(dtype)
    made = {name: backend.allocate(9 * cols * element) for name in ("x", "y")}
    made["rstd"] = backend.allocate(9 * 4)
    backend.from_host(made["x"][0], x, 0)

    def y_of(text: Source) -> np.ndarray:
        tensors = {name: launch.dense_tensor(problem, name, a) for name, (a, _) in made.items()}
        launch.run(make_plan(problem, config, build(text, backend), tensors))
        return made["y"][1].view(dtype).reshape(9, cols)

    norm = x.astype(np.float64) / np.sqrt(np.square(x.astype(np.float64)).mean(1, keepdims=True))
    np.testing.assert_allclose(y_of(source), norm, rtol=2 * np.finfo(dtype).eps)
    a_lane_each = ("slot_offset + skip)", "slot_offset + skip + lane % RR_WAVE * COPY_BYTES)")
    with pytest.raises(SimulatorError, match="lanes of a wave with different LDS addresses"):
        y_of(replaced(source, a_lane_each))
