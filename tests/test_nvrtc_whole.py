"""NVRTC without a GPU: every kernel of the whole operation builds for sm_90 with no warning."""

from __future__ import annotations

import re

import nvrtc
import pytest
from whole_problems import whole_problems

from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.ladder import default_config
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render
from rmsnorm_raw.space import reject_reason

SM_90 = KNOWN["sm_90"]
FP8 = "cvt.rn.satfinite.e4m3x2.f32"
#: whole chunks, a tail, single elements, rows that are read twice
WIDTHS = (4096, 3000, 769, 65536)
PATHS = (
    "b256-t256-v16-pp-lk-p2", "b256-t256-v16-lds2-ss-p1", "b256-t256-v16-lds2r-p1",
    "b256-t256-v16-lds3b-lk-ss-p1", "b256-t256-v16-lds3br-p1", "b512-t512-v16-2p-ss",
    "b512-t512-v16-2p-ls-p1", "b128-t256-v16-reg-lk", "b256-t256-v8-reg", "b256-t256-v16-reg-p1-fe",
    "b128-t16-v16-reg", "b128-t16-v16-reg-p2-fe", "b128-t16-v16-pp-ls-p2",
    "b64-t32-v16-lds3b-lk-p2",
)  # fmt: skip
LADDER = list(
    dict.fromkeys((problem, None) for cols in WIDTHS for problem in whole_problems(32768, cols))
)
OTHERS = [
    (problem, slug)
    for i, slug in enumerate(PATHS)
    for problem in whole_problems(32768, 4096)[i % 2 :: 2]
    if not reject_reason(problem, SM_90, Config.parse(slug))
]


@pytest.mark.parametrize(("problem", "slug"), [*LADDER, *OTHERS], ids=str)
def test_every_kernel_builds_without_a_warning(problem: Problem, slug: str | None) -> None:
    config = Config.parse(slug) if slug else default_config(problem, SM_90)
    source = render(problem, config, SM_90)
    code, log = nvrtc.compiled(source.name, source.text, source.defines)
    ptx = code.rstrip(b"\0").decode()
    assert log.strip("\0\n ") == ""
    assert set(re.findall(r"\.entry (\w+)\(", ptx)) == set(source.entry_points)
    for policy, priority in (("keep", "evict_last"), ("stream", "evict_first")):
        used = policy in (config.load_policy, config.store_policy)
        stored_alone = not problem.need_dx and config.load_policy != policy
        assert (f"L2::{priority}" in ptx) == (used and not stored_alone)
    # an 8-bit y by the hardware's conversion, two numbers at once
    assert (FP8 in ptx) == (problem.extras.scale != "none")
    assert ("cp.async.bulk" in ptx) == config.bulk


def test_every_path_has_its_extras() -> None:
    assert {slug for _, slug in OTHERS} == set(PATHS)
    rings = [problem.extras for problem, slug in OTHERS if "lds" in slug]
    assert {(bool(more.residual_dtype), more.scale) for more in rings} >= {
        (True, "none"), (True, "dynamic"), (False, "dynamic"),
    }  # fmt: skip
    assert any(more.residual_out_dtype and not more.residual_dtype for more in rings)
