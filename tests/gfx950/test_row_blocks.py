"""Blocks that share a row, and the kernel that finishes dW, in the machine code of each ROCm here.

A check gives the faults that it finds, so that planted ones can show that it sees them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from amd_kernels import compiled, rows_kernel

from rmsnorm_raw.backends.flow import loops
from rmsnorm_raw.backends.isa import Instruction, replay
from rmsnorm_raw.backends.kernel_report import KernelReport
from rmsnorm_raw.backends.offline import ARCHITECTURES, compile_offline
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render
from rmsnorm_raw.space import chunks

pytestmark = [pytest.mark.gfx950, pytest.mark.parametrize("arch", ARCHITECTURES)]

WIDE = Problem.forward(32768, 8192, "bf16")
#: rows of two, four and eight blocks; what the ladder takes for few wide rows; a row too long to
#: keep the weight beside it; a tail; no weight
SHARED = (
    (WIDE, "b128-t256"), (WIDE, "b256-t1024-ls-ss"),
    (Problem.forward(32, 65536, "bf16"), None),
    (Problem.forward(8, 262144, "bf16", weight_dtype="fp32"), "b256-t2048"),
    (Problem.forward(64, 28672, "fp16"), "b512-t1024"),
    (Problem.forward(2048, 32768, "fp32", weight_dtype=None), "b512-t2048"),
)  # fmt: skip


def name(value: object) -> str:
    return str(value).replace(" ", "-") if isinstance(value, Problem) else str(value or "ladder")


# ---- a row of several blocks ---------------------------------------------------------------------


def exchange_faults(problem: Problem, config: Config, kernel: KernelReport) -> list[str]:
    """What is wrong with how the blocks of a row meet.

    In the order in which a block goes: a number by one atomic, all loads of its part of the row,
    one word published, a loop that asks for the others' words, all stores. Nothing is waited for
    but the number, then the row, piece by piece, then the words: the weight, where it was asked for
    early, is still on its way when the word goes out.
    """
    asm, wanted = kernel.asm, chunks(problem, config)
    vec = [each for each in asm if each.access and each.access.size_bytes == config.vec]
    row_loads = [each for each in vec if each.access and each.access.kind == "load"][:wanted]
    stores = [each for each in vec if each.access and each.access.kind == "store"]
    numbers = [each for each in asm if each.access and each.access.kind == "atomic"]
    shared = [each for each in asm if each.access and each.agent_scope]
    faults = [f"{each} orders memory" for each in asm if re.match("buffer_(inv|wb)", each.text)]
    if [(each.mnemonic, each.text.split()[-1]) for each in numbers] != [
        ("global_atomic_add", "sc0")  # with the count before it; of agent scope without sc1
    ]:
        faults.append(f"the number is taken by {[each.text for each in numbers]}")
    if [each.mnemonic for each in shared] != ["global_store_dwordx2", "global_load_dwordx2"]:
        return [*faults, f"words go by {[each.text for each in shared]}"]
    publish, ask = shared
    (body,) = loops(asm)
    if [each for each in body if each.access] != [ask]:
        faults.append(f"the loop that waits does {[each.text for each in body if each.access]}")
    if len(row_loads) != wanted or len(stores) != wanted:
        faults.append(f"{len(row_loads)} loads and {len(stores)} stores of {wanted} vectors")
    order = [*numbers, *row_loads, publish, ask, *stores]
    if order != sorted(order):
        faults.append("number, row, publishing, asking and stores are not in this order")
    return faults + early_waits(kernel, row_loads, publish)


def early_waits(
    kernel: KernelReport, row_loads: list[Instruction], publish: Instruction
) -> list[str]:
    """Waits among a row's loads, or for what is younger than them before the word goes out."""
    faults = []
    for each, flying in replay(kernel.asm, loop=False):
        if row_loads[0] < each <= publish and each.vmcnt is not None:
            ended = flying[: max(0, len(flying) - each.vmcnt)]
            if each < row_loads[-1]:
                faults.append(f"{each} among the row's loads")
            elif ended and ended[-1] > row_loads[-1]:
                faults.append(f"{each} waits for {ended[-1].text}")
    return faults


