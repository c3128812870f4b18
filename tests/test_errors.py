"""Exceptions travel between processes whole."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from collections.abc import Iterator

import pytest

import rmsnorm_raw
from rmsnorm_raw.errors import CompileError, InvalidConfig, RmsnormRawError

ARGUMENTS = {InvalidConfig: ("b64", "too wide"), CompileError: ("b64", "line 7\n", "Correct it.")}


def _all_errors(of: type[RmsnormRawError] = RmsnormRawError) -> Iterator[type[RmsnormRawError]]:
    yield of
    for kind in of.__subclasses__():
        yield from _all_errors(kind)


for _module in pkgutil.iter_modules(rmsnorm_raw.__path__):  # some errors stand outside errors.py
    if _module.name not in ("__main__", "nn"):  # which runs, and which wants torch
        importlib.import_module(f"rmsnorm_raw.{_module.name}")


@pytest.mark.parametrize("kind", dict.fromkeys(_all_errors()), ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_after_pickling_and_copying(kind: type[RmsnormRawError]) -> None:
    error = kind(*ARGUMENTS.get(kind, ("what was wrong",)))
    error.__notes__ = ["said later"]  # what add_note does from Python 3.11 on
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (str(again), vars(again)) == (str(error), vars(error))
