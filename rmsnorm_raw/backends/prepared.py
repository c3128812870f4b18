"""Launches that are made many times: what does not change is set out once."""

from __future__ import annotations

import array
import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

#: enqueues a launch on a raw stream, with the addresses given
PreparedLaunch = Callable[[int, Sequence[int]], None]


class Pointer(NamedTuple):
    """An argument that changes from call to call: the ``which``-th address, plus an offset."""

    which: int
    offset_bytes: int = 0


class OpenLaunch(NamedTuple):
    """A launch whose pointers are still open.

    Attributes:
        entry_point: the kernel's name in the Binary.
        grid: blocks.
        block: threads of a block.
        args: in the kernel's order, NumPy scalars of at most 8 bytes, and Pointers.
        lds_bytes: dynamic LDS (shared memory) of a block.
        early: it may start while the launch before it ends.
    """

    entry_point: str
    grid: int
    block: int
    args: Sequence[np.generic | Pointer]
    lds_bytes: int = 0
    early: bool = False

    def filled(self, addresses: Sequence[int]) -> tuple[np.generic, ...]:
        """The arguments of one call."""
        return tuple(
            np.uint64(addresses[arg.which] + arg.offset_bytes) if isinstance(arg, Pointer) else arg
            for arg in self.args
        )


class Arguments(threading.local):
    """Arguments in words of 8 bytes, and the table of their addresses that a driver takes.

    Each thread has its own, made when it first wants them: the driver copies them before a launch
    returns, but meanwhile another thread may write its pointers.

    Args:
        args: NumPy scalars; little-endian, each begins its word. A Pointer's is left at 0.
        enter: called in each thread first: one that is new may have no context on the device yet.

    Attributes:
        words: to write pointers to.
        table: the address of the table.
    """

    def __init__(self, args: Sequence[np.generic | Pointer], enter: Callable[[], object]) -> None:
        enter()
        scalars = (np.uint64(0) if isinstance(arg, Pointer) else arg for arg in args)
        packed = b"".join(arg.tobytes().ljust(8, b"\0") for arg in scalars)
        # of the standard library's arrays: a word of ctypes' takes twice as long to write
        self.words = array.array("Q", packed)
        start, _ = self.words.buffer_info()
        self._entries = (ctypes.c_uint64 * len(args))(*range(start, start + len(packed), 8))
        self.table = ctypes.addressof(self._entries)
