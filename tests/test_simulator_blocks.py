"""Blocks that are resident together: the words that they pass, their LDS, and what ends no wait."""

from __future__ import annotations

import re

import numpy as np
import pytest
from simulated import (
    AMD_BUFFER,
    AMD_COPY,
    PORTABLE,
    Defines,
    coded,
    each_compiler,
    run,
    small,
    words,
)

from rmsnorm_raw.backends.cpu import CpuBackend, Order
from rmsnorm_raw.errors import LaunchError, SimulatorError
from rmsnorm_raw.source import Source

ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffle")
#: of a row, in all kernels here
BLOCKS = 4
NOTHING = 0xFFFFFFFF  # what LDS begins as

each_order = pytest.mark.parametrize("order", ORDERS)
each_wave = pytest.mark.parametrize("wave", [64, 32])
#: in which blocks start by their index: AMD's are scattered where waves are shuffled
each_order_by_index = pytest.mark.parametrize(
    ("wave", "order"),
    [(wave, order) for wave in (64, 32) for order in ORDERS if (wave, order) != (64, "shuffle")],
)


def resident(blocks: int, body: str, parameters: str, defines: Defines = ()) -> Source:
    """A kernel, of which so many blocks are resident; its body begins on line 2."""
    return small(body, parameters, (("RR_ROW_BLOCKS", str(blocks)), *defines))


def row_words(rows: int) -> np.ndarray:
    return np.zeros((rows, BLOCKS), np.uint64)


# ---- values --------------------------------------------------------------------------------------

#: the sum of a row: a lane of the first wave waits for the word of one block, the other waves stand
#: at the barrier. `mine` is the block's number, and what each thread writes is what it then knows
SUM_OF_A_ROW = """
  unsigned* lds = (unsigned*)rr_sim_lds();
  {mine}
  lds[threadIdx.x] = in[mine * blockDim.x + threadIdx.x];
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1) {{
    unsigned sum = 0;
    for (unsigned i = 0; i < blockDim.x; ++i) sum += lds[i];
    rr_sim_publish(words + mine, 1ull << 32 | sum);
  }}
  if (threadIdx.x < RR_WAVE) {{
    const unsigned long long word = rr_sim_await(words + mine / 4 * 4 + threadIdx.x % 4);
    lds[blockDim.x + threadIdx.x] = (unsigned)word;
  }}
  __syncthreads();
  unsigned* to = out + 4 * (mine * blockDim.x + threadIdx.x);
  for (unsigned i = 0; i < 4; ++i) to[0] += lds[blockDim.x + i];
  to[1] = lds[threadIdx.x], to[2] = blockIdx.x, to[3] = threadIdx.x;
"""
PARAMETERS = "const unsigned* in, unsigned* out, unsigned long long* words"
BY_INDEX = "const unsigned mine = blockIdx.x;"
BY_TICKET = """
  if (threadIdx.x == 0) lds[blockDim.x] = atomicAdd(tickets, 1u);
  __syncthreads();
  const unsigned mine = lds[blockDim.x];
  __syncthreads();
"""
EXCHANGE = SUM_OF_A_ROW.format(mine=BY_INDEX)
BLOCK = 128


def check_sums(backend: CpuBackend, source: Source, rows: int, *more: np.ndarray) -> np.ndarray:
    """Runs SUM_OF_A_ROW; the blockIdx.x of each block that had a number."""
    given, out = coded(rows, BLOCKS, BLOCK), words(rows, BLOCKS, BLOCK, 4)
    run(
        backend, source, given, out, row_words(rows), *more,
        grid=rows * BLOCKS, block=BLOCK, lds_bytes=(BLOCK + 64) * 4,
    )  # fmt: skip
    sums = given.sum((1, 2), dtype=np.uint32)
    np.testing.assert_array_equal(out[..., 0], np.broadcast_to(sums[:, None, None], given.shape))
    np.testing.assert_array_equal(out[..., 1], given)  # a slot's LDS is its own
    np.testing.assert_array_equal(
        out[..., 3], np.broadcast_to(np.arange(BLOCK, dtype=np.uint32), given.shape)
    )
    index = out[..., 2].reshape(rows * BLOCKS, BLOCK)
    np.testing.assert_array_equal(index, index[:, :1].repeat(BLOCK, 1))
    return index[:, 0]


