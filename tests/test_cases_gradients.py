"""Reports from users of such kernels, about gradients; each test names its case (test_cases.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from by_hand import assert_same, outputs

from rmsnorm_raw import rmsnorm_bwd, rmsnorm_fwd, space
from rmsnorm_raw.backends import Backend
from rmsnorm_raw.backends.cpu import CpuBackend
from rmsnorm_raw.check import verify
from rmsnorm_raw.config import Config
from rmsnorm_raw.module import build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch_cases as cases  # noqa: E402

from rmsnorm_raw import nn  # noqa: E402

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
#: forward and backward on every path; rows of whole 16-byte vectors
PATHS = [
    ("b64-t32-v16-reg", "b64-t32-v16-reg-p1"), ("b256-t256-v16-pp-p1",) * 2,
    ("b128-t64-v16-lds3-p1",) * 2, ("b64-t64-v16-2p", "b256-t256-v16-2p-p1"),
]  # fmt: skip
each_path = pytest.mark.parametrize(("forward", "backward"), PATHS, ids=[p[1] for p in PATHS])


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's CPU tensors go through the kernels."""
    monkeypatch.setenv("RMSNORM_RAW_BACKEND", "cpu")


def random(dtype: Any, *shape: int, seed: int = 0) -> Any:
    return cases.maker(dtype, "cpu", seed)(*shape)


# ---- 1: quack#88, backward with a dout of stride 0 -----------------------------------------------


@pytest.mark.usefixtures("simulator")
def test_dout_of_stride_0_as_a_sum_sends_it_back_case_1() -> None:
    x = random(BF16, 2, 1024, 256).requires_grad_()
    weight = random(FP32, 256, seed=1).requires_grad_()
    nn.rms_norm(x, weight, cases.EPS).sum().backward()
    cases.check_backward(x.grad, weight.grad, torch.ones_like(x), x, weight)


@pytest.mark.parametrize("which", ["dout", "x", "both"])
@pytest.mark.parametrize("seen", ["one number", "one row", "one column", "one row a batch"])
def test_strides_of_0_in_any_dimension_of_any_input_case_1(seen: str, which: str) -> None:
    def repeated(seed: int) -> Any:
        shape = {
            "one number": (1, 1, 1), "one row": (1, 1, 96), "one column": (3, 5, 1),
            "one row a batch": (3, 1, 96),
        }[seen]  # fmt: skip
        return random(BF16, *shape, seed=seed).expand(3, 5, 96)

    dout = random(BF16, 3, 5, 96) if which == "x" else repeated(2)
    x = random(BF16, 3, 5, 96, seed=1) if which == "dout" else repeated(3)
    weight = random(FP32, 96, seed=4)
    y, rstd = rmsnorm_fwd(x, weight)
    cases.check_forward(y, x, weight)
    dx, dweight = rmsnorm_bwd(dout, x, weight, rstd)
    cases.check_backward(dx, dweight, dout, x, weight)


# ---- 3: quack#12, a 16-bit weight and a 3-D input ------------------------------------------------


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("weight_dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_dweight_of_any_dtype_is_summed_in_fp32_and_cast_once_case_3(
    dtype: Any, weight_dtype: Any
) -> None:
    """3072 ones a column: in bf16 such a sum stops at 256, in fp16 at 2048."""
    x = torch.ones(3, 1024, 16, dtype=dtype).requires_grad_()
    weight = torch.ones(16, dtype=weight_dtype).requires_grad_()
    y = nn.rms_norm(x, weight, 0.0)
    assert (y == 1).all()
    y.sum().backward()
    assert (weight.grad.dtype, weight.grad.tolist()) == (weight_dtype, [3072.0] * 16)
    x, dout = random(dtype, 2, 3, 96), random(dtype, 2, 3, 96, seed=1)
    weight = random(weight_dtype, 96, seed=2)
    dx, dweight = rmsnorm_bwd(dout, x, weight)
    assert (dx.dtype, dweight.dtype) == (dtype, weight_dtype)
    cases.check_backward(dx, dweight, dout, x, weight)  # within half a spacing of weight_dtype


# ---- 6: quack d99232e, zero rows and zero columns ------------------------------------------------


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(CpuBackend, "launch", fail)


EMPTY = [(0, 8), (2, 0, 8), (0,), (3, 0), (2, 3, 0), (0, 0)]


@pytest.mark.usefixtures("simulator", "no_launch")
@pytest.mark.parametrize("weight_dtype", [FP16, FP32, None], ids=str)
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_no_rows_or_no_columns_launch_nothing_case_6(
    shape: tuple[int, ...], weight_dtype: Any
) -> None:
    x = torch.empty(shape, dtype=BF16)
    weight = None if weight_dtype is None else torch.ones(shape[-1], dtype=weight_dtype)
    y, rstd = rmsnorm_fwd(x, weight, eps=0.25)
    dx, dweight = rmsnorm_bwd(x, x, weight, rstd)
    assert (y.shape, y.dtype, rstd.shape) == (shape, BF16, shape[:-1])
    assert (rstd == 2).all()
    assert (dx.shape, dx.dtype) == (shape, BF16)
    if weight is None:
        assert dweight is None
    else:
        assert (dweight.dtype, dweight.tolist()) == (weight_dtype, [0.0] * shape[-1])
        weight.requires_grad_()
    x.requires_grad_()
    nn.rms_norm(x, weight, 0.25).sum().backward()
    assert x.grad.shape == shape
    assert weight is None or weight.grad.tolist() == [0.0] * shape[-1]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("make", [Problem.forward, Problem.backward])
