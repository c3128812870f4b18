"""The plain operation's machine code for sm_90: what it was before there were extras."""

from __future__ import annotations

from dataclasses import replace

import plain_code
import pytest

from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study.cells import cells


@pytest.fixture(scope="module")
def known() -> dict[str, str]:
    digests, here = plain_code.known("sm_90"), plain_code.nvrtc_wheel()
    if here not in digests:
        pytest.skip(
            f"the digests are of NVRTC's wheel {' and '.join(digests)}, and here is "
            f"{here or 'none'}: plain_code.py says how to write others"
        )
    return dict(digests[here])


@pytest.mark.parametrize("problem", cells(), ids=str)
def test_the_plain_code_is_what_it_was(problem: Problem, known: dict[str, str]) -> None:
    name, source = plain_code.ladder_source(problem, "sm_90")
    assert plain_code.cubin_digest(source) == known[name]


def test_no_cell_is_left_out(known: dict[str, str]) -> None:
    assert set(known) == {plain_code.ladder_source(problem, "sm_90")[0] for problem in cells()}
    assert len(known) == 90


def test_a_digest_is_of_the_code_alone(known: dict[str, str]) -> None:
    name, source = plain_code.ladder_source(cells()[0], "sm_90")
    commented = replace(source, text="// nothing\n" + source.text)
    assert plain_code.cubin_digest(commented) == known[name]
    doubled = source.text.replace("out[e] = x[e] * rstd;", "out[e] = 2.0f * x[e] * rstd;")
    assert doubled != source.text
    assert plain_code.cubin_digest(replace(source, text=doubled)) != known[name]
