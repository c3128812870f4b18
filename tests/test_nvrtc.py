"""NVRTC without a GPU: every kernel builds for sm_90 with no warning, vectors keep their size."""

from __future__ import annotations

import re

import nvrtc
import pytest

from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.dtypes import DTYPE_BYTES
from rmsnorm_raw.gate_device import REFERENCE
from rmsnorm_raw.kernels import prelude
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import Source, render, target_defines

SM_90 = KNOWN["sm_90"]


def compile_ptx(source: Source) -> tuple[str, str]:
    """(PTX, log) of a source built for sm_90; raises with the log where NVRTC refuses."""
    ptx, log = nvrtc.compiled(source.name, source.text, source.defines)
    return ptx.rstrip(b"\0").decode(), log


CASES = [
    (make(rows, cols, x, weight_dtype=w), None)
    for make in (Problem.forward, Problem.backward)
    for x in DTYPE_BYTES
    for w in (*DTYPE_BYTES, None)
    for rows, cols in ((4096, 3000), (37, 262144), (5, 7))  # both paths, 16-byte and odd rows
] + [
    (Problem.forward(32768, 8192, "bf16"), "b256-t256-v8-2p-lk-ss"),
    (Problem.forward(32768, 8192, "bf16"), "b512-t256-v16-reg-ls-ss-m2"),
    (Problem.backward(32768, 8192, "bf16"), "b512-t512-v16-reg-lk-ss-p2"),
    (Problem.forward(32768, 8192, "bf16"), "b256-t256-v16-pp-lk-p2"),
    (Problem.forward(32768, 8192, "bf16"), "b256-t256-v16-lds4b-lk-ss-p2"),
    (Problem.forward(32768, 3000, "fp32"), "b256-t256-v8-lds3r-p2"),
    (Problem.backward(32768, 8192, "bf16"), "b512-t512-v16-pp-p2"),
    (Problem.backward(32768, 8192, "bf16"), "b512-t512-v16-lds3-ss-p1"),
    (Problem.backward(8192, 16384, "bf16"), "b512-t512-v16-lds3br-lk-ss-p1"),
    (Problem.backward(1, 4096, "bf16"), "b512-t512-v16-reg-p1-fl"),
    (Problem.forward(8192, 16384, "bf16"), "b128-t512-v16-reg-lk"),
    (Problem.forward(8, 262144, "bf16"), "b256-t2048-v16-reg-lk-ss-m1"),
    (Problem.forward(37, 3000, "fp32", weight_dtype=None, store_rstd=False), "b64-t128-v16-reg"),
    (Problem.backward(32768, 8192, "bf16"), "b512-t512-v16-lds3bp-lk-ss-p1-fe"),
    (Problem.backward(32768, 3000, "bf16"), "b384-t192-v16-reg-p2-fe"),
    (Problem.backward(8192, 16384, "bf16"), "b512-t512-v16-lds3brp-lk-ss-p1"),
    (Problem.backward(32768, 8192, "bf16", has_rstd=False), "b256-t256-v16-reg-p2"),
    (Problem.backward(32768, 8192, "bf16", need_dx=False), "b256-t256-v16-reg-p2"),
    (Problem.backward(32768, 8192, "bf16", need_dweight=False), "b256-t256-v16-2p-p2"),
]


