"""Sources: golden text, the digest, and the rules that one text for four compilers must keep."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

import pytest
from write_golden import GOLDEN, TEXTS, backward_defines

from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import InvalidConfig
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.source import render

GFX950, SM_90 = KNOWN["gfx950"], KNOWN["sm_90"]


@pytest.mark.parametrize("name", TEXTS)
def test_golden_text(name: str) -> None:
    """A refactor shows as no difference; a change of a kernel shows in the diff of its golden file.

    After an intended change: python tests/write_golden.py
    """
    assert (GOLDEN / f"{name}.hip").read_text() == TEXTS[name]


def test_golden_defines() -> None:
    assert (GOLDEN / "backward_defines.txt").read_text() == backward_defines()


@pytest.mark.parametrize("name", TEXTS)
def test_rules_of_one_text_for_four_compilers(name: str) -> None:
    text = TEXTS[name]
    assert "#include" not in text
    # hiprtc 7 has no such names, NVRTC has no headers
    assert not re.search(r"\bu?int(8|16|32|64)_t\b|\bsize_t\b|\bwarpSize\b", text)
    # clang's bit cast of one element of a vector returns element 0 for every index
    assert not re.search(r"__builtin_bit_cast\([^()]*\[[^\]]*\]\)", text)
    assert all(line == line.rstrip() and "\t" not in line for line in text.splitlines())
    for kernel in re.findall(r"__global__[^(]*\(", text):
        assert "RR_BOUNDS" in kernel or "__launch_bounds__" in kernel, kernel


def test_entry_points_are_in_the_text() -> None:
    for problem in (
        Problem.forward(4, 64, "fp16"),
        Problem.backward(4, 64, "fp16"),
        Problem.backward(4, 1 << 18, "fp16"),
    ):
        source = render(problem, _fits(problem), GFX950)
        for name in source.entry_points:
            assert len(re.findall(rf"\b{name}\(", source.text)) == 1


def _fits(problem: Problem) -> Config:
    from rmsnorm_raw.ladder import default_config

    return default_config(problem, GFX950)


def test_digest_is_of_all_that_the_compiler_sees() -> None:
    problem = Problem.forward(32768, 8192, "bf16")
    source = render(problem, Config(), GFX950)
    assert source.digest == render(replace(problem, rows=7), Config(), GFX950).digest
    others = [
        render(replace(problem, cols=4096), Config(), GFX950),
        render(replace(problem, weight_dtype="float32"), Config(), GFX950),
        render(problem, Config(store_policy="stream"), GFX950),
        render(problem, Config(), SM_90),
        replace(source, text=source.text + " "),
    ]
    assert len({source.digest, *(s.digest for s in others)}) == 6
    assert len(source.digest) == len(hashlib.sha256().hexdigest())


def test_vendor_bounds_come_from_their_own_knob() -> None:
    problem = Problem.forward(32768, 8192, "bf16")
    assert ("RR_SECOND_BOUND", "2") in render(problem, Config.parse("w2"), GFX950).defines
    assert ("RR_SECOND_BOUND", "2") in render(problem, Config.parse("m2"), SM_90).defines
    assert ("RR_GFX", "950") in render(problem, Config(), GFX950).defines
    assert "RR_GFX" not in dict(render(problem, Config(), SM_90).defines)


def test_a_config_that_does_not_fit_is_not_rendered() -> None:
    with pytest.raises(InvalidConfig, match="persistent"):
        render(Problem.forward(4, 64, "fp16"), Config.parse("b64-lds3"), GFX950)


def test_a_source_is_one_line_in_a_repl() -> None:
    problem = Problem.forward(64, 4096, "bf16")
    source = render(problem, Config.parse("b256-t256-v16"), KNOWN["gfx950"])
    lines = source.text.count("\n")
    assert repr(source) == (
        f"<Source rmsnorm_forward.hip b256-t256-v16-reg, {lines} lines, digest {source.digest[:8]}>"
    )
