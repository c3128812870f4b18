"""The CuPy backend as far as it goes without CuPy: what a driver says, turned into a DeviceSpec."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rmsnorm_raw.backends import get_backend
from rmsnorm_raw.backends.cupy_backend import RawStream, why_unavailable
from rmsnorm_raw.backends.driver_facts import device_spec, kfd_cache_bytes
from rmsnorm_raw.device import KNOWN, MIB
from rmsnorm_raw.errors import BackendUnavailable

needs_no_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is not None, reason="CuPy is installed here"
)

# what CuPy 14 on ROCm 7 gives: the keys that HIP lacks are not there
GFX950 = {
    "name": b"AMD Instinct MI355X",
    "gcnArchName": b"gfx950:sramecc+:xnack-",
    "major": 9,
    "minor": 5,
    "warpSize": 64,
    "multiProcessorCount": 256,
    "sharedMemPerBlock": 160 * 1024,
    "regsPerBlock": 65536,
    "l2CacheSize": 4 * MIB,
}
H200 = {
    "name": b"NVIDIA H200",
    "major": 9,
    "minor": 0,
    "warpSize": 32,
    "multiProcessorCount": 132,
    "sharedMemPerBlock": 48 * 1024,
    "sharedMemPerBlockOptin": 227 * 1024,
    "regsPerBlock": 65536,
    "regsPerMultiprocessor": 65536,
    "l2CacheSize": 60 * MIB,
}


def kfd(folder: Path, nodes: list[tuple[int, list[tuple[int, int]]]]) -> Path:
    """A topology like the kernel's: (gfx_target_version, [(cache level, KiB), ...]) a node."""
    for number, (target, caches) in enumerate(nodes):
        node = folder / str(number)
        node.mkdir(parents=True)
        lines = f"cpu_cores_count 0\ngfx_target_version {target}\nname\nunique_id 0x1f\n"
        (node / "properties").write_text(lines)
        for index, (level, size_kib) in enumerate(caches):
            cache = node / "caches" / str(index)
            cache.mkdir(parents=True)
            text = f"processor_id_low 1\nlevel {level}\nsize {size_kib}\nsibling_map 1,1,0,\n"
            (cache / "properties").write_text(text)
    return folder


def test_a_gfx950_is_what_is_known_of_it(tmp_path: Path) -> None:
    spec = device_spec(GFX950, "rocm", kfd_nodes=tmp_path)
    known = KNOWN["gfx950"]
    for fact in ("name", "arch", "dialect", "wave", "compute_units", "lds_bytes", "register_file"):
        assert getattr(spec, fact) == getattr(known, fact), fact


def test_the_infinity_cache_is_the_floor_and_not_the_4_mib_l2(tmp_path: Path) -> None:
    spec = device_spec(GFX950, "rocm", kfd_nodes=tmp_path)
    assert spec.last_level_cache_bytes == 256 * MIB
    assert "Infinity Cache" in spec.last_level_cache_source


def test_a_larger_cache_in_the_topology_wins_over_the_floor(tmp_path: Path) -> None:
    nodes = kfd(tmp_path, [(0, [(3, 500 * 1024)]), (90500, [(1, 32), (2, 4096), (3, 384 * 1024)])])
    spec = device_spec(GFX950, "rocm", kfd_nodes=nodes)
    assert spec.last_level_cache_bytes == 384 * MIB
    assert "KFD" in spec.last_level_cache_source


def test_a_gpu_has_its_place_on_the_bus_where_the_driver_says_it() -> None:
    assert device_spec(H200, "cuda").pci_address == ""
    place = {"pciDomainID": 0, "pciBusID": 0xC1, "pciDeviceID": 0}
    assert device_spec(H200 | place, "cuda").pci_address == "0000:c1:00.0"


def test_a_gpu_without_an_infinity_cache_has_its_l2(tmp_path: Path) -> None:
    gfx90a = GFX950 | {"gcnArchName": b"gfx90a:sramecc+:xnack-", "l2CacheSize": 8 * MIB}
    spec = device_spec(gfx90a, "rocm", kfd_nodes=kfd(tmp_path, [(90010, [(2, 8192)])]))
    assert spec.arch == "gfx90a"
    assert spec.last_level_cache_bytes == 8 * MIB
    assert "l2CacheSize" in spec.last_level_cache_source


def test_the_topology_counts_this_architecture_alone(tmp_path: Path) -> None:
    nodes = kfd(tmp_path, [(0, [(3, 1024)]), (90402, [(3, 2048)]), (90010, [(2, 8192)])])
    assert kfd_cache_bytes("gfx942", nodes) == 2048 * 1024
    assert kfd_cache_bytes("gfx90a", nodes) == 0
    assert kfd_cache_bytes("gfx950", nodes) == 0
    assert kfd_cache_bytes("unknown", nodes) == 0
    assert kfd_cache_bytes("gfx942", tmp_path / "absent") == 0