@pytest.mark.parametrize(("problem", "slug"), CASES, ids=lambda v: str(v))
def test_every_kernel_builds_without_a_warning(problem: Problem, slug: str | None) -> None:
    config = Config.parse(slug) if slug else default_config(problem, SM_90)
    source = render(problem, config, SM_90)
    ptx, log = compile_ptx(source)
    assert log.strip("\0\n ") == ""
    for name in source.entry_points:
        assert f".entry {name}(" in ptx
    if config.vec == 16 and config.path in ("registers", "pingpong", "two_pass"):
        assert re.search(r"ld\.global\.(nc\.|L2::cache_hint\.)v4", ptx)
        assert re.search(r"st\.global\.(L2::cache_hint\.)?v4", ptx)
    assert ("cp.async.bulk" in ptx) == config.bulk
    assert ("cp.async.c" in ptx) == (config.path == "lds" and not config.bulk)
    policies = {"keep": "evict_last", "stream": "evict_first"}
    for policy, priority in policies.items():
        used = policy in (config.load_policy, config.store_policy)
        assert (f"L2::{priority}" in ptx) == used
    # what makes blocks a cluster, and what paces programs, are nowhere else
    blocks = config.blocks_per_row
    dimensions = re.findall(r"\.(?:reqnctapercluster|cluster_dim\w*) +([\d, ]+)", ptx)
    assert dimensions == ([f"{blocks}, 1, 1"] if blocks > 1 else [])
    for instruction in ("mapa.shared::cluster", "st.async.shared::cluster", "barrier.cluster"):
        assert (instruction in ptx) == (blocks > 1)
    assert ("mbarrier.try_wait" in ptx) == (blocks > 1 or config.bulk)
    assert ("nanosleep.u32" in ptx) == config.paced
    assert ptx.count("griddepcontrol") == 2 * (config.finish == "early")
    assert ("atom.global.add.u32" in ptx) == (config.paced or config.finish == "last_block")


def test_the_gate_s_own_kernels_build_without_a_warning() -> None:
    ptx, log = compile_ptx(REFERENCE)
    assert log.strip("\0\n ") == ""
    for name in REFERENCE.entry_points:
        assert f".entry {name}(" in ptx


def test_blocks_of_a_cluster_meet_before_they_store_and_wait_for_all_bytes() -> None:
    config = Config.parse("b128-t512-v16-reg")
    problem = Problem.forward(8192, 16384, "bf16")
    ptx, _ = compile_ptx(render(problem, config, SM_90))
    order = ["mbarrier.init", "fence.mbarrier_init.release.cluster", "mbarrier.arrive.expect_tx",
             "barrier.cluster.arrive.relaxed.aligned", "ld.global",
             "barrier.cluster.wait.acquire.aligned", "st.async", "mbarrier.try_wait",
             "st.global"]  # fmt: skip
    places = [ptx.index(instruction) for instruction in order]
    assert places == sorted(places)
    (register,) = re.findall(r"expect_tx.* (%r\d+);", ptx)
    assert re.search(rf"mov\.[ub]32\s+{register}, 16;", ptx)  # bytes of four floats


def test_an_early_finish_waits_before_it_loads_and_is_allowed_after_the_last_store() -> None:
    config = Config.parse("b512-t512-v16-lds3bp-lk-ss-p1-fe")
    ptx, _ = compile_ptx(render(Problem.backward(32768, 8192, "bf16"), config, SM_90))
    entries = re.split(r"\.entry (rmsnorm_\w+)\(", ptx)[1:]
    text = dict(zip(entries[::2], entries[1::2], strict=True))
    rows, finish = text["rmsnorm_backward"], text["rmsnorm_dweight"]
    assert rows.rindex("st.global") < rows.index("griddepcontrol.launch_dependents")
    assert finish.index("griddepcontrol.wait") < finish.index("ld.global")
    assert "ld.global.nc" not in finish  # which would be taken for constant from its first line


def test_a_vector_of_the_wrong_size_is_rejected() -> None:
    text = prelude.TEXT.replace("alignas(16) Words<16> { u32 w[4]; }", "Words<16> { u32 w[3]; }")
    assert text != prelude.TEXT
    with pytest.raises(ValueError, match="a vector has the wrong size"):
        compile_ptx(Source("bad.hip", text, target_defines(SM_90), ()))


def test_native_vector_attributes_are_ignored_here() -> None:
    """Why the vectors are structs: the attribute gives NVRTC 4 bytes, and the assertion sees it."""
    text = prelude.TEXT + (
        "typedef u32 V4 __attribute__((ext_vector_type(4)));\nRR_EXACT(V4, 16);\n"
    )
    with pytest.raises(ValueError, match="a vector has the wrong size"):
        compile_ptx(Source("native.hip", text, target_defines(SM_90), ()))
