"""Which providers are chosen, and what is said of modules that are not the packages' own."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.study import origin
from rmsnorm_raw.study.origin import WrongModule, choose, find
from rmsnorm_raw.study.providers import Provider, providers

EVERYONE = {provider.name: provider for provider in providers()}
HERE = [dataclasses.replace(provider, module="json") for provider in EVERYONE.values()]


def names(chosen: list[Provider]) -> list[str]:
    return [provider.name for provider in chosen]


def test_ours_is_always_there_and_peers_come_in_one_order() -> None:
    assert names(choose([], HERE)) == ["ours"]
    assert names(choose(["torch, liger", "quack"], HERE)) == ["ours", "quack", "liger", "torch"]
    assert names(choose(["ours"], HERE)) == ["ours"]


def test_a_stranger_and_a_missing_peer_are_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="no provider is called flash: there are ours, quack,"):
        choose(["torch,flash"], HERE)
    gone = [dataclasses.replace(EVERYONE["liger"], module="no_such_package.ops"), *HERE[:1]]
    with pytest.raises(InvalidInput, match="liger is not installed: pip install liger-kernel"):
        choose(["liger"], gone)


def test_everything_that_is_called_is_looked_for() -> None:
    assert origin.CALLED.keys() == EVERYONE.keys()


def test_ours_is_this_package() -> None:
    found = find(EVERYONE["ours"])
    assert found.path == Path(origin.rmsnorm_raw.__file__).resolve().with_name("workbench.py")
    assert found.facts["path"].startswith(".../")
    assert found.facts["path"].endswith("/rmsnorm_raw/workbench.py")


def test_an_installed_peer_is_found_with_its_version() -> None:
    torch = pytest.importorskip("torch")
    found = find(EVERYONE["torch"])
    assert found.version == torch.__version__
    assert str(found).split() == ["torch", "torch.nn.functional", found.version, str(found.path)]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, in the place of what is installed; what it gave is forgotten again."""
    for name in quack_modules():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    for name in quack_modules():
        del sys.modules[name]


def quack_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "quack"]


def plant(root: Path, text: str) -> None:
    (root / "quack").mkdir()
    (root / "quack" / "__init__.py").touch()
    (root / "quack" / "rmsnorm.py").write_text(text)


RIGHT = "def rmsnorm_fwd(): ...\ndef rmsnorm_bwd(): ...\n"


def test_a_module_in_the_repository_is_wrong(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "REPOSITORY", planted)
    plant(planted, RIGHT)
    with pytest.raises(WrongModule, match=f"quack.rmsnorm is {planted}/quack/rmsnorm.py, in this"):
        find(EVERYONE["quack"])


@pytest.mark.parametrize("repository", [".", ".venv/lib/site-packages"])
def test_a_virtual_environment_may_lie_in_the_repository_and_we_in_it(
    repository: str, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "REPOSITORY", planted / repository)
    packages = planted / ".venv" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    monkeypatch.syspath_prepend(packages)
    plant(packages, RIGHT)
    monkeypatch.setattr(origin.metadata, "version", lambda package: "0.6.5")
    assert find(EVERYONE["quack"]).path == packages / "quack" / "rmsnorm.py"


def test_a_module_without_what_is_called_is_wrong(planted: Path) -> None:
    plant(planted, "def rmsnorm_fwd(): ...")
    with pytest.raises(WrongModule, match=r"quack/rmsnorm.py has no rmsnorm_bwd: take that off"):
        find(EVERYONE["quack"])


def test_a_module_of_no_installed_package_is_wrong(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(package: str) -> str:
        raise origin.metadata.PackageNotFoundError(package)

    plant(planted, RIGHT)
    monkeypatch.setattr(origin.metadata, "version", absent)
    with pytest.raises(WrongModule, match="no package quack-kernels is installed"):
        find(EVERYONE["quack"])


def test_a_file_or_an_empty_folder_of_that_name_is_wrong(planted: Path) -> None:
    (planted / "quack.py").touch()
    with pytest.raises(WrongModule, match=f"does not load .*, and quack is {planted}/quack.py"):
        find(EVERYONE["quack"])
    (planted / "quack.py").unlink()
    del sys.modules["quack"]
    (planted / "quack" / "rmsnorm").mkdir(parents=True)
    importlib.invalidate_caches()
    with pytest.raises(WrongModule, match="is a folder without code"):
        find(EVERYONE["quack"])