def test_an_unreadable_node_is_passed_over(tmp_path: Path) -> None:
    nodes = kfd(tmp_path, [(90500, [(3, 2048)]), (90500, [(3, 4096)])])
    hidden = nodes / "1" / "properties"
    hidden.unlink()
    hidden.mkdir()  # reading it is an OSError for root too
    assert kfd_cache_bytes("gfx950", nodes) == 2048 * 1024


def test_an_h200_is_what_is_known_of_it() -> None:
    spec = device_spec(H200, "cuda")
    known = KNOWN["sm_90"]
    for fact in ("name", "arch", "dialect", "wave", "compute_units", "lds_bytes", "register_file"):
        assert getattr(spec, fact) == getattr(known, fact), fact
    assert spec.last_level_cache_bytes == 60 * MIB


def test_gfx942_is_never_taken_for_sm_90(tmp_path: Path) -> None:
    """It reports capability 9.x (pytorch PR#185644)."""
    mi300x = GFX950 | {"gcnArchName": b"gfx942:sramecc+:xnack-", "minor": 0}
    spec = device_spec(mi300x, "rocm", kfd_nodes=tmp_path)
    assert (spec.arch, spec.dialect) == ("gfx942", "amd")
    assert spec.last_level_cache_bytes == 256 * MIB


@pytest.mark.parametrize(
    ("properties", "backend"),
    [(GFX950 | {"warpSize": 32}, "rocm"), (H200 | {"warpSize": 64}, "cuda")],
)
def test_another_wave_width_is_refused(properties: dict[str, Any], backend: str) -> None:
    with pytest.raises(BackendUnavailable, match=r"waves of \d+ lanes"):
        device_spec(properties, backend)


@pytest.mark.parametrize("missing", sorted(GFX950.keys() - {"warpSize", "gcnArchName"}))
def test_each_hip_key_may_be_missing_on_a_known_architecture(missing: str, tmp_path: Path) -> None:
    properties = {key: value for key, value in GFX950.items() if key != missing}
    spec = device_spec(properties, "rocm", kfd_nodes=tmp_path)
    assert (spec.compute_units, spec.lds_bytes) == (256, 160 * 1024)
    assert spec.last_level_cache_bytes == 256 * MIB


def test_without_an_architecture_name_there_is_no_device(tmp_path: Path) -> None:
    properties = {key: value for key, value in GFX950.items() if key != "gcnArchName"}
    with pytest.raises(BackendUnavailable, match="gcnArchName"):
        device_spec(properties, "rocm", kfd_nodes=tmp_path)


def test_a_missing_fact_of_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    properties = {"gcnArchName": "gfx90a", "warpSize": 64, "sharedMemPerBlock": 65536}
    with pytest.raises(BackendUnavailable, match="multiProcessorCount"):
        device_spec(properties, "rocm", kfd_nodes=tmp_path)


@needs_no_cupy
@pytest.mark.parametrize("name", ["rocm", "cuda"])
def test_without_cupy_the_message_says_what_to_install(name: str) -> None:
    reason = why_unavailable(name)
    assert reason is not None
    assert f'pip install -e ".[{name}' in reason
    with pytest.raises(BackendUnavailable, match="CuPy is not installed"):
        get_backend(name)


@needs_no_cupy
@pytest.mark.parametrize(
    ("package", "raised", "rocm", "cuda"),
    [
        ("cupy-rocm-7-0", " from error", "(libamdhip64.so.7: no such file): install ROCm",
         "built for ROCm"),
        ("cupy-rocm-7-0", "", "(libamdhip64.so.7: no such file): install ROCm", "built for ROCm"),
        ("cupy-cuda13x", " from error", "built for CUDA", "install NVIDIA's driver"),
        ("cupy", " from None", "(it does not import): install ROCm", "install NVIDIA's driver"),
    ],
)  # fmt: skip
def test_a_cupy_that_does_not_import_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, raised: str, rocm: str, cuda: str
) -> None:
    """The chain ends with the library's name; a CuPy for other GPUs is told of no neighbour."""
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(
        "try:\n    raise OSError('libamdhip64.so.7: no such file')\nexcept OSError as error:\n"
        f"    raise ImportError('====\\nit does not import'){raised}\n"
    )
    information = tmp_path / f"{package.replace('-', '_')}-14.2.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Name: {package}\nVersion: 14.2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, said in (("rocm", rocm), ("cuda", cuda)):
        reason = str(why_unavailable(name))
        assert said in reason
        assert "pip install" not in reason


def test_a_raw_stream_is_a_stream_of_the_cuda_protocol() -> None:
    assert RawStream(7).__cuda_stream__() == (0, 7)
