"""What CUDA's driver does and CuPy does not offer: a launch that starts while another ends."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint64 * 8))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z", "lds_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed
_EARLY = _LaunchAttribute(6, 0, (ctypes.c_uint64 * 8)(1))
_ATTRIBUTES = ctypes.pointer(_EARLY)


@functools.cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def launch_early(
    function: int, grid: int, block: int, table: int, lds_bytes: int, stream: int
) -> int:
    """Enqueue a launch that may start while the one before it ends; returns the driver's status.

    This is programmatic dependent launch (CUDA Programming Guide, section 4.5): the blocks start
    once those of the launch before have allowed it or left, and wait for its end in their own text.
    Under capture it becomes an edge of the graph.

    Args:
        function: a CUfunction.
        table: the address of the arguments' addresses.
    """
    config = _LaunchConfig(grid, 1, 1, block, 1, 1, lds_bytes, stream, _ATTRIBUTES, 1)
    launch = _library().cuLaunchKernelEx
    given = (ctypes.c_void_p(function), ctypes.c_void_p(table))
    return int(launch(ctypes.byref(config), *given, None))
