"""Reports from users of such kernels, each a kind of fault, and that each has its tests.

The tests end in ``_case_<row>``: in test_cases_*.py on the simulator, on known clocks and on
made-up machines, in gpu/test_cases_gpu.py what only a GPU can show.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
#: row: where it was seen, and what triggers it
CASES = {
    1: "quack#88: backward with a dout of stride 0, as out.sum() sends it back",
    2: "quack PR#53, #52: the residual's gradient added before the norm's backward, or lost",
    3: "quack#12: a 16-bit weight with a 3-D input",
    4: "quack#18: torch.compile traces into DLPack on a FakeTensor",
    5: "quack 63094d3: residual_dtype ignored",
    6: "quack d99232e: zero rows, zero columns",
    7: "quack PR#138: a fixed-count warm-up picks a config 45 % slower",
    8: "pytorch PR#185644: gfx942 reports capability 9.x and is taken for an H100",
    9: "pytorch#183861: lane maths with a hard-coded wave width",
    10: "pytorch#184826, #136291: HIP refuses a launch of 2^32 threads",
    11: "pytorch PR#133085: squares of fp16 values over 256 overflow",
    12: "Liger#803, flashinfer#3005: more than 2^31 elements",
    13: "Liger PR#1305: backward overwrites the caller's dout",
    14: "Liger#231: 32 warps of 64 lanes asked for",
    15: "flashinfer PR#718: LDS over the limit is an invalid argument at the launch",
    16: "vllm#24247, LightLLM#1467: q and k sliced from a packed qkv",
    17: "TE PR#886: a view into a flat buffer whose base is not 16-byte aligned",
    18: "apex#1652: dW differs between variants",
    19: "aiter PR#1507: fp32 to bf16 and back in the middle of the residual path",
    20: "cupy#8801, PR#9480: bf16 through DLPack without ml_dtypes",
    21: "cupy#7189, cudnn-frontend PR#1165: launched on CuPy's stream while torch uses another",
    22: "cupy#9529, #9718: ROCm without hipcc, or a release that CuPy does not know",
    23: "cupy#9961: setting the dynamic LDS attribute raises on HIP",
    24: "cupy#9976: a failed HIP call poisons the next launch",
    25: "cusignal#220: a benchmark times only the launch",
    26: "NVIDIA/Fuser PR#1132: auto-calibrated rounds run on a warm cache",
    27: "quack-FlyDSL: the 4 MiB L2 taken for the last-level cache on gfx950",
    28: "quack-FlyDSL: a buffer descriptor over the whole tensor wraps at 4 GiB",
    29: "triton PR#9087: LDS use rises with stages when copies are asynchronous",
    30: "tilelang PR#2051: where a lane's copy to LDS lands",
}
#: rows whose fault needs a GPU to show
ON_A_GPU = {21}


def test_every_case_has_a_test() -> None:
    found: dict[int, list[str]] = {row: [] for row in CASES}
    for path in (*TESTS.glob("test_cases*.py"), *TESTS.glob("gpu/test_cases*.py")):
        for name, row in re.findall(r"^def (test_\w+_case_(\d+))\(", path.read_text(), re.M):
            assert int(row) in CASES, f"{path.name}: {name} names no case"
            found[int(row)].append(f"{path.parent.name}/{path.name}::{name}")
    assert list(CASES) == list(range(1, 31))
    assert [row for row, tests in found.items() if not tests] == []
    on_a_gpu = {row for row, tests in found.items() if all("gpu/" in test for test in tests)}
    assert on_a_gpu == ON_A_GPU
