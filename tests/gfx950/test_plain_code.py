"""The plain operation's machine code for gfx950: what it was before there were extras."""

from __future__ import annotations

from pathlib import Path

import plain_code
import pytest
from amd_kernels import compiled, edited

from rmsnorm_raw.backends.rocm_libraries import rocm_release
from rmsnorm_raw.problem import Problem
from rmsnorm_raw.study.cells import cells

pytestmark = pytest.mark.gfx950


@pytest.fixture
def known(libraries: Path) -> dict[str, str]:
    digests, here = plain_code.known("gfx950"), rocm_release(libraries)
    if here not in digests:
        pytest.skip(
            f"the digests are of ROCm {' and '.join(digests)}, and here is {here}: "
            "plain_code.py says how to write others"
        )
    return dict(digests[here])


@pytest.mark.parametrize("problem", cells(), ids=str)
def test_the_plain_code_is_what_it_was(
    problem: Problem, libraries: Path, known: dict[str, str]
) -> None:
    name, _ = plain_code.ladder_source(problem, "gfx950")
    _, code = compiled(problem, "gfx950", libraries)
    assert plain_code.listing_digest(code) == known[name]


def test_no_cell_is_left_out(known: dict[str, str]) -> None:
    assert set(known) == {plain_code.ladder_source(problem, "gfx950")[0] for problem in cells()}
    assert len(known) == 90


def test_a_digest_is_of_the_code_alone(libraries: Path, known: dict[str, str]) -> None:
    name, source = plain_code.ladder_source(cells()[0], "gfx950")
    normalise = "out[e] = x[e] * rstd;"
    for edits, same in (
        (((normalise, normalise + "  // as it was"),), True),
        (((normalise, "out[e] = 2.0f * x[e] * rstd;"),), False),
    ):
        _, code = edited(cells()[0], source.slug, "gfx950", libraries, edits)
        assert (plain_code.listing_digest(code) == known[name]) is same
