"""Launches that are made many times: what does not change is set out once."""

from __future__ import annotations

import array
import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

#: enqueues a launch on a raw stream, with the addresses given
PreparedLaunch = Callable[[int, Sequence[int]], None]


class OpenLaunch(NamedTuple):
    """A launch whose pointers change from call to call.

    Attributes:
        function: of a backend's Code.
        grid: blocks.
        block: threads of a block.
        args: NumPy scalars, at most 8 bytes each; those in the place of a pointer are not read.
        lds_bytes: dynamic LDS (shared memory) of a block.
        pointers: (i, k, offset): argument i is the k-th address plus an offset in bytes.
        early: it may start while the launch before it ends.
    """

    function: Any
    grid: int
    block: int
    args: Sequence[np.generic]
    lds_bytes: int
    pointers: Sequence[tuple[int, int, int]]
    early: bool = False

    def filled(self, addresses: Sequence[int]) -> list[np.generic]:
        """The arguments of one call."""
        args = list(self.args)
        for index, which, offset in self.pointers:
            args[index] = np.uint64(addresses[which] + offset)
        return args


class Arguments(threading.local):
    """Arguments in words of 8 bytes, and the table of their addresses that a driver takes.

    Each thread has its own, made when it first wants them: the driver copies them before a launch
    returns, but meanwhile another thread may write its pointers.

    Args:
        args: NumPy scalars; little-endian, each begins its word.
        enter: called in each thread first: one that is new may have no context on the device yet.

    Attributes:
        words: to write pointers to.
        table: the address of the table.
    """

    def __init__(self, args: Sequence[np.generic], enter: Callable[[], object]) -> None:
        enter()
        packed = b"".join(arg.tobytes().ljust(8, b"\0") for arg in args)
        # of the standard library's arrays: a word of ctypes' takes twice as long to write
        self.words = array.array("Q", packed)
        start, _ = self.words.buffer_info()
        self._entries = (ctypes.c_uint64 * len(args))(*range(start, start + len(packed), 8))
        self.table = ctypes.addressof(self._entries)
