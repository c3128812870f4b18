"""Rows that several blocks share: right in every order, the same bits, and with a fault not."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import NamedTuple

import numpy as np
import pytest
from by_hand import SEED, assert_same, outputs

import rmsnorm_raw as rr
from rmsnorm_raw import check
from rmsnorm_raw.backends.cpu import CpuBackend, Order
from rmsnorm_raw.config import Config
from rmsnorm_raw.errors import SimulatorError
from rmsnorm_raw.module import Binary, build
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import Source, render

ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffle")
#: a wave or two a block, of four; four waves, of eight blocks
B64_T256, B128_T512, B256_T2048 = "b64-t256-v16-reg", "b128-t512-v16-reg", "b256-t2048-v16-reg"

each_wave = pytest.mark.parametrize("wave", [64, 32], ids=["wave64", "wave32"])


@functools.cache
def simulator(wave: int, order: Order = "forward") -> CpuBackend:
    return CpuBackend(wave, order=order)


def rendered(problem: Problem, slug: str, wave: int) -> Source:
    return render(problem, Config.parse(slug), simulator(wave).device, runtime_cols=True)


def judged(problem: Problem, slug: str, binary: Binary) -> str:
    """What is wrong, "" for nothing."""
    try:
        return check.verify(problem, Config.parse(slug), binary, seed=SEED).message
    except SimulatorError as error:
        return str(error)


# ---- what is right passes ------------------------------------------------------------------------

RIGHT = [
    (Problem.forward(37, 3000, "bf16"), B64_T256),
    (Problem.forward(3, 3000, "fp16", weight_dtype="fp32"), B64_T256),
    (Problem.forward(3, 5000, "bf16", weight_dtype="fp32"), B128_T512),
    (Problem.forward(37, 5000, "fp16"), "b128-t256-v8-reg-ls-ss"),
    (Problem.forward(3, 5000, "fp32"), B128_T512),
    (Problem.forward(1, 65536, "bf16", weight_dtype="fp32"), B256_T2048),
    (Problem.forward(3, 65536, "fp16"), B256_T2048),
    (Problem.forward(1, 65536, "fp32"), B256_T2048),
    (Problem.forward(3, 3000, "bf16", weight_dtype=None), B64_T256),
    (Problem.forward(3, 3000, "bf16", store_rstd=False), B64_T256),
    (Problem.forward(1, 5000, "fp32", weight_dtype=None, store_rstd=False), B128_T512),
    (Problem.forward(3, 3002, "bf16", alignment=4), "b256-t512-v4-reg"),
    (Problem.forward(3, 1001, "fp16", alignment=2), "b64-t512-v2-reg"),
    # of four blocks of a row the last two have none of it, and the second one vector
    (Problem.forward(3, 520, "bf16"), B64_T256),
    (Problem.forward(3, 8, "fp32"), B64_T256),
]  # fmt: skip


@each_wave
@pytest.mark.parametrize(("problem", "slug"), RIGHT, ids=str)
def test_shared_rows_pass_the_gate_with_the_same_bits_in_every_order(
    problem: Problem, slug: str, wave: int
) -> None:
    binaries = [build(rendered(problem, slug, wave), simulator(wave, order)) for order in ORDERS]
    for binary, order in zip(binaries, ORDERS, strict=True):
        assert judged(problem, slug, binary) == "", order
    first, *others = (outputs(problem, slug, binary) for binary in binaries)
    for other in others:
        assert_same(other, first)


FEW = Problem.forward(3, 3000, "bf16")
WORDS = 3 * 4 + 1  # one a block, and the count


@pytest.mark.parametrize(
    "before",
    [
        np.zeros(WORDS, np.uint64),
        np.full(WORDS, 1 << 32, np.uint64),  # words that say 0.0
        np.full(WORDS, (1 << 64) - 1, np.uint64),
        np.random.default_rng(SEED).integers(0, 1 << 64, WORDS, np.uint64),
    ],
    ids=["zeros", "words of zeros", "ones", "noise"],
)
def test_what_the_workspace_held_does_not_matter(before: np.ndarray) -> None:
    binary = build(rendered(FEW, B64_T256, 64), simulator(64))
    assert_same(outputs(FEW, B64_T256, binary, before), outputs(FEW, B64_T256, binary))


@each_wave
def test_shared_rows_are_benched_on_clones_of_one_workspace(wave: int) -> None:
    kernel = rr.build(FEW, B64_T256, backend=simulator(wave))
    names = ["rmsnorm_forward_clear", "rmsnorm_forward"][wave == 32 :]
    assert [it.entry_point for it in kernel.launches] == names
    samples = kernel.bench()
    assert samples.simulated
    assert samples.clones == 2
    assert len(samples.times_us) == 6
    assert samples.median_us > 0


def test_a_kernel_of_shared_rows_is_called_on_arrays() -> None:
    x = np.random.default_rng(SEED).standard_normal((3, 3000)).astype(np.float16)
    weight = np.ones(3000, np.float16)
    kernel = rr.build(Problem.forward(3, 3000, "fp16"), B64_T256, backend="cpu")
    called = kernel(x, weight)
    alike = rr.rmsnorm_fwd(x, weight, config=B64_T256)
    np.testing.assert_array_equal(called.y, alike.y)
    np.testing.assert_array_equal(called.rstd, alike.rstd)
    np.testing.assert_allclose(np.square(called.y.astype(np.float64)).mean(axis=1), 1, rtol=1e-3)


# ---- and what is wrong fails ---------------------------------------------------------------------


class Fault(NamedTuple):
    """A piece of the text, what takes its place, and what is said of it in every order."""

    wave: int
    old: str
    new: str
    shows: str
    problem: Problem = FEW
    slug: str = B64_T256


#: two blocks of a row have none of it, and their sums are 0.0, whose bits are all 0
MOSTLY_EMPTY = Problem.forward(3, 520, "bf16")
SEVERAL_WAVES = (Problem.forward(3, 5000, "bf16"), B128_T512)
LANES = ("blocks.part * RR_BLOCK", "(blocks.part + 1) * RR_BLOCK")
READY = "    wait_for_cluster();  // every block's mbarrier is ready\n"
STORE = "store_to_block(sums + part, value, arrived, threadIdx.x);"
PUBLISH = "if (threadIdx.x == 0) publish_word(words + part, 1ull << 32 | as_bits(value));"
WRONG = r"y\[\d+, \d+\] is "
NAN = r"y\[\d+, \d+\] is nan"
NO_WORD = r"deadlock: no wave can go on \(no word for lane \d+"
COUNT = "*shared = atomicAdd((u32*)(row_words + rows * RR_ROW_BLOCKS), 1u);"
FAULTS = {
    "CUDA: no wait before the first store": Fault(
        32, READY, "", r"block \d of the cluster may not run: wait for the cluster first"
    ),
    "CUDA: no arrival": Fault(
        32, "    arrive_at_cluster();\n", "",
        r"lane \d+ waits at its cluster's barrier and has not arrived there",
    ),
    "CUDA: no mbarrier": Fault(
        32, "if (threadIdx.x == 0) {\n      barrier_init", "if (false) {\n      barrier_init",
        r"mbarrier (of block \d of the cluster|at byte 32 of LDS) used before its init",
    ),
    # whoever has ended too early is missed by those that come after it
    "CUDA: the bytes of one block too few": Fault(
        32, "4 * RR_ROW_BLOCKS);", "4 * (RR_ROW_BLOCKS - 1));",
        r"block \d of the cluster has ended",
    ),
    "CUDA: the bytes of one block too many": Fault(
        32, "4 * RR_ROW_BLOCKS);", "4 * (RR_ROW_BLOCKS + 1));",
        r"deadlock: .*missing at this mbarrier: arrivals 0, bytes 4\)",
    ),
    "CUDA: no bytes announced": Fault(
        32, "      barrier_expect(arrived, 4 * RR_ROW_BLOCKS);\n", "",
        r"deadlock: .*missing at this mbarrier: arrivals 1, bytes -16\)",
    ),
    "CUDA: stores to one's own block alone": Fault(
        32, STORE, STORE.replace("threadIdx.x", "part"), NAN
    ),
    "CUDA: all sums in one place": Fault(32, STORE, STORE.replace("sums + part", "sums"), NAN),
    "CUDA: no wait for the sums": Fault(
        32, "    barrier_wait(arrived, 0);\n", "", r"block \d of the cluster has ended"
    ),
    "CUDA: parts from 1": Fault(
        32, "blockIdx.x % RR_ROW_BLOCKS;", "blockIdx.x % RR_ROW_BLOCKS + 1;",
        "4 bytes at byte 56 of LDS, which has 56",
    ),
    "CUDA: lanes of the next part": Fault(32, *LANES, NAN),
    "CUDA: the same part for all": Fault(32, "blockIdx.x % RR_ROW_BLOCKS;", "0;", NAN),
    "AMD: a block that does not publish": Fault(
        64, PUBLISH, PUBLISH.replace("== 0)", "== 0 && part != 1)"), NO_WORD
    ),
    "AMD: a word without its flag": Fault(
        64, PUBLISH, PUBLISH.replace("1ull << 32 | ", ""), NO_WORD, MOSTLY_EMPTY
    ),
    "AMD: all words in one place": Fault(
        64, PUBLISH, PUBLISH.replace("words + part", "words"), NO_WORD
    ),
    "AMD: no wait for the words": Fault(
        64, "await_word(words + threadIdx.x % RR_ROW_BLOCKS)",
        "words[threadIdx.x % RR_ROW_BLOCKS]", WRONG,
    ),
    "AMD: words from one's own on": Fault(
        64, "row_words + (number - part);", "row_words + number;", NO_WORD
    ),
    "AMD: lanes of the next part": Fault(64, *LANES, NAN),
    "AMD: the same part for all": Fault(64, "part = number % RR_ROW_BLOCKS;", "part = 0;", NAN),
    "AMD: a number for all": Fault(
        64, COUNT, "*shared = *(u32*)(row_words + rows * RR_ROW_BLOCKS);", NO_WORD
    ),
    "AMD: no barrier after the sum": Fault(
        64, "    __syncthreads();\n    return exchange[1];", "    return exchange[1];", WRONG,
        *SEVERAL_WAVES,
    ),
    "AMD: words that are not cleared": Fault(64, "words[at] = 0", "words[count - 1] = 0", NAN),
    "AMD: the last word is not cleared": Fault(
        64, "if (at < count)", "if (at < count && at != count - 2)", NAN
    ),
}  # fmt: skip


def with_fault(fault: Fault, order: Order) -> Binary:
    right = rendered(fault.problem, fault.slug, fault.wave)
    assert fault.old in right.text, "the text has changed: plant this fault anew"
    text = right.text.replace(fault.old, fault.new)
    return build(dataclasses.replace(right, text=text), simulator(fault.wave, order))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_shared_rows_shows_in_every_order(name: str) -> None:
    fault = FAULTS[name]
    right = rendered(fault.problem, fault.slug, fault.wave)
    for order in ORDERS:
        assert judged(fault.problem, fault.slug, build(right, simulator(fault.wave, order))) == ""
        said = judged(fault.problem, fault.slug, with_fault(fault, order))
        assert re.search(fault.shows, said), (order, said)


@pytest.mark.parametrize("new", ["if (at < count - 1) words[at] = 0;", ""], ids=["last", "none"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_count_that_is_not_cleared_shows(order: Order, new: str) -> None:
    """By hand: the gate's workspace of ones would send the blocks to rows in nobody's memory."""
    one_row = Problem.forward(1, 1000, "bf16")  # a second one would lie in the guards
    right = build(rendered(one_row, B64_T256, 64), simulator(64, order))
    fault = Fault(64, "if (at < count) words[at] = 0;", new, "", one_row)
    wrong = with_fault(fault, order)
    for started in (0, 1):
        before = np.zeros(4 + 1, np.uint64)
        before[4] = started
        want = outputs(one_row, B64_T256, right, before)
        if not started:
            assert_same(outputs(one_row, B64_T256, wrong, before), want)
            continue
        with pytest.raises(SimulatorError, match=r"no word for lane 0|store outside a buffer"):
            outputs(one_row, B64_T256, wrong, before)


def test_blocks_of_amd_that_go_by_their_index_wait_for_ever_where_starts_are_scattered() -> None:
    fault = Fault(64, COUNT, "*shared = blockIdx.x;", NO_WORD)
    said = judged(fault.problem, fault.slug, with_fault(fault, "shuffle"))
    assert re.search(NO_WORD, said), said