@pytest.mark.parametrize("defines", [(), PORTABLE], ids=["assembly", "portable"])
@each_compiler
@each_order_by_index
def test_blocks_of_a_row_exchange_their_sums(
    wave: int, order: Order, command: tuple[str, ...], defines: Defines
) -> None:
    backend = CpuBackend(wave, order=order, compiler=command)
    index = check_sums(backend, resident(BLOCKS, EXCHANGE, PARAMETERS, defines), 3)
    np.testing.assert_array_equal(index, np.arange(3 * BLOCKS))


@each_order_by_index
@pytest.mark.parametrize("slots", [BLOCKS, BLOCKS + 1, 2 * BLOCKS])
def test_many_rows_and_room_for_more_than_one(slots: int, wave: int, order: Order) -> None:
    backend = CpuBackend(wave, order=order)
    check_sums(backend, resident(slots, EXCHANGE, PARAMETERS), 100)


@each_order
@each_wave
def test_a_ticket_may_take_the_place_of_the_block_index(wave: int, order: Order) -> None:
    body = SUM_OF_A_ROW.format(mine=BY_TICKET)
    source = resident(BLOCKS, body, PARAMETERS + ", unsigned* tickets")
    tickets = words(1)
    index = check_sums(CpuBackend(wave, order=order), source, 50, tickets)
    assert tickets[0] == 50 * BLOCKS
    in_order = np.array_equal(index, np.arange(50 * BLOCKS))
    assert in_order == ((wave, order) != (64, "shuffle"))
    np.testing.assert_array_equal(np.sort(index), np.arange(50 * BLOCKS))


def test_blocks_of_amd_that_go_by_their_index_may_wait_for_ever() -> None:
    source = resident(BLOCKS, EXCHANGE, PARAMETERS)
    with pytest.raises(SimulatorError, match="deadlock: no wave can go on"):
        check_sums(CpuBackend(64, order="shuffle"), source, 50)


@each_order
@each_wave
def test_blocks_that_stay_for_many_rows(wave: int, order: Order) -> None:
    """Each wave waits on its own, and a wave that is ahead waits for the next row already."""
    body = """
  for (unsigned row = blockIdx.x / 4; row < rows; row += gridDim.x / 4) {
    const unsigned wave = threadIdx.x / RR_WAVE, waves = blockDim.x / RR_WAVE;
    const unsigned part = blockIdx.x % 4;
    unsigned long long* at = words + (row * waves + wave) * 4;
    if (threadIdx.x % RR_WAVE == 0) rr_sim_publish(at + part, 1 + 10 * row + part);
    out[(row * 4 + part) * blockDim.x + threadIdx.x] = rr_sim_await(at + threadIdx.x % 4);
  }
"""
    rows, waves = 30, 256 // wave
    out, passed = words(rows, BLOCKS, 256), np.zeros((rows, waves, BLOCKS), np.uint64)
    source = resident(8, body, "unsigned* out, unsigned long long* words, unsigned rows")
    run(CpuBackend(wave, order=order), source, out, passed, np.uint32(rows), grid=8, block=256)
    expected = 1 + 10 * np.arange(rows)[:, None, None] + np.arange(256) % BLOCKS
    np.testing.assert_array_equal(out, np.broadcast_to(expected, out.shape))


def test_blocks_go_on_in_the_order_of_the_launch() -> None:
    body = """
  if (threadIdx.x == 0) rr_sim_publish(words + blockIdx.x, 1);
  rr_sim_await(words + threadIdx.x % 4);
  if (threadIdx.x == 0) out[atomicAdd(count, 1u)] = blockIdx.x;
"""
    source = resident(BLOCKS, body, "unsigned* out, unsigned* count, unsigned long long* words")
    for order, turns in (("forward", [3, 0, 1, 2]), ("reverse", [3, 2, 1, 0])):
        out = words(BLOCKS)
        run(CpuBackend(64, order=order), source, out, words(1), row_words(1), grid=BLOCKS)
        np.testing.assert_array_equal(out, turns)


