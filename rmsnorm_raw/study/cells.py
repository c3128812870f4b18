"""The 90 cells of the published Hopper study, as problems.

The archive's columns and origin are described in ``archive/SOURCES.md``.
"""

from __future__ import annotations

import csv
from importlib import resources

from rmsnorm_raw.dtypes import SHORT_NAME
from rmsnorm_raw.problem import Op, Problem

#: the archive's name of an operation
ARCHIVE_NAME: dict[Op, str] = {"forward": "fwd", "backward": "bwd"}


def published_rows(host: str = "H200") -> list[dict[str, str]]:
    """The archive's rows of one host ("H200" or "H100"), in its order, as text by column."""
    archive = resources.files("rmsnorm_raw.study").joinpath("archive", "hopper_quack_cells.csv")
    with archive.open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["host"] == host]


def problem_columns(problem: Problem) -> dict[str, str]:
    """The columns that name a problem in every table of ours, by the archive's names.

    "extras" only where there are any: a table that may have such problems has that column.
    """
    more = {"extras": str(problem.extras).removeprefix(" + ")} if problem.extras else {}
    return {
        "op": ARCHIVE_NAME[problem.op],
        "m": str(problem.rows),
        "n": str(problem.cols),
        "act": SHORT_NAME[problem.dtype],
        "weight": SHORT_NAME.get(problem.weight_dtype or "", "none"),
        **more,
    }


def cells() -> tuple[Problem, ...]:
    """The 9 shapes x 5 dtype pairs x 2 operations of the study, in the archive's order."""
    found = []
    for row in published_rows():
        build = Problem.forward if row["op"] == "fwd" else Problem.backward
        found.append(build(int(row["m"]), int(row["n"]), row["act"], weight_dtype=row["weight"]))
    return tuple(found)
