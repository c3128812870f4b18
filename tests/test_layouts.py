"""Layouts of torch tensors, by what torch says of them; the kernels are the simulator's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsnorm_raw import layouts, ops, ready
from rmsnorm_raw.config import Config
from rmsnorm_raw.launch import TENSORS
from rmsnorm_raw.problem import Problem

torch = pytest.importorskip("torch", reason="torch is not installed")

CPU = torch.device("cpu")
CACHES = (layouts.forward, layouts.backward, layouts.whole_forward, layouts.whole_backward)


def kind(*shape: int, dtype: Any = torch.float32) -> tuple[Any, ...]:
    return torch.Size(shape), dtype, CPU


def layout(strides: Sequence[int], *shape: int, dtype: Any = torch.float32) -> tuple[Any, ...]:
    return *kind(*shape, dtype=dtype), tuple(strides)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that :func:`ready.prepare` is asked for, with the alignment found."""
    seen: list[Problem] = []
    prepare = ready.prepare

    def spy(problem: Problem, *rest: Any) -> Any:
        made = prepare(problem, *rest)
        seen.append(made.problem)
        return made

    monkeypatch.setattr(ready, "prepare", spy)
    for cache in CACHES:
        cache.cache_clear()
    return seen


@pytest.mark.parametrize(
    ("x", "low", "weight_low", "alignment"),
    [
        (layout((64, 1), 3, 64), 0, 0, 16),
        (layout((64, 1), 3, 64), 4, 0, 4),
        (layout((66, 1), 3, 64), 0, 0, 8),
        (layout((64, 1), 3, 64), 0, 8, 8),
        (layout((64, 1), 3, 64, dtype=torch.bfloat16), 0, 8, 4),
        (layout((67, 1), 3, 64, dtype=torch.bfloat16), 0, 0, 2),
    ],
)
def test_alignment_is_of_addresses_and_strides(
    prepared: list[Problem], x: Any, low: int, weight_low: int, alignment: int
) -> None:
    assert layouts.forward(x, kind(64), low, weight_low, 1e-6, True) is not None
    assert prepared[0].alignment == alignment
    dense = layout((64, 1), 3, 64, dtype=x[1])
    for dout, a in ((x, dense), (dense, x)):
        layouts.backward(dout, a, kind(64), kind(3), low, weight_low, True, True)
        assert prepared[-1].alignment == alignment


def test_what_must_be_copied(prepared: list[Problem]) -> None:
    strided, dense = layout((128, 2), 3, 64), layout((64, 1), 3, 64)
    assert layouts.forward(strided, None, 0, 0, 1e-6, True) is None
    assert layouts.backward(strided, dense, None, kind(3), 0, 0, True, False) is None
    assert layouts.backward(dense, strided, None, kind(3), 0, 0, True, False) is None
    assert prepared == []


@pytest.mark.parametrize(
    ("strides", "shape"),
    [
        (True, (3, 2, 64)),
        ((128, 64, 1), (3, 2, 64)),
        ((132, 66, 1), (3, 2, 64)),
        ((0, 1), (3, 64)),
        ((66, 1), (1, 64)),  # torch calls it contiguous
        ((1,), (64,)),
        (True, (2, 0, 3)),
        (True, (3, 0)),
    ],
)
def test_a_result_has_the_strides_that_torch_gives_a_new_tensor(
    prepared: list[Problem], strides: Any, shape: tuple[int, ...]
) -> None:
    found = layouts.forward((*kind(*shape), strides), None, 0, 0, 1e-6, True)
    assert found is not None
    assert (found.shape, found.strides) == (shape, torch.empty(shape).stride())
    assert type(found.shape) is tuple  # as torch._C wants it