def test_no_config_launches_anything_for_no_elements_case_6(
    make: Callable[..., Problem], cpu64: Backend, cpu32: Backend
) -> None:
    for backend in (cpu64, cpu32):
        for slug in PATHS[0] + PATHS[1] + PATHS[2]:
            some, config = make(4, 256, BF16), Config.parse(slug)
            if space.reject_reason(some, backend.device, config):
                continue
            binary = build(render(some, config, backend.device, runtime_cols=True), backend)
            for rows, cols in ((0, 256), (4, 0), (0, 0)):
                nothing = dataclasses.replace(some, rows=rows, cols=cols)
                assert verify(nothing, config, binary).passed


# ---- 11: pytorch PR#133085, squares of fp16 that overflow ----------------------------------------


@each_path
@pytest.mark.parametrize("largest", [257.0, 65504.0])
def test_fp16_values_whose_squares_overflow_case_11(
    largest: float, forward: str, backward: str
) -> None:
    """Over 256 a square is over fp16's 65504: sums, in both directions, are fp32."""
    generator = torch.Generator().manual_seed(0)
    x = (256 + (largest - 256) * torch.rand(5, 512, generator=generator)).to(FP16)
    x[:, ::3] *= -1
    weight, dout = random(FP16, 512, seed=1), random(FP16, 5, 512, seed=2)
    y, rstd = rmsnorm_fwd(x, weight, config=forward)
    cases.check_forward(y, x, weight)
    for given in (rstd, None):
        dx, dweight = rmsnorm_bwd(dout, x, weight, given, config=backward)
        cases.check_backward(dx, dweight, dout, x, weight)


# ---- 13: Liger PR#1305, backward overwrites the caller's dout ------------------------------------


@each_path
@pytest.mark.parametrize("layout", ["matrix", "rows apart", "every other column", "misaligned"])
def test_inputs_are_bitwise_unchanged_case_13(layout: str, forward: str, backward: str) -> None:
    """Also around the rows, and where a copy has to be made first."""
    bases = [random(BF16, 4 * 2048, seed=seed) for seed in (0, 1)]

    def inside(base: Any) -> Any:
        return {
            "matrix": lambda: base[: 5 * 512].view(5, 512),
            "rows apart": lambda: base.view(8, 1024)[1:6, 256:768],
            "every other column": lambda: base.view(8, 1024)[1:6, ::2],
            "misaligned": lambda: base[1 : 1 + 5 * 512].view(5, 512),
        }[layout]()

    x, dout = (inside(base) for base in bases)
    weight = random(FP32, 512, seed=2)
    if layout == "misaligned":
        forward, backward = "ladder", "ladder"  # no vectors of 16 bytes there
    rstd = rmsnorm_fwd(x, weight, config=forward).rstd
    inputs = (*bases, weight, rstd)
    before = [cases.bits(tensor) for tensor in inputs]
    rmsnorm_fwd(x, weight, config=forward)
    dx, dweight = rmsnorm_bwd(dout, x, weight, rstd, config=backward)
    cases.check_backward(dx, dweight, dout, x, weight)
    for tensor, was in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(cases.bits(tensor), was)


def test_the_gate_finds_a_kernel_that_overwrites_dout_case_13(cpu64: Backend) -> None:
    problem, config = Problem.backward(6, 256, "bf16"), Config.parse("b64-t64-v8-reg-p1")
    right = render(problem, config, cpu64.device)
    stored = "store_dx(dx, element, dout_kept[c], x_kept[c], w[c], result);"
    assert stored in right.text, "the text has changed: plant this fault anew"
    over_dout = stored.replace(
        "dx, element", "(void*)dout, row * dout_stride + chunk_element(c, lane)"
    )
    text = right.text.replace(stored, f"{{ {stored} {over_dout} }}")
    assert verify(problem, config, build(right, cpu64)).passed
    verdict = verify(problem, config, build(dataclasses.replace(right, text=text), cpu64))
    assert "was written, and it is an input" in verdict.message
    assert "dout[" in verdict.message


# ---- 18: apex#1652, dW differs between variants --------------------------------------------------

#: one config of each path, dealt to one program a unit and to more, with each finish
VARIANTS = {
    64: ("b64-t64-v16-reg-p1", "b256-t64-v8-reg-p4", "b128-t64-v16-reg-p2-fl", "b256-t64-v16-pp-p1",
         "b256-t128-v16-lds3-p1", "b128-t64-v16-lds2r-p2", "b256-t256-v16-2p-p1"),
    32: ("b64-t32-v16-reg-p1", "b256-t64-v8-reg-p4", "b128-t64-v16-reg-p2-fl", "b256-t64-v16-pp-p1",
         "b256-t128-v16-lds3-p1", "b128-t64-v16-lds3bp-p1", "b128-t32-v16-lds2br-p1-fe",
         "b256-t256-v16-2p-p1"),
}  # fmt: skip


@pytest.mark.parametrize("pair", [("bf16", "bf16"), ("fp16", "fp32"), ("fp32", "fp32")], ids=str)
@pytest.mark.parametrize("wave", VARIANTS)
def test_dweight_of_every_variant_is_right_and_repeats_its_bits_case_18(
    wave: int, pair: tuple[str, str]
) -> None:
    """Within its bound of float64, whoever came first: waves and lanes run in three orders."""
    problem = Problem.backward(37, 512, pair[0], weight_dtype=pair[1])
    for slug in VARIANTS[wave]:
        config = Config.parse(slug)
        first = None
        for order in ("forward", "reverse", "shuffle"):
            backend = CpuBackend(wave, order=order)
            binary = build(render(problem, config, backend.device, runtime_cols=True), backend)
            verdict = verify(problem, config, binary, seed=5)
            assert verdict.passed, (slug, order, verdict.message)
            assert 0 < verdict.worst["dweight"] <= 1
            made = outputs(problem, slug, binary)
            first = first or made
            assert_same(made, first)
