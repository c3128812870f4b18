from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_gpu import VirtualGpu

from rmsnorm_raw import ladder, records, source, space, store
from rmsnorm_raw.backends import Toolchain
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import KNOWN
from rmsnorm_raw.errors import InvalidConfig, InvalidInput
from rmsnorm_raw.extras import NO_EXTRAS
from rmsnorm_raw.kernels import forward, pace
from rmsnorm_raw.problem import MAX_ROWS, Problem
from rmsnorm_raw.records import Key, Record, document
from rmsnorm_raw.store import StoreWarning, key, lookup, resolve, save
from rmsnorm_raw.study.cells import cells

FORWARD = Problem.forward(1000, 4096, "bf16", weight_dtype="fp32")
BACKWARD = Problem.backward(1000, 4096, "bf16")
FASTER = Config.parse("b128-t128-v16-reg")


def gpu(device: str = "sm_90", compiler: str = "NVRTC 13.0", cupy: str = "14.1.0") -> VirtualGpu:
    backend = VirtualGpu(KNOWN[device])
    backend.toolchain = Toolchain(compiler, cupy)
    return backend


def record(config: Config = FASTER, effort: str = "quick") -> Record:
    times = {"tuned": (10.5, 10.25), "ladder": (11.0, 11.125)}
    return Record(config, "FASTER 1.05x", {"cold": times}, {"candidates": 9}, "ab" * 32, effort)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty cache, and a package without records."""
    monkeypatch.setenv("RMSNORM_RAW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "KNOWN_BEST", tmp_path / "known_best")
    store.forget()
    yield tmp_path / "cache"
    store.forget()


def ladders(problem: Problem, backend: VirtualGpu) -> tuple[Config, str]:
    return ladder.default_config(problem, backend.device), "ladder"


# ---- keys --------------------------------------------------------------------------------------


@given(st.integers(1, MAX_ROWS))
def test_a_bucket_is_from_a_power_of_two_to_the_next(rows: int) -> None:
    first, last = store.bucket(rows)
    assert first & (first - 1) == 0
    assert first <= rows <= last < 2 * first
    assert store.bucket(first) == store.bucket(last) == (first, last)


@pytest.mark.parametrize(
    ("rows", "edges"),
    [(0, (0, 0)), (1, (1, 1)), (2, (2, 3)), (3, (2, 3)), (4, (4, 7)), (32768, (32768, 65535)),
     (MAX_ROWS, (MAX_ROWS, MAX_ROWS))],
)  # fmt: skip
def test_the_edges_of_buckets(rows: int, edges: tuple[int, int]) -> None:
    assert store.bucket(rows) == edges


@pytest.mark.parametrize("make", [Problem.forward, Problem.backward])
def test_a_key_is_that_of_its_bucket_and_of_no_other(make: Any) -> None:
    keys = {rows: key(make(rows, 8192, "bf16"), gpu()) for rows in (0, 1, 511, 512, 1023, 1024)}
    assert keys[512] == keys[1023]
    assert len(set(keys.values())) == 5
    assert keys[512].rows_from == 512


def test_a_key_of_more_rows_than_any_launch_has() -> None:
    assert key(Problem.backward(MAX_ROWS, 8, "bf16"), gpu()).rows_from == MAX_ROWS


def test_where_nothing_fits_an_end_of_the_bucket_the_key_has_no_choice_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = ladder.default_config

    def few_rows_only(problem: Problem, device: Any) -> Config:
        if problem.rows > 1000:
            raise InvalidConfig("b64", "does not fit")
        return choice(problem, device)

    monkeypatch.setattr(ladder, "default_config", few_rows_only)
    fewest = choice(replace(FORWARD, rows=512), KNOWN["sm_90"])
    assert key(FORWARD, gpu()).ladder == (fewest.slug, "")
    assert resolve(FORWARD, gpu()) == (choice(FORWARD, KNOWN["sm_90"]), "ladder")


def test_a_key_names_the_problem_that_it_is_for() -> None:
    problem = Problem.backward(512, 4098, "fp16", weight_dtype="fp32", has_rstd=False)
    assert key(problem, gpu()).problem == replace(problem, alignment=4)
    assert key(key(problem, gpu()).problem, gpu()) == key(problem, gpu())


def test_what_decides_no_kernel_is_not_in_the_key() -> None:
    assert key(replace(FORWARD, eps=0.1), gpu()) == key(FORWARD, gpu())
    odd = Problem.forward(8, 769, "bf16")  # the arrays of such rows are aligned to 2 bytes
    assert key(replace(odd, alignment=2), gpu()) == key(odd, gpu())


@pytest.mark.parametrize(
    "other",
    [
        Problem.forward(1000, 4100, "bf16", weight_dtype="fp32"),
        Problem.forward(1000, 4096, "fp16", weight_dtype="fp32"),
        Problem.forward(1000, 4096, "bf16"),
        Problem.forward(1000, 4096, "bf16", weight_dtype=None),
        Problem.forward(1000, 4096, "bf16", weight_dtype="fp32", store_rstd=False),
        Problem.forward(1000, 4096, "bf16", weight_dtype="fp32", alignment=8),
        Problem.backward(1000, 4096, "bf16", weight_dtype="fp32"),
    ],
)
def test_another_problem_has_another_record(other: Problem) -> None:
    save(key(FORWARD, gpu()), record())
    assert lookup(key(other, gpu())) is None


@pytest.mark.parametrize("flag", ["has_rstd", "need_dx", "need_dweight"])
def test_another_backward_has_another_record(flag: str) -> None:
    save(key(BACKWARD, gpu()), record())
    assert lookup(key(replace(BACKWARD, **{flag: False}), gpu())) is None


WITH_EXTRAS = [
    Problem.forward(1000, 4096, "bf16", weight_dtype="fp32", bias_dtype="fp32"),
    Problem.forward(1000, 4096, "bf16", weight_dtype="fp32", residual_dtype="bf16"),
    Problem.forward(1000, 4096, "bf16", weight_dtype="fp32", residual_dtype="fp32"),
    Problem.forward(
        1000, 4096, "bf16", weight_dtype="fp32", residual_dtype="bf16", residual_out_dtype="fp32"
    ),
    Problem.forward(1000, 4096, "bf16", weight_dtype="fp32", out_dtype="fp32"),
    Problem.forward(1000, 4096, "bf16", weight_dtype="fp32", weight_offset=1.0),
    Problem.forward(1000, 4096, "bf16", weight_dtype="fp32", casting="llama"),
    Problem.forward(1000, 4096, "bf16", weight_dtype="fp32", heads=2),
    Problem.forward(1000, 4096, "bf16", weight_dtype="fp32", heads=2, per_head=True),
    Problem.forward(
        1000, 4096, "bf16", weight_dtype="fp32", out_dtype="float8_e4m3fn", scale="dynamic"
    ),
    Problem.forward(
        1000, 4096, "bf16", weight_dtype="fp32", out_dtype="float8_e4m3fn", scale="static"
    ),
]


def keyed(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> Key:
    """The key, whatever the kernels of such a problem are."""
    choice = ladder.default_config(replace(problem, extras=NO_EXTRAS), KNOWN["sm_90"])
    monkeypatch.setattr(ladder, "default_config", lambda *_: choice)
    monkeypatch.setattr(store, "render", lambda *_: SimpleNamespace(digest="one text"))
    store.forget()
    return key(problem, gpu())


def test_a_record_is_served_to_no_problem_with_other_extras(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even where kernels and configs were the same to the letter."""
    keys = [keyed(problem, monkeypatch) for problem in (FORWARD, *WITH_EXTRAS)]
    for owner in keys:
        save(owner, record())
        assert [lookup(other) is not None for other in keys] == [other == owner for other in keys]
        path = store._path(owner)
        store.forget()
        path.unlink()
    for each, problem in zip(keys[1:], WITH_EXTRAS, strict=True):
        assert each.problem.extras == problem.extras
        assert key(each.problem, gpu()) == each