@pytest.mark.parametrize(("shape", "strides"), [((3, 64), (64, 1)), ((2, 3, 64), (192, 64, 1))])
def test_contiguous_is_what_its_strides_say(
    prepared: list[Problem], shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """The same problem and the same rows, whichever way a layout is written."""
    for each in (strides, True):
        assert layouts.forward((*kind(*shape), each), None, 0, 0, 1e-6, True) is not None
        dout = (*kind(*shape), each)
        layouts.backward(dout, dout, None, kind(*shape[:-1]), 0, 0, True, False)
    assert prepared[:2] == prepared[2:]


def test_nothing_is_prepared_for_no_elements(prepared: list[Problem]) -> None:
    for shape, strides in (((0, 64), (64, 1)), ((3, 0), (1, 1))):
        x, weight = layout((shape[1], 1), *shape), kind(shape[1])
        assert layouts.forward(x, weight, 0, 0, 1e-6, True) == layouts.Prepared(shape, strides)
        found = layouts.backward(x, x, weight, kind(shape[0]), 0, 0, True, True)
        assert found == layouts.Prepared(shape, strides)
    assert prepared == []


def test_layouts_are_forgotten_in_the_end() -> None:
    for cache in CACHES:
        assert cache.cache_info().maxsize == layouts.KEPT


QKV = (5 * 3 * 4 * 64, 3 * 4 * 64, 64, 1)  # of q in a packed qkv (2, 5, 3, 4, 64)


@pytest.mark.parametrize(
    ("shape", "strides", "per_head", "found"),
    [
        ((64,), [(1,)], False, (1, 1, [(64, 0)])),
        ((10, 64), [(64, 1), (128, 1)], False, (10, 1, [(64, 0), (128, 0)])),
        ((2, 5, 4, 64), [(1280, 256, 64, 1)], False, (40, 1, [(64, 0)])),
        ((2, 5, 4, 64), [(1280, 256, 64, 1)], True, (40, 4, [(256, 64)])),
        ((2, 5, 4, 64), [QKV], False, (40, 4, [(768, 64)])),
        ((2, 5, 4, 64), [QKV, (1280, 256, 64, 1)], True, (40, 4, [(768, 64), (256, 64)])),
        ((2, 5, 4, 64), [QKV, (0, 0, 0, 0)], False, None),  # of one number repeated
        ((2, 5, 4, 64), [QKV, (0, 0, 0, 1)], False, (40, 4, [(768, 64), (0, 0)])),
        ((2, 4, 5, 64), [(1280, 64, 256, 1)], False, None),  # heads ahead of tokens
        ((1, 4, 5, 64), [(1280, 64, 256, 1)], False, (20, 5, [(64, 256)])),
        ((5, 1, 64), [(64, 64, 1)], True, (5, 1, [(64, 0)])),
        ((5, 4, 64), [(256, 32, 1)], True, None),  # heads that overlap
        ((5, 3, 4098), [(15000, 4098, 1)], False, None),  # wider than heads may be
        ((5, 3, 4098), [(15000, 4098, 1)], True, (15, 3, [(15000, 4098)])),
        ((0, 4, 64), [(256, 64, 1)], True, (0, 1, [(64, 0)])),
        ((5, 0, 64), [(64, 64, 1)], True, (0, 1, [(64, 0)])),
        ((0, 64), [(0, 0)], False, (0, 1, [(64, 0)])),
        ((2, 256, 64), [(64000, 64, 1)], False, (512, 256, [(64000, 64)])),
        ((2, 257, 64), [(64000, 64, 1)], False, None),  # a slice of sequences, not heads
        ((2, 257, 64), [(64000, 64, 1)], True, (514, 257, [(64000, 64)])),
    ],
)
def test_leading_dimensions_are_rows_or_tokens_of_heads(
    shape: Any, strides: Any, per_head: bool, found: Any
) -> None:
    assert layouts.collapse_all(shape, strides, per_head) == found


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.integers(0, 40), min_size=4, max_size=4),
    st.booleans(),
)
def test_every_row_is_where_its_strides_say(
    leading: list[int], strides: list[int], per_head: bool
) -> None:
    cols = 3
    if len(leading) == 1 and per_head:
        leading = [1, *leading]
    shape = (*leading, cols)
    given_strides = (*strides[: len(leading)], 1)
    found = layouts.collapse_all(shape, [given_strides], per_head)
    if found is None:
        return
    rows, heads, [(token_stride, head_stride)] = found
    assert rows == math.prod(leading)
    assert not per_head or heads == leading[-1]
    for row, index in enumerate(itertools.product(*map(range, leading))):
        at = sum(i * stride for i, stride in zip(index, given_strides, strict=False))
        token, head = divmod(row, heads)
        assert token * token_stride + head * head_stride == at