def test_a_word_that_is_there_ends_a_wait_of_a_block_alone() -> None:
    body = """
  rr_sim_publish(words + threadIdx.x, threadIdx.x + 1);
  __syncthreads();
  out[threadIdx.x] = rr_sim_await(words + (threadIdx.x ^ 127));
"""
    for wave in (64, 32):
        out, passed = words(128), np.zeros(128, np.uint64)
        source = small(body, "unsigned* out, unsigned long long* words")
        run(CpuBackend(wave), source, out, passed, grid=3, block=128)
        np.testing.assert_array_equal(out, (np.arange(128) ^ 127) + 1)
        np.testing.assert_array_equal(passed, np.arange(128) + 1)


@each_order
def test_a_missing_wait_shows(order: Order) -> None:
    body = """
  if (threadIdx.x == 0) rr_sim_publish(words + blockIdx.x, 1);
  out[blockIdx.x * blockDim.x + threadIdx.x] = words[threadIdx.x % 4];
"""
    out = words(BLOCKS, 64)
    source = resident(BLOCKS, body, "unsigned* out, unsigned long long* words")
    run(CpuBackend(64, order=order), source, out, row_words(1), grid=BLOCKS)
    assert not out[0, 1:4].any()


def test_a_published_word_counts_as_a_store() -> None:
    body = f"""
  {AMD_BUFFER.format(bytes=256)}
  {AMD_COPY}(buffer, rr_sim_lds(), 4, threadIdx.x * 4, 0, 0, 0);
  for (int i = 0; i < stores; ++i) rr_sim_publish(words + threadIdx.x, 1);
  rr_sim_wait_vmcnt(1);
  out[threadIdx.x] = ((unsigned*)rr_sim_lds())[threadIdx.x];
  rr_sim_wait_vmcnt(0);
"""
    parameters = "const unsigned* in, unsigned* out, unsigned long long* words, int stores"
    for stores in (0, 1):
        given, out, passed = coded(64), words(64), np.zeros(64, np.uint64)
        source = small(body, parameters)
        run(CpuBackend(64), source, given, out, passed, np.int32(stores), lds_bytes=256)
        np.testing.assert_array_equal(out, given if stores else NOTHING)


# ---- LDS -----------------------------------------------------------------------------------------

#: a block writes its LDS before it waits and reads it afterwards; `{store}` is a fault or nothing
LDS = """
  unsigned char* lds = (unsigned char*)rr_sim_lds();
  for (unsigned i = threadIdx.x; i < bytes; i += 64) out[0] += lds[i] != 0xff, lds[i] = blockIdx.x;
  {store}
  rr_sim_publish(words + blockIdx.x, (unsigned long long)lds);
  const unsigned long long other = rr_sim_await(words + (blockIdx.x ^ 1));
  for (unsigned i = threadIdx.x; i < bytes; i += 64) out[1] += lds[i] != blockIdx.x;
  out[2] += other == (unsigned long long)lds || other % 256;
"""
LDS_PARAMETERS = "unsigned* out, unsigned long long* words, unsigned bytes"


@pytest.mark.parametrize("order", ORDERS[:2])
@pytest.mark.parametrize("lds_bytes", [0, 101, 256, 16384])
def test_slots_have_an_lds_each_that_starts_as_nan(lds_bytes: int, order: Order) -> None:
    backend, out = CpuBackend(64, order=order), words(3)
    source = resident(BLOCKS, LDS.format(store=""), LDS_PARAMETERS)
    passed = row_words(4)
    run(backend, source, out, passed, np.uint32(lds_bytes), grid=passed.size, lds_bytes=lds_bytes)
    np.testing.assert_array_equal(out, 0)
    assert len(np.unique(passed)) >= 2


