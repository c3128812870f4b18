from __future__ import annotations

import ctypes
import threading

import numpy as np

from rmsnorm_raw.backends.prepared import Arguments, OpenLaunch, Pointer

ARGS = (np.uint64(0), np.int64(-3), np.uint32(7), np.float32(0.25), np.uint64(1 << 60))
ONE_WORD = (ctypes.c_uint64, ctypes.c_int64, ctypes.c_uint32, ctypes.c_float, ctypes.c_uint64)


def read(arguments: Arguments) -> list[float]:
    """What a driver copies: each argument, by its size, from where the table says."""
    table = (ctypes.c_void_p * len(ARGS)).from_address(arguments.table)
    return [kind.from_address(at).value for kind, at in zip(ONE_WORD, table, strict=True)]


def test_a_driver_finds_every_argument() -> None:
    arguments = Arguments(ARGS, lambda: None)
    assert read(arguments) == [0, -3, 7, 0.25, 1 << 60]
    arguments.words[0] = (1 << 63) + 5
    assert read(arguments) == [(1 << 63) + 5, -3, 7, 0.25, 1 << 60]


def test_each_thread_has_its_own_and_enters_first() -> None:
    entered: list[int] = []
    arguments = Arguments(ARGS, lambda: entered.append(threading.get_ident()))
    arguments.words[0] = 1
    tables = [arguments.table]

    def work() -> None:
        arguments.words[0] = 2
        tables.append(arguments.table)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert read(arguments)[0] == 1
    assert tables[0] != tables[1]
    assert entered == [threading.get_ident(), thread.ident]


def test_pointers_are_filled_in_and_nothing_is_kept() -> None:
    args = (Pointer(2, 16), *ARGS[1:4], Pointer(0))
    opened = OpenLaunch("k", 1, 64, args)
    for base in (1 << 40, 1 << 50):
        filled = opened.filled([base, base + 1, base + 2])
        assert [int(arg) for arg in filled[:3]] == [base + 18, -3, 7]
        assert (filled[3], int(filled[4])) == (np.float32(0.25), base)
        assert {type(filled[k]) for k in (0, 4)} == {np.uint64}
    assert opened.args == args
