"""Which providers are chosen, and what is said of modules that are not the packages' own."""

from __future__ import annotations

import dataclasses
import importlib
import json
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


@pytest.mark.parametrize("given", ["", ",", " , "])
def test_an_option_that_names_nobody_is_refused(given: str) -> None:
    with pytest.raises(InvalidInput, match=r"names no provider: there are ours, quack,.* leave"):
        choose(["torch", given], HERE)


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
    (root / "quack").mkdir(parents=True)
    (root / "quack" / "__init__.py").touch()
    (root / "quack" / "rmsnorm.py").write_text(text)


def register(root: Path, record: str | None = "quack/rmsnorm.py", url: str | None = None) -> None:
    """What an installer leaves beside a package: its facts, its files, where it came from."""
    facts = root / "quack_kernels-0.6.5.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: quack-kernels\nVersion: 0.6.5\n")
    if record is not None:
        (facts / "RECORD").write_text(f"quack/__init__.py,,\n{record},sha256=abc,12\n")
    if url is not None:
        come = {"url": url, "dir_info": {"editable": True}}
        (facts / "direct_url.json").write_text(json.dumps(come))


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
    register(packages)
    assert find(EVERYONE["quack"]).path == packages / "quack" / "rmsnorm.py"


def test_an_installed_package_may_lie_in_any_folder_and_be_reached_by_a_link(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``pip install --target`` leaves it, and installers that link out of their cache."""
    plant(planted / "cache", RIGHT)
    (planted / "target").mkdir()
    (planted / "target" / "quack").symlink_to(planted / "cache" / "quack")
    register(planted / "target")
    (planted / "link").symlink_to(planted / "target")
    monkeypatch.syspath_prepend(planted / "link")
    found = find(EVERYONE["quack"])
    assert (found.version, found.path) == ("0.6.5", planted / "cache" / "quack" / "rmsnorm.py")


def test_a_checkout_that_was_installed_is_its_package(planted: Path) -> None:
    plant(planted / "my checkout", RIGHT)
    register(planted, "__editable__.quack.pth", (planted / "my checkout").as_uri())
    sys.path.insert(0, str(planted / "my checkout"))
    try:
        assert find(EVERYONE["quack"]).version == "0.6.5"
    finally:
        sys.path.remove(str(planted / "my checkout"))


def test_a_package_without_a_list_of_its_files_lies_beside_it(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian's do."""
    packages = planted / "python3" / "dist-packages"
    plant(packages, RIGHT)
    register(packages, record=None)
    monkeypatch.syspath_prepend(packages)
    assert find(EVERYONE["quack"]).version == "0.6.5"


@pytest.mark.parametrize("record", [None, "quack/other.py", "elsewhere/quack/rmsnorm.py"])
def test_a_stray_folder_is_wrong_with_a_packages_facts_beside_it(
    record: str | None, planted: Path
) -> None:
    plant(planted, RIGHT)
    register(planted, record)
    with pytest.raises(WrongModule, match=r"none of the files of quack-kernels 0\.6\.5, which is "):
        find(EVERYONE["quack"])


@pytest.mark.parametrize("editable", [False, True])
def test_a_stray_folder_is_wrong_where_the_package_is_installed_elsewhere(
    editable: bool, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(planted / "site-packages")
    register(planted / "site-packages", url="file:///src/quack" if editable else None)
    monkeypatch.syspath_prepend(planted / "stray")
    plant(planted / "stray", RIGHT)
    said = f"quack.rmsnorm is {planted}/stray/quack/rmsnorm.py, and that is none of the files"
    with pytest.raises(WrongModule, match=f"{said} .*installed in {planted}/site-packages: take"):
        find(EVERYONE["quack"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
        ("def (", "SyntaxError: invalid syntax"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_a_module_that_does_not_load_is_one_message(text: str, said: str, planted: Path) -> None:
    plant(planted, text)
    with pytest.raises(WrongModule, match=rf"does not load \({said}.*\), and quack is {planted}"):
        find(EVERYONE["quack"])


def test_a_module_without_what_is_called_is_wrong(planted: Path) -> None:
    plant(planted, "def rmsnorm_fwd(): ...")
    with pytest.raises(WrongModule, match=r"quack/rmsnorm.py has no rmsnorm_bwd: take that off"):
        find(EVERYONE["quack"])


def test_a_module_of_no_installed_package_is_wrong(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(package: str) -> None:
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