@each_order
@pytest.mark.parametrize(("lds_bytes", "index"), [(512, 512), (101, 101), (512, -1), (512, 4607)])
@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_store_outside_the_lds_of_a_slot(
    block: int, lds_bytes: int, index: int, order: Order
) -> None:
    backend, passed = CpuBackend(64, order=order), row_words(1)
    store = f"if (blockIdx.x == {block}) lds[{index}] = 1;"
    source = resident(BLOCKS, LDS.format(store=store), LDS_PARAMETERS)
    where = "before the start" if index < 0 else "past the end"
    said = f"store {where} of LDS: at byte {index} of {lds_bytes} (kernel k, block {block})"
    for _ in range(2):  # whose guards stand again
        passed[:] = 0
        with pytest.raises(SimulatorError, match=f"^small.hip: {re.escape(said)}$"):
            run(
                backend, source, words(3), passed, np.uint32(lds_bytes),
                grid=BLOCKS, lds_bytes=lds_bytes,
            )  # fmt: skip


def test_slots_whose_lds_does_not_fit() -> None:
    source = resident(BLOCKS, "out[0] = 1;", "unsigned* out")
    out = words(1)
    said = r"^k: 4 resident blocks of 65536 bytes of LDS: 294912 with their guards, of 240640$"
    with pytest.raises(LaunchError, match=said):
        run(CpuBackend(64), source, out, grid=BLOCKS, lds_bytes=65536)
    assert not out.any()
    run(CpuBackend(64), source, out, grid=BLOCKS, lds_bytes=49152)
    assert out[0] == 1


def test_threads_of_all_slots_have_a_stack_each() -> None:
    body = """
  volatile unsigned char mine[16384];
  for (unsigned i = 0; i < sizeof mine; i += 64) mine[i] = blockIdx.x;
  if (threadIdx.x == 0) rr_sim_publish(words + blockIdx.x, 1);
  rr_sim_await(words + threadIdx.x % 4);
  for (unsigned i = 0; i < sizeof mine; i += 64) *out += mine[i] != blockIdx.x;
"""
    source, out = resident(BLOCKS, body, "unsigned* out, unsigned long long* words"), words(1)
    run(CpuBackend(64), source, out, row_words(1), grid=BLOCKS, block=512)
    assert out[0] == 0


# ---- faults --------------------------------------------------------------------------------------

#: a block waits on line 3 for the words of its row; `silent` publishes none
WAIT = """  if (threadIdx.x == 0 && blockIdx.x != silent) rr_sim_publish(words + blockIdx.x, 1);
  rr_sim_await(words + blockIdx.x / 4 * 4 + threadIdx.x % 4);
  if (threadIdx.x == 0) ++*out;
"""
WAIT_PARAMETERS = "unsigned* out, unsigned long long* words, unsigned silent"
NOBODY = np.uint32(1000)


def deadlock(lane: int, grid: int, started: int, resident: int, slots: int, block: int = 0) -> str:
    said = (
        f"small.hip:3: deadlock: no wave can go on (no word for lane {lane}; of {grid} blocks "
        f"{started} have started, {resident} are resident and at most {slots} may be) "
        f"(kernel k, block {block})"
    )
    return f"^{re.escape(said)}$"


@pytest.mark.parametrize("defines", [(), PORTABLE], ids=["assembly", "portable"])
@each_compiler
@each_order_by_index
def test_a_block_that_publishes_nothing(
    wave: int, order: Order, command: tuple[str, ...], defines: Defines
) -> None:
    source = resident(BLOCKS, WAIT, WAIT_PARAMETERS, defines)
    backend = CpuBackend(wave, order=order, compiler=command)
    for _ in range(2):  # of one object, whose slots outlive a launch
        out = words(1)
        first = r"\d" if order == "shuffle" else {"forward": "4", "reverse": "7"}[order]
        said = deadlock(2, 12, 8, 4, 4).replace("block\\ 0", f"block\\ {first}")
        with pytest.raises(SimulatorError, match=said):
            run(backend, source, out, row_words(3), np.uint32(6), grid=12)
        assert out[0] == 4  # the row before it
        run(backend, source, out, row_words(3), NOBODY, grid=12)
        assert out[0] == 4 + 12


