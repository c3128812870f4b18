"""PyTorch: ``rms_norm``, ``RMSNorm``, and ``patch`` for the norms of a finished model."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    from rmsnorm_raw.errors import install

    raise ModuleNotFoundError(
        f"rmsnorm_raw.nn needs PyTorch 2.10 or newer: {install('torch')}", name="torch"
    ) from error

from rmsnorm_raw.nn.norm import EPS, RMSNorm, rms_norm
from rmsnorm_raw.nn.patching import Patched, patch, unpatch

__all__ = ["EPS", "Patched", "RMSNorm", "patch", "rms_norm", "unpatch"]
