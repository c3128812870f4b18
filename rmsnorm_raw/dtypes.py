"""Dtypes: their names, and the bytes of an element."""

from __future__ import annotations

from rmsnorm_raw.errors import InvalidInput

#: bytes of one element, by dtype name
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
#: the short names used in tables and CSV files
SHORT_NAME = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
#: the 8-bit floats that y may be quantised to, and the largest number of each: OCP's e4m3 (gfx950,
#: CUDA) and its predecessor on gfx942
LARGEST_FP8 = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 240.0}
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


def dtype_name(dtype: object) -> str:
    """The long name of a dtype: "bfloat16" of "bf16", of ml_dtypes.bfloat16, of torch.bfloat16.

    Args:
        dtype: a long or short name, or a dtype of NumPy, ml_dtypes, torch or JAX.

    Raises:
        InvalidInput: the dtype is not one of fp16, bf16, fp32.
    """
    name = dtype if isinstance(dtype, str) else _own_name(dtype)
    for long, short in SHORT_NAME.items():
        if name in (long, short):
            return long
    raise InvalidInput(
        f"dtype {dtype!r} is not supported: use {', '.join(SHORT_NAME.values())} "
        f"({', '.join(SHORT_NAME)})"
    )


def out_dtype_name(dtype: object) -> str:
    """As :func:`dtype_name`, for y: also "float8_e4m3fn" and "float8_e4m3fnuz".

    Raises:
        InvalidInput: y cannot be of that dtype.
    """
    name = dtype if isinstance(dtype, str) else _own_name(dtype)
    if name in LARGEST_FP8:
        return str(name)
    try:
        return dtype_name(dtype)
    except InvalidInput as error:
        raise InvalidInput(f"{error}; y may also be {' or '.join(LARGEST_FP8)}") from error


def fp8_dtype(arch: str) -> str:
    """The 8-bit float that a device of an architecture converts to."""
    return "float8_e4m3fnuz" if arch == "gfx942" else "float8_e4m3fn"


def stored_bytes(dtype: str) -> int:
    """Bytes of one stored element, those of y included."""
    return 1 if dtype in LARGEST_FP8 else DTYPE_BYTES[dtype]


def _own_name(dtype: object) -> object:
    """What a library calls a dtype of its own; torch's have no name but their text."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    return name or str(dtype).removeprefix("torch.")


def optional_dtype_name(dtype: object) -> str | None:
    """As :func:`dtype_name`; None for None."""
    return None if dtype is None else dtype_name(dtype)