@each_wave
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_row_of_more_blocks_than_may_be_resident(slots: int, wave: int) -> None:
    source = resident(slots, WAIT, WAIT_PARAMETERS)
    with pytest.raises(SimulatorError, match=deadlock(slots, 8, slots, slots, slots)):
        run(CpuBackend(wave), source, words(1), row_words(2), NOBODY, grid=8)
    alone = small(WAIT, WAIT_PARAMETERS)
    with pytest.raises(SimulatorError, match=deadlock(1, 8, 1, 1, 1)):
        run(CpuBackend(wave), alone, words(1), row_words(2), NOBODY, grid=8)


def test_a_row_with_a_block_too_few() -> None:
    source = resident(BLOCKS, WAIT, WAIT_PARAMETERS)
    with pytest.raises(SimulatorError, match=deadlock(3, 7, 7, 3, 4, block=4)):
        run(CpuBackend(64), source, words(1), row_words(2), NOBODY, grid=7)


def test_who_would_publish_is_at_a_barrier() -> None:
    body = """  if (threadIdx.x < 64)
  rr_sim_await(words + blockIdx.x % 2);
  __syncthreads();
  if (threadIdx.x == 64) rr_sim_publish(words + blockIdx.x % 2, 1);
"""
    source = resident(2, body, "unsigned long long* words")
    with pytest.raises(SimulatorError, match=deadlock(0, 2, 2, 2, 2)):
        run(CpuBackend(64), source, row_words(1), grid=2, block=128)


@each_wave
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "if (threadIdx.x < 20) rr_sim_await(words);",
            "divergent wave operation: 20 of {wave} lanes of wave 0 arrived, lane 20 has returned",
        ),
        (
            "if (threadIdx.x == 5) return; rr_sim_await(words);",
            "divergent wave operation: {others} of {wave} lanes of wave 0 arrived, "
            "lane 5 has returned",
        ),
        (
            "rr_sim_await((unsigned long long*)((char*)words + 4));",
            "misaligned access of 8 bytes: 4 past a multiple of them",
        ),
        (
            "rr_sim_publish((unsigned long long*)((char*)words + 4), 1);",
            "misaligned access of 8 bytes: 4 past a multiple of them",
        ),
    ],
    ids=["part of a wave", "a lane has returned", "misaligned wait", "misaligned word"],
)
@pytest.mark.parametrize("word", [0, 1])
def test_a_fault_names_its_line(word: int, line: str, said: str, wave: int) -> None:
    source = resident(2, f"\n  {line}", "unsigned long long* words")
    message = re.escape(said.format(wave=wave, others=wave - 1))
    backend = CpuBackend(wave)
    with pytest.raises(SimulatorError, match=rf"^small\.hip:3: {message} \(kernel k, block 0\)$"):
        run(backend, source, np.full(2, word, np.uint64), grid=2)
    check_sums(backend, resident(BLOCKS, EXCHANGE, PARAMETERS), 2)


@pytest.mark.parametrize("landing", ["issue", "wait"])
@each_wave
def test_asynchronous_copies_are_not_modelled(wave: int, landing: str) -> None:
    copy = {
        64: AMD_BUFFER.format(bytes=256) + f"{AMD_COPY}(buffer, lds, 4, threadIdx.x * 4, 0, 0, 0);",
        32: "rr_sim_copy_async(lds + threadIdx.x * 4, in, 4);",
    }
    body = f"  char* lds = rr_sim_lds();\n  {copy[wave]}"
    said = "small.hip:3: asynchronous copies in blocks that share rows are not modelled"
    with pytest.raises(SimulatorError, match=f"^{said}"):
        run(
            CpuBackend(wave, landing=landing),  # type: ignore[arg-type]
            resident(2, body, "const unsigned* in"),
            coded(64),
            lds_bytes=256,
        )
