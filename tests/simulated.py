"""Small kernels on the simulator: a source from a few lines of text, and a launch from arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from rmsnorm_raw.backends.cpu import CpuBackend
from rmsnorm_raw.backends.host_compiler import compilers
from rmsnorm_raw.source import Source

Defines = tuple[tuple[str, str], ...]
PORTABLE: Defines = (("RR_PORTABLE_SWITCH", "1"),)
GFX942: Defines = (("RR_GFX", "942"),)

AMD_BUFFER = "auto buffer = __builtin_amdgcn_make_buffer_rsrc((void*)in, 0, {bytes}, 0x00020000);"
AMD_COPY = "__builtin_amdgcn_raw_ptr_buffer_load_lds"


def compiler_name(command: tuple[str, ...]) -> str:
    return "zig" if "ziglang" in command else "c++"


each_compiler = pytest.mark.parametrize("command", compilers(), ids=compiler_name)


def kernels(
    bodies: Mapping[str, str], parameters: str = "float* out", defines: Defines = ()
) -> Source:
    """A Source with a kernel for each name."""
    texts = (
        f'extern "C" __global__ void {name}({parameters}) {{\n{body}\n}}\n'
        for name, body in bodies.items()
    )
    return Source("small.hip", "".join(texts), defines, tuple(bodies), "b64")


def small(body: str, parameters: str = "float* out", defines: Defines = ()) -> Source:
    """A Source with one kernel, ``k``; its body begins on line 2."""
    return kernels({"k": body}, parameters, defines)


def run(
    backend: CpuBackend,
    source: Source,
    *args: np.ndarray | np.generic,
    entry: str = "k",
    grid: int = 1,
    block: int = 64,
    lds_bytes: int = 0,
) -> None:
    """Launch a kernel of a source; arrays are passed by address."""
    scalars = [np.uint64(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in args]
    function = backend.compile(source).functions[entry]
    backend.launch(function, grid, block, scalars, lds_bytes, 0)


def words(*shape: int) -> np.ndarray:
    """Zeros of 4 bytes that begin at a multiple of 16."""
    count = int(np.prod(shape))
    memory = np.zeros(count + 3, np.uint32)
    skip = -memory.ctypes.data % 16 // 4
    return memory[skip : skip + count].reshape(shape)


def coded(*shape: int) -> np.ndarray:
    """The words 1000, 1001, ..."""
    given = words(*shape)
    given[:] = 1000 + np.arange(given.size).reshape(shape)
    return given
