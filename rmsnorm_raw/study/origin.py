"""Where the providers of a run come from: which are chosen, and the very modules that are called.

A folder named ``quack`` on the path is as good as the package to Python, and its times would stand
under the package's name. So a module's file, version and functions are looked at before anything
is measured.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import rmsnorm_raw
from rmsnorm_raw.errors import InvalidInput, RmsnormRawError
from rmsnorm_raw.study.providers import OURS, Provider, providers

REPOSITORY = Path(rmsnorm_raw.__file__).resolve().parents[1]
#: what is installed is in one of these, also where a virtual environment lies in the repository,
#: and where this package is installed itself
INSTALLED = {"site-packages", "dist-packages"}
#: provider -> what is called of its module
CALLED = {
    OURS: ("build",),
    "quack": ("rmsnorm_fwd", "rmsnorm_bwd"),
    "quack_searched": ("rmsnorm_fwd_tuned", "rmsnorm_bwd_tuned"),
    "liger": ("rms_norm_forward", "rms_norm_backward"),
    "torch": ("rms_norm",),
    "compile": ("compile",),
}


class WrongModule(RmsnormRawError, ImportError):
    """What a provider's name leads to is not the package that it should be."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a provider comes from.

    Attributes:
        name: the provider's.
        module: what is called.
        version: of the installed package.
        path: the module's file.
    """

    name: str
    module: str
    version: str
    path: Path

    def __str__(self) -> str:
        return f"{self.name:<14} {self.module} {self.version} {self.path}"

    @property
    def facts(self) -> dict[str, str]:
        """For ``environment.json``: of the path its last three parts, which may be published."""
        path = str(Path("...", *self.path.parts[-3:]))
        return {"module": self.module, "version": self.version, "path": path}


def choose(names: Iterable[str], everyone: Sequence[Provider] | None = None) -> list[Provider]:
    """Ours and the named peers, in the order of :func:`.providers.providers`.

    Args:
        names: of providers; each may hold several, with commas between them.
        everyone: None for all that there are.

    Raises:
        InvalidInput: there is no such provider, or it is not installed.
    """
    everyone = providers() if everyone is None else everyone
    wanted = {OURS, *(part.strip() for name in names for part in name.split(",") if part.strip())}
    known = [provider.name for provider in everyone]
    if unknown := wanted - set(known):
        raise InvalidInput(
            f"no provider is called {', '.join(sorted(unknown))}: there are {', '.join(known)}"
        )
    chosen = [provider for provider in everyone if provider.name in wanted]
    if missing := [reason for provider in chosen if (reason := provider.missing())]:
        raise InvalidInput("; ".join(missing))
    return chosen


def find(provider: Provider) -> Origin:
    """Import what a provider calls, and look at it.

    Raises:
        WrongModule: it does not load, comes out of this repository, belongs to no installed
            package, or lacks what is called.
    """
    top = provider.module.partition(".")[0]
    mend = f"take that off PYTHONPATH and sys.path, or pip install {provider.package}"
    what = f"{provider.name}: {provider.module}"
    try:
        module = importlib.import_module(provider.module)
    except ImportError as error:
        spec = importlib.util.find_spec(top)
        where = spec and (spec.origin or [*(spec.submodule_search_locations or ())])
        raise WrongModule(
            f"{what} does not load ({error}), and {top} is {where}: {mend}"
        ) from error
    if module.__file__ is None:
        raise WrongModule(f"{what} is a folder without code: {mend}")
    path = Path(module.__file__).resolve()
    if provider.name != OURS and _in_repository(path):
        raise WrongModule(
            f"{what} is {path}, in this repository, and not the package {provider.package}: {mend}"
        )
    if lacks := [name for name in CALLED[provider.name] if not hasattr(module, name)]:
        raise WrongModule(f"{what} at {path} has no {', '.join(lacks)}: {mend}")
    try:
        version = provider.version
    except metadata.PackageNotFoundError as error:
        raise WrongModule(
            f"{what} is {path}, and no package {provider.package} is installed: {mend}"
        ) from error
    return Origin(provider.name, provider.module, version, path)


def _in_repository(path: Path) -> bool:
    return REPOSITORY in path.parents and not INSTALLED & set(path.parts)