def test_heads_of_a_packed_qkv_are_read_in_place(prepared: list[Problem]) -> None:
    """Nothing is copied, whether they share a weight or not; dout is dense."""
    x, dout = layout(QKV, 2, 5, 4, 64), layout((1280, 256, 64, 1), 2, 5, 4, 64)
    rstd, low = kind(2, 5, 4), (0, 0, 0, 0)
    assert layouts.forward(x, kind(64), 0, 0, 1e-6, True) is not None
    assert layouts.backward(dout, x, kind(64), rstd, 0, 0, True, True) is not None
    whole = layouts.Whole(1e-6, per_head=True)
    assert layouts.whole_forward(x, kind(4, 64), None, None, low, whole, True) is not None
    more = (0.0, True, True, torch.float32, None, None)
    found = layouts.whole_backward(dout, x, kind(4, 64), None, rstd, low, *more)
    assert found is not None
    assert [(p.op, p.extras.heads, p.extras.per_head) for p in prepared] == [
        ("forward", 4, False), ("backward", 4, False), ("forward", 4, True), ("backward", 4, True),
    ]  # fmt: skip


@pytest.mark.parametrize("lows", [(4, 0, 0, 0), (0, 4, 0, 0), (0, 0, 4, 0), (0, 0, 0, 4)])
def test_alignment_is_of_all_tensors(prepared: list[Problem], lows: Any) -> None:
    dense = layout((64, 1), 3, 64)
    whole = layouts.Whole(1e-6, residual_out_dtype=torch.float32)
    assert layouts.whole_forward(dense, kind(64), kind(64), dense, lows, whole, True) is not None
    more = (0.0, False, True, torch.float32, None, None)
    assert layouts.whole_backward(dense, dense, kind(64), dense, kind(3), lows, *more) is not None
    assert [problem.alignment for problem in prepared] == [4, 4]
    prepared.clear()
    apart = layout((66, 1), 3, 64)
    layouts.whole_forward(dense, kind(64), None, apart, (0, 0, 0, 0), whole, True)
    assert prepared[0].alignment == 8


CONFIGS = [
    ("forward", "b128-t1024-v16-reg"),  # eight blocks a row: words in the workspace
    ("forward", "b64-v16-pp-p1"),
    ("forward", "b64-v16-2p"),
    ("backward", "b64-v16-pp-p2"),
    ("backward", "b64-v16-lds2-p1-fl"),  # a counter
    ("backward", "b64-v16-2p-p1"),
]


@pytest.mark.parametrize(("op", "slug"), CONFIGS)
def test_prepared_launches_do_what_a_plan_does(
    monkeypatch: pytest.MonkeyPatch, op: Any, slug: str
) -> None:
    """The same bits as the array operations, on other memory each time, scratch full of NaN."""
    config, prepare = Config.parse(slug), ready.prepare

    def with_config(problem: Problem, alignment: int, _: None, where: Any) -> Any:
        return prepare(problem, alignment, config, where)

    monkeypatch.setattr(ready, "prepare", with_config)
    for cache in (layouts.forward, layouts.backward):
        cache.cache_clear()
    rows, cols = 9, 8192 if "t1024" in slug else 512
    dense = layout((cols, 1), rows, cols)
    for seed in range(2):
        torch.manual_seed(seed)
        tensors = {
            **{name: torch.randn(rows, cols) for name in ("x", "dout")},
            **{name: torch.full((rows, cols), torch.nan) for name in ("y", "dx")},
            "weight": torch.randn(cols),
            "dweight": torch.full((cols,), torch.nan),
            "counter": torch.zeros(1),
        }
        x, weight = tensors["x"], tensors["weight"]
        tensors["rstd"] = torch.rsqrt(x.square().mean(-1) + 1e-6)
        if op == "forward":
            want = ops.rmsnorm_fwd(x, weight, config=config)
            tensors["rstd"] = torch.full((rows,), torch.nan)
            found = layouts.forward(dense, kind(cols), 0, 0, 1e-6, True)
        else:
            want = ops.rmsnorm_bwd(tensors["dout"], x, weight, tensors["rstd"], config=config)
            found = layouts.backward(dense, dense, kind(cols), kind(rows), 0, 0, True, True)
        assert found is not None
        assert found.counter == slug.endswith("fl")
        tensors["workspace"] = torch.full((found.workspace + 1,), torch.nan)
        for launch in found.launches:
            launch(0, [tensors[name].data_ptr() for name in TENSORS[op] if name in tensors])
        for name, expected in zip(vars(want), want, strict=False):
            assert torch.equal(tensors[name], expected), name
        assert tensors["counter"].item() == 0
    for cache in (layouts.forward, layouts.backward):
        cache.cache_clear()