@pytest.mark.parametrize(("problem", "slug"), SHARED, ids=name)
def test_blocks_of_a_row_meet_by_words(
    problem: Problem, slug: str | None, arch: str, libraries: Path
) -> None:
    config, code = compiled(problem, arch, libraries, slug)
    assert config.blocks_per_row > 1
    assert list(code.kernels) == ["rmsnorm_forward", "rmsnorm_forward_clear"]
    for kernel in code.kernels.values():
        assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
        assert (kernel.agpr, kernel.lds_bytes) == (0, 0)
        assert "ds_bpermute_b32" not in kernel.mix
    rows = rows_kernel(code)
    assert exchange_faults(problem, config, rows) == []
    assert rows.row_loop() == ()  # to ask for words is not to work on rows
    assert rows.bytes_before_first_wait >= chunks(problem, config) * config.vec
    clear = code.kernels["rmsnorm_forward_clear"]
    moves = {group: n for group, n in clear.mix.items() if group.startswith("global")}
    assert moves == {"global store 8 B": 1}


STORE = "__hip_atomic_store(to, word, __ATOMIC_{}, __HIP_MEMORY_SCOPE_{});"
LOAD = "__hip_atomic_load(from, __ATOMIC_{}, __HIP_MEMORY_SCOPE_{});"
RELAXED = ("RELAXED", "AGENT")
COUNT = "row_words + rows * RR_ROW_BLOCKS"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (STORE.format(*RELAXED), STORE.format("RELAXED", "WORKGROUP"), "words go by"),
        (STORE.format(*RELAXED), STORE.format("RELEASE", "AGENT"), "buffer_wbl2.* orders memory"),
        (STORE.format(*RELAXED), STORE.format("RELEASE", "AGENT"), r"vmcnt\(0\).* waits for"),
        (LOAD.format(*RELAXED), LOAD.format("RELAXED", "WORKGROUP"), "words go by"),
        (LOAD.format(*RELAXED), LOAD.format("ACQUIRE", "AGENT"), "buffer_inv.* orders memory"),
        (f"*shared = atomicAdd((u32*)({COUNT}), 1u);", f"*shared = (*(u32*)({COUNT}))++;",
         r"the number is taken by \[\]"),
        ("load_early();\n  loads_first();", "load_early();\n  after_loads(early);", "waits for"),
    ],
    ids=[
        "published inside", "publishing orders", "publishing drains", "asked inside",
        "asking orders", "counted by hand", "weight waited for",
    ],
)  # fmt: skip
def test_a_wrong_meeting_is_seen(old: str, new: str, said: str, arch: str, libraries: Path) -> None:
    config = Config.parse("b128-t256")
    source = render(WIDE, config, KNOWN[arch])
    assert source.text.count(old) == 1, old
    source = replace(source, text=source.text.replace(old, new))
    kernel = rows_kernel(compile_offline(source, arch, libraries=libraries))
    assert re.search(said, "; ".join(map(str, exchange_faults(WIDE, config, kernel))))


# ---- the finish of dW ----------------------------------------------------------------------------


@pytest.mark.parametrize(("cols", "weight"), [(8192, "bf16"), (8192, "fp32"), (1024, "bf16")])
def test_dweight_has_four_rows_on_their_way(
    cols: int, weight: str, arch: str, libraries: Path
) -> None:
    problem = Problem.backward(32768, cols, "bf16", weight_dtype=weight)
    _, code = compiled(problem, arch, libraries)
    finish = code.kernels["rmsnorm_dweight"]
    assert (finish.vgpr_spills, finish.scratch_bytes, finish.agpr) == (0, 0, 0)
    loads = {group: n for group, n in finish.mix.items() if group.startswith("global load")}
    assert loads == {"global load 16 B": 4}
    assert finish.bytes_before_first_wait == 4 * 16
    assert finish.mix["dpp"] > 0
    assert not finish.mix.keys() & {"ds_bpermute_b32", "ds_swizzle_b32", "ds_permute_b32"}
    assert finish.mix["barrier"] == 1
