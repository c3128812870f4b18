"""Where the providers of a run come from: which are chosen, and the very modules that are called.

A folder named ``quack`` on the path is as good as the package to Python, and its times would stand
under the package's name. So a module's file, version and functions are looked at before anything
is measured, and the file has to be one of those that the package was installed with.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import rmsnorm_raw
from rmsnorm_raw.errors import InvalidInput, RmsnormRawError
from rmsnorm_raw.study.providers import Provider, providers
from rmsnorm_raw.study.runs import OURS

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
        InvalidInput: there is no such provider, or it is not installed, or a name is empty.
    """
    everyone = providers() if everyone is None else everyone
    known = [provider.name for provider in everyone]
    wanted = {OURS}
    for name in names:
        parts = {part.strip() for part in name.split(",")} - {""}
        if not parts:
            raise InvalidInput(
                f"{name!r} names no provider: there are {', '.join(known)}; for ours alone leave "
                "the option out"
            )
        wanted |= parts
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
        WrongModule: it does not load, comes out of this repository, is none of the installed
            package's files, or lacks what is called.
    """
    top = provider.module.partition(".")[0]
    mend = f"take that off PYTHONPATH and sys.path, or pip install {provider.package}"
    what = f"{provider.name}: {provider.module}"
    try:
        module = importlib.import_module(provider.module)
    except (Exception, SystemExit) as error:
        spec = importlib.util.find_spec(top)
        where = spec and (spec.origin or [*(spec.submodule_search_locations or ())])
        raise WrongModule(
            f"{what} does not load ({type(error).__name__}: {error}), and {top} is {where}: {mend}"
        ) from error
    if getattr(module, "__file__", None) is None:
        raise WrongModule(f"{what} is a folder without code: {mend}")
    path = Path(str(module.__file__)).resolve()
    if provider.name != OURS and _in_repository(path):
        raise WrongModule(
            f"{what} is {path}, in this repository, and not the package {provider.package}: {mend}"
        )
    if lacks := [name for name in CALLED[provider.name] if not hasattr(module, name)]:
        raise WrongModule(f"{what} at {path} has no {', '.join(lacks)}: {mend}")
    try:
        version = provider.version
        package = None if provider.name == OURS else metadata.distribution(provider.package)
    except metadata.PackageNotFoundError as error:
        raise WrongModule(
            f"{what} is {path}, and no package {provider.package} is installed: {mend}"
        ) from error
    if package is not None and not _has(package, path):
        raise WrongModule(
            f"{what} is {path}, and that is none of the files of {provider.package} {version}, "
            f"which is installed in {package.locate_file('')}: {mend}"
        )
    return Origin(provider.name, provider.module, version, path)


def _has(package: metadata.Distribution, path: Path) -> bool:
    """Whether a module's file, all links followed, is one that a package was installed with.

    An editable install has the files of a checkout. Where a distribution of an operating system
    keeps no list of a package's files, the module has to lie beside, among installed ones.
    """
    url = json.loads(package.read_text("direct_url.json") or "{}")
    if url.get("dir_info", {}).get("editable"):
        return Path(url2pathname(urlsplit(url["url"]).path)).resolve() in path.parents
    beside = Path(str(package.locate_file(""))).resolve()
    if package.files is None:
        return beside in path.parents and bool(INSTALLED & set(path.parts))
    named = (file for file in package.files if file.name == path.name)
    return any(Path(str(package.locate_file(file))).resolve() == path for file in named)


def _in_repository(path: Path) -> bool:
    return REPOSITORY in path.parents and not INSTALLED & set(path.parts)
