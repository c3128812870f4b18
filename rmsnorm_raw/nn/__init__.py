"""PyTorch: ``rms_norm`` and ``RMSNorm``."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "rmsnorm_raw.nn needs PyTorch 2.10 or newer: pip install 'rmsnorm-raw[torch]'", name="torch"
    ) from error

from rmsnorm_raw.nn.norm import EPS, RMSNorm, rms_norm

__all__ = ["EPS", "RMSNorm", "rms_norm"]
