"""RMSNorm forward and backward for AMD MI355X (gfx950), as inline HIP source compiled at run time.

The public names below load their modules when first used: importing this package needs no GPU, no
CuPy and no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

#: public name -> the module that it lives in
_HOME = {
    "Backward": "ops",
    "Config": "config",
    "Forward": "ops",
    "Problem": "problem",
    "build": "workbench",
    "compare": "workbench",
    "default_config": "workbench",
    "enumerate_configs": "workbench",
    "explain": "workbench",
    "get_backend": "backends",
    "rmsnorm_bwd": "ops",
    "rmsnorm_fwd": "ops",
    "roofline": "workbench",
    "tune": "tuner",
    "workspace_bytes": "ready",
}
_SUBMODULES = ("array", "errors", "nn")

__all__ = sorted([*_HOME, *_SUBMODULES])

if TYPE_CHECKING:
    from rmsnorm_raw import array as array
    from rmsnorm_raw import errors as errors
    from rmsnorm_raw import nn as nn
    from rmsnorm_raw.backends import get_backend as get_backend
    from rmsnorm_raw.config import Config as Config
    from rmsnorm_raw.ops import Backward as Backward
    from rmsnorm_raw.ops import Forward as Forward
    from rmsnorm_raw.ops import rmsnorm_bwd as rmsnorm_bwd
    from rmsnorm_raw.ops import rmsnorm_fwd as rmsnorm_fwd
    from rmsnorm_raw.problem import Problem as Problem
    from rmsnorm_raw.ready import workspace_bytes as workspace_bytes
    from rmsnorm_raw.tuner import tune as tune
    from rmsnorm_raw.workbench import build as build
    from rmsnorm_raw.workbench import compare as compare
    from rmsnorm_raw.workbench import default_config as default_config
    from rmsnorm_raw.workbench import enumerate_configs as enumerate_configs
    from rmsnorm_raw.workbench import explain as explain
    from rmsnorm_raw.workbench import roofline as roofline


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