def test_a_bucket_of_several_heads_is_one_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.bucket(3 * 1000, heads=3) == (3 * 512, 3 * 1023)
    assert store.bucket(0, heads=3) == (0, 0)
    first, last = store.bucket(MAX_ROWS // 3 * 3, heads=3)
    assert first <= last <= MAX_ROWS
    assert first % 3 == last % 3 == 0
    problem = Problem.forward(3 * 1000, 128, "bf16", heads=3, per_head=True)
    found = keyed(problem, monkeypatch)
    assert found.rows_from == 3 * 512
    assert found.problem == replace(problem, rows=3 * 512)
    assert keyed(replace(problem, rows=3 * 600), monkeypatch) == found
    assert keyed(replace(problem, rows=3 * 1024), monkeypatch) != found


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("device", ["gfx950", "sm_90"])
def test_every_rendered_line_is_in_the_digest(device: str, op: str) -> None:
    make = Problem.forward if op == "forward" else Problem.backward
    for cols in (256, 4096, 262144):
        problem, known = make(4096, cols, "bf16"), KNOWN[device]
        whole = set(source.whole_text(problem.op).splitlines())
        for config in space.enumerate_configs(problem, known).kept:
            assert set(source.render(problem, config, known).text.splitlines()) <= whole


# ---- what retires a record ---------------------------------------------------------------------


def other_device(**facts: Any) -> VirtualGpu:
    backend = gpu()
    backend.device = replace(backend.device, **facts)
    return backend


@pytest.mark.parametrize(
    "there",
    [
        other_device(name="NVIDIA H200 NVL"),
        other_device(compute_units=114),
        other_device(arch="sm_100"),
        gpu(compiler="NVRTC 13.1"),
        gpu(cupy="14.1.1"),
    ],
    ids=["name", "compute units", "arch", "compiler", "cupy"],
)
def test_another_device_or_toolchain_is_not_served(there: VirtualGpu) -> None:
    save(key(FORWARD, gpu()), record())
    assert lookup(key(FORWARD, there)) is None
    assert resolve(FORWARD, there) == ladders(FORWARD, there)
    assert resolve(FORWARD, gpu()) == (FASTER, "tuned")


def edited_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "TEXT", forward.TEXT + "// a comment\n")


def edited_text_of_another_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "TEXT", pace.TEXT + "// a comment\n")


def other_defines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_KIND", source._KIND | {"bfloat16": "BF16_BUT_OTHERWISE"})


def other_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "TIMING_PROTOCOL", store.TIMING_PROTOCOL + 1)


def other_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SCHEMA", store.SCHEMA + 1)


def other_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "default_config", lambda *on: Config.parse("b64"))


@pytest.mark.parametrize(
    "change",
    [edited_text, edited_text_of_another_path, other_defines, other_timer, other_schema,
     other_ladder],
)  # fmt: skip
def test_a_change_of_the_package_retires_a_record(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(key(FORWARD, gpu()), record())
    assert path is not None
    old = path.read_bytes()
    with monkeypatch.context() as changed:
        change(changed)
        store.forget()
        assert lookup(key(FORWARD, gpu())) is None
        assert resolve(FORWARD, gpu())[1] == "ladder"
    assert path.read_bytes() == old
    store.forget()
    assert resolve(FORWARD, gpu()) == (FASTER, "tuned")


# ---- resolving ---------------------------------------------------------------------------------


def ship(backend: VirtualGpu, problem: Problem, config: Config) -> None:
    path = store.KNOWN_BEST / f"{backend.device.arch}.json"
    store.export([(key(problem, backend), record(config))], path)
    store.forget()


def test_the_users_cache_comes_before_the_package_and_the_package_before_the_ladder() -> None:
    shipped = Config.parse("b256-t256-v16-reg-ls")
    assert resolve(FORWARD, gpu()) == ladders(FORWARD, gpu())
    ship(gpu(), FORWARD, shipped)
    assert resolve(FORWARD, gpu()) == (shipped, "known best")
    save(key(FORWARD, gpu()), record())
    assert resolve(FORWARD, gpu()) == (FASTER, "tuned")
    store.forget()  # and so it is for a process that begins now
    assert resolve(FORWARD, gpu()) == (FASTER, "tuned")


def test_a_search_that_kept_the_ladder_is_remembered_and_beats_the_package() -> None:
    ship(gpu(), FORWARD, FASTER)
    kept = record(ladder.default_config(FORWARD, KNOWN["sm_90"]))
    save(key(FORWARD, gpu()), kept)
    assert lookup(key(FORWARD, gpu())) == kept
    assert resolve(FORWARD, gpu()) == ladders(FORWARD, gpu())


def test_where_the_ladder_was_kept_each_number_of_rows_has_its_own() -> None:
    few, many = (Problem.backward(rows, 4096, "bf16") for rows in (128, 255))
    assert key(few, gpu()) == key(many, gpu())
    assert ladders(few, gpu()) != ladders(many, gpu())
    save(key(few, gpu()), record(ladders(few, gpu())[0]))
    assert resolve(few, gpu()) == ladders(few, gpu())
    assert resolve(many, gpu()) == ladders(many, gpu())


def test_a_ladder_that_was_kept_in_the_middle_of_a_bucket_is_not_served_at_its_ends() -> None:
    middle, last = (Problem.backward(rows, 1024, "bf16") for rows in (700, 1023))
    config, _ = ladders(middle, gpu())
    assert config.slug not in key(middle, gpu()).ladder  # else nothing is tested
    kept = record(config)
    save(key(middle, gpu()), replace(kept, samples={"cold": {"ladder": (11.0,)}}))
    assert resolve(middle, gpu()) == (config, "ladder")
    assert resolve(last, gpu()) == ladders(last, gpu())


@pytest.mark.parametrize(
    ("there", "served"),
    [
        (gpu(cupy="14.2.0"), True),
        (gpu(cupy="15.0.0"), False),
        (gpu(compiler="NVRTC 13.1"), False),
        (other_device(name="NVIDIA H200 NVL"), False),
        (other_device(compute_units=114), False),
    ],
    ids=["minor cupy", "major cupy", "compiler", "name", "compute units"],
)
def test_the_packages_records_are_for_what_makes_the_same_code(
    there: VirtualGpu, served: bool
) -> None:
    ship(gpu(), FORWARD, FASTER)
    assert (resolve(FORWARD, there) == (FASTER, "known best")) is served
    assert served or resolve(FORWARD, there) == ladders(FORWARD, there)


def test_a_damaged_file_of_the_package_is_named_and_left() -> None:
    path = store.KNOWN_BEST / "sm_90.json"
    ship(gpu(), FORWARD, FASTER)
    path.write_bytes(path.read_bytes().replace(b"b128", b"b256"))
    with pytest.warns(StoreWarning, match=r"sm_90\.json.*checksum.*install the package again"):
        assert resolve(FORWARD, gpu()) == ladders(FORWARD, gpu())
    assert path.exists()


def test_an_export_is_of_one_architecture(tmp_path: Path) -> None:
    both = [(key(FORWARD, gpu(device)), record()) for device in ("sm_90", "gfx950")]
    with pytest.raises(InvalidInput, match="would hold records of gfx950"):
        store.export(both, tmp_path / "sm_90.json")
    assert not (tmp_path / "sm_90.json").exists()


def test_a_config_that_does_not_fit_the_rows_gives_way_to_the_ladder_and_says_so_once() -> None:
    config = Config.parse("b96-t768-v16")  # 2**32 threads are 5,592,405 rows
    fits, too_many, even_more = (
        Problem.forward(rows, 8192, "bf16") for rows in (5_592_405, 5_592_406, 8_000_000)
    )
    save(key(fits, gpu()), record(config))
    assert resolve(fits, gpu()) == (config, "tuned")
    with pytest.warns(StoreWarning, match=r"tuned config b96-t768-v16-reg does not fit .*2\*\*32"):
        assert resolve(too_many, gpu()) == ladders(too_many, gpu())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(even_more, gpu()) == ladders(even_more, gpu())
        assert resolve(fits, gpu()) == (config, "tuned")


def test_what_a_caller_may_say() -> None:
    save(key(FORWARD, gpu()), record())
    assert store.choose(FORWARD, gpu()) == (FASTER, "tuned")
    assert store.choose(FORWARD, gpu(), "ladder") == ladders(FORWARD, gpu())
    given = Config.parse("b64")
    assert store.choose(FORWARD, gpu(), "b64") == store.choose(FORWARD, gpu(), given)
    assert store.choose(FORWARD, gpu(), given) == (given, "given")
    with pytest.raises(InvalidConfig, match="names no knob"):
        store.choose(FORWARD, gpu(), "the ladder")


def test_what_follows_from_a_record_is_kept_until_one_is_saved() -> None:
    computed: list[int] = []

    @store.until_saved(maxsize=8)
    def config_of(rows: int) -> Config:
        computed.append(rows)
        return resolve(replace(FORWARD, rows=rows), gpu())[0]

    default = ladders(FORWARD, gpu())[0]
    assert config_of(1000) == config_of(1000) == default
    save(key(FORWARD, gpu()), record())
    assert config_of(1000) == config_of(1000) == FASTER
    store.forget()
    assert config_of(1000) == FASTER
    assert computed == [1000] * 3


def test_what_was_computed_while_a_record_was_saved_is_computed_again() -> None:
    computed: list[str] = []

    @store.until_saved(maxsize=8)
    def config_of(rows: int) -> Config:
        config, origin = resolve(replace(FORWARD, rows=rows), gpu())
        computed.append(origin)
        if len(computed) == 1:
            save(key(FORWARD, gpu()), record())  # as another thread may, while this one compiles
        return config

    assert config_of(1000) == FASTER
    assert computed == ["ladder", "tuned"]


# ---- the cache's files -------------------------------------------------------------------------


def test_a_record_is_there_for_the_next_process(cache: Path) -> None:
    path = save(key(FORWARD, gpu()), record())
    assert path is not None
    assert path.parent == cache / "tuned" / "sm_90"
    assert path.name.startswith("forward-512x4096-bf16-fp32-")
    store.forget()
    assert lookup(key(FORWARD, gpu())) == record()
    assert store.applying(gpu()) == {key(FORWARD, gpu()): record()}
    assert store.applying(gpu(cupy="13.0.0")) == {}


def test_a_later_record_takes_the_place_of_an_earlier_one() -> None:
    for effort in ("quick", "full"):
        save(key(FORWARD, gpu()), record(effort=effort))
    store.forget()
    assert lookup(key(FORWARD, gpu())) == record(effort="full")


def test_what_another_process_saves_is_seen_after_forget(cache: Path) -> None:
    asked = key(FORWARD, gpu())
    assert lookup(asked) is None
    path = save(asked, record())
    assert path is not None
    text = path.read_text()
    path.unlink()
    store.forget()
    assert lookup(asked) is None
    path.write_text(text)
    assert lookup(asked) is None
    store.forget()
    assert lookup(asked) == record()


def written(data: bytes) -> Path:
    """A file in the place of FORWARD's record."""
    path = save(key(FORWARD, gpu()), record())
    assert path is not None
    for other in path.parent.iterdir():
        other.unlink()
    path.write_bytes(data)
    store.forget()
    return path


TEXT = document([(key(FORWARD, gpu()), record())]).encode()


def found_or_set_aside(data: bytes) -> None:
    """Whatever a file has in it: the very record, or the ladder and the file put aside."""
    path = written(data)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config, origin = resolve(FORWARD, gpu())
    if origin == "tuned":
        assert config == FASTER
        assert not said
        return
    assert config == ladder.default_config(FORWARD, KNOWN["sm_90"])
    (warning,) = said
    assert str(path) in str(warning.message)
    assert not path.exists()
    (aside,) = path.parent.glob("*.damaged-*")
    assert aside.name in str(warning.message)
    assert aside.read_bytes() == data
    assert save(key(FORWARD, gpu()), record()) == path
    store.forget()
    assert resolve(FORWARD, gpu()) == (FASTER, "tuned")


@given(st.integers(0, len(TEXT) - 1))
def test_a_file_cut_at_any_byte(length: int) -> None:
    found_or_set_aside(TEXT[:length])


@given(st.binary())
def test_a_file_of_junk(junk: bytes) -> None:
    found_or_set_aside(junk)


@given(st.integers(0, len(TEXT) - 1), st.integers(1, 255))
def test_a_file_with_one_byte_changed(at: int, change: int) -> None:
    data = bytearray(TEXT)
    data[at] ^= change
    if b'"schema": 1\n' in data[-20:]:  # else it is of another schema, and left alone
        found_or_set_aside(bytes(data))


@given(st.integers().filter(lambda schema: schema != 1) | st.text())
def test_a_file_of_another_schema_is_left_alone(schema: object) -> None:
    data = json.dumps({"records": ["of another kind"], "schema": schema}).encode()
    path = written(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(FORWARD, gpu()) == ladders(FORWARD, gpu())
    assert path.read_bytes() == data


def test_a_record_under_anothers_name_is_not_served() -> None:
    path = written(document([(key(BACKWARD, gpu()), record())]).encode())
    assert resolve(FORWARD, gpu()) == ladders(FORWARD, gpu())
    assert path.exists()


def test_a_damaged_file_that_another_process_mended_meanwhile_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = written(TEXT[:100])
    lock = store._lock

    def mended_before() -> Any:
        path.write_bytes(TEXT)
        return lock()

    monkeypatch.setattr(store, "_lock", mended_before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(FORWARD, gpu()) == (FASTER, "tuned")


def test_a_folder_in_a_files_place_is_named() -> None:
    path = written(b"")
    path.unlink()
    path.mkdir()
    with pytest.warns(StoreWarning, match="cannot be read"):
        assert resolve(FORWARD, gpu()) == ladders(FORWARD, gpu())
    with pytest.warns(StoreWarning, match="cannot be written"):
        assert save(key(FORWARD, gpu()), record()) is None


def test_a_pipe_in_a_files_place_is_not_waited_for() -> None:
    path = written(b"")
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(StoreWarning, match="cannot be read.*no regular file"):
        assert resolve(FORWARD, gpu()) == ladders(FORWARD, gpu())
    assert store.applying(gpu()) == {}
    assert "0 of 0 apply" in store.check(gpu()).found


def test_a_record_of_a_problem_that_there_is_not_is_no_record(cache: Path) -> None:
    save(key(FORWARD, gpu()), record())
    unknown = replace(key(FORWARD, gpu()), dtype="float8_e4m3")
    text = document([(unknown, record())])  # with the checksum that belongs to it
    with pytest.raises(records.Damaged, match="float8_e4m3"):
        records.parse(text.encode())
    (cache / "tuned" / "sm_90" / "unknown.json").write_text(text)
    assert store.applying(gpu()).keys() == {key(FORWARD, gpu())}
    assert "1 of 1 apply" in store.check(gpu()).found


def test_a_folder_that_cannot_be_listed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path, pattern: str) -> Any:
        raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(Path, "glob", failing)
    with pytest.warns(StoreWarning, match=r"cannot be read \(.*planted"):
        assert store.applying(gpu()) == {}
    with pytest.warns(StoreWarning):
        assert "0 of 0 apply" in store.check(gpu()).found


# ---- a cache that cannot be written ------------------------------------------------------------


def not_saved_but_known() -> None:
    with pytest.warns(StoreWarning, match=r"cannot be written.*RMSNORM_RAW_CACHE_DIR"):
        assert save(key(BACKWARD, gpu()), record()) is None
    assert lookup(key(BACKWARD, gpu())) == record()  # for as long as this process lives
    store.forget()
    assert lookup(key(BACKWARD, gpu())) is None


def test_a_cache_whose_place_is_taken_by_a_file(cache: Path) -> None:
    cache.write_text("not a folder")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(FORWARD, gpu()) == ladders(FORWARD, gpu())
    not_saved_but_known()


@pytest.fixture
def read_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with FORWARD's record on a file system that takes no writes; for root too."""
    path = written(TEXT)
    opened = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith(str(cache)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    return path


def test_a_read_only_cache_is_read(read_only: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(FORWARD, gpu()) == (FASTER, "tuned")
    not_saved_but_known()
    assert resolve(FORWARD, gpu()) == (FASTER, "tuned")


def test_a_damaged_file_in_a_read_only_cache_is_ignored_with_a_warning(read_only: Path) -> None:
    read_only.write_bytes(TEXT[:-20])
    with pytest.warns(StoreWarning, match=r"cannot be set aside.*delete it"):
        assert resolve(FORWARD, gpu()) == ladders(FORWARD, gpu())
    assert read_only.read_bytes() == TEXT[:-20]


def test_a_cache_without_the_right_to_write(cache: Path) -> None:
    folders = [written(TEXT).parent, cache / "tuned"]
    (cache / "tuned" / ".lock").unlink(missing_ok=True)
    for folder in folders:
        folder.chmod(0o500)
    try:
        if os.access(folders[0], os.W_OK):
            pytest.skip("root may write where the mode says that nobody may")
        assert resolve(FORWARD, gpu()) == (FASTER, "tuned")
        not_saved_but_known()
    finally:
        for folder in folders:
            folder.chmod(0o700)


# ---- many processes ----------------------------------------------------------------------------

WRITER = """
import sys, time
from pathlib import Path
from test_store import BACKWARD, FASTER, gpu, key, record, replace, save, store
number, go = int(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
while not go.exists():
    time.sleep(0.001)
for turn in range(20):
    own = replace(key(BACKWARD, gpu()), cols=1 + 20 * number + turn)
    assert save(own, record(effort=f"{number}"))
    assert save(key(BACKWARD, gpu()), record(effort=f"{number} {turn}"))
    store.forget()
    assert store.lookup(own) == record(effort=f"{number}")
    assert store.lookup(key(BACKWARD, gpu())).config == FASTER
"""


def test_eight_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    go = tmp_path / "go"
    paths = os.pathsep.join(filter(None, sys.path))
    writers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WRITER, str(number), str(go)],
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths},
        )
        for number in range(8)
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    go.touch()
    assert [writer.wait(timeout=120) for writer in writers] == [0] * 8
    shared = key(BACKWARD, gpu())
    own = {replace(shared, cols=1 + n): record(effort=f"{n // 20}") for n in range(160)}
    records = dict(store._readable())
    last = records.pop(shared)
    assert records == own
    assert last.effort in {f"{number} 19" for number in range(8)}
    assert not list(tmp_path.rglob("*.damaged-*"))
    assert len(list(tmp_path.rglob("*.json"))) == 161


# ---- doctor ------------------------------------------------------------------------------------


def test_doctor_counts_the_records_that_apply(cache: Path) -> None:
    assert store.check(gpu()).ok is None
    for problem, backend in ((FORWARD, gpu()), (BACKWARD, gpu()), (FORWARD, gpu("gfx950"))):
        save(key(problem, backend), record())
    old: Key = replace(key(FORWARD, gpu()), kernels="0" * 64)
    save(old, record())
    (cache / "tuned" / "sm_90" / "junk.json").write_text("junk")
    ship(gpu(), BACKWARD, FASTER)
    line = store.check(gpu())
    assert line.ok
    assert line.found == (
        f"{cache / 'tuned'}: 2 of 4 apply to NVIDIA H200 as it is here; known best: 1 of 1"
    )
    assert (cache / "tuned" / "sm_90" / "junk.json").exists()
    assert "0 of 4 apply" in store.check(gpu(cupy="14.2.0")).found
    assert "known best: 1 of 1" in store.check(gpu(cupy="14.2.0")).found
    assert "known best: 0 of 1" in store.check(gpu(cupy="15.0.0")).found


# ---- what is shipped -----------------------------------------------------------------------------


def test_the_packages_records_are_the_studys_cells_and_fit_them() -> None:
    data = (Path(store.__file__).parent / "known_best" / "sm_90.json").read_bytes()
    shipped = records.parse(data)
    device = KNOWN["sm_90"]
    named = {(key.op, key.rows_from, key.cols, key.dtype, key.weight_dtype) for key in shipped}
    assert named == {
        (p.op, store.bucket(p.rows)[0], p.cols, p.dtype, p.weight_dtype) for p in cells()
    }
    for its, record in shipped.items():
        assert (its.arch, its.compute_units) == ("sm_90", device.compute_units)
        make = Problem.forward if its.op == "forward" else Problem.backward
        problem = make(its.rows_from, its.cols, its.dtype, weight_dtype=its.weight_dtype)
        assert space.reject_reason(problem, device, record.config) is None
        assert {"cold"} <= record.samples.keys() or record.config.slug in its.ladder
