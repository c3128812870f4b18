"""Tuned records: what a search found, kept for the next process; ``resolve`` picks a config by it.

The user's cache comes first, then ``known_best/<arch>.json`` in the package, then the ladder. A
record is served where its whole :class:`Key` is that of the asking process: the problem with its
bucket of rows, the device, the toolchain, the kernel text, the ladder that it was held against and
the timing protocol. So an old one is never served, and need not be deleted. The package's records
meet other machines: there any CuPy of the same major version will do, since it compiles nothing
itself. The compiler has to be the same one there too, for other code has other times.

A file of the cache holds one record and is renamed into place: writers of different records do not
meet at all, and of one record's the last wins. A file that does not read is set aside, with a
warning; one of another schema is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import stat
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rmsnorm_raw import environment, ladder, space
from rmsnorm_raw.backends import Backend, Toolchain
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.dtypes import SHORT_NAME
from rmsnorm_raw.errors import InvalidConfig, InvalidInput
from rmsnorm_raw.measure import TIMING_PROTOCOL
from rmsnorm_raw.problem import MAX_ROWS, Problem
from rmsnorm_raw.records import SCHEMA, Damaged, document, parse, sha256
from rmsnorm_raw.records import Key as Key
from rmsnorm_raw.records import Record as Record
from rmsnorm_raw.source import render, whole_text

R = TypeVar("R")

#: what stands in the way of writing; filelock raises the second where a file system has no locks
CANNOT_WRITE = (OSError, NotImplementedError)
KNOWN_BEST = Path(__file__).with_name("known_best")
LOCK_TIMEOUT_S = 10.0
#: keys that a process remembers; a model needs a few dozen
REMEMBERED = 4096


class StoreWarning(UserWarning):
    """A record could not be read, written or used; the message says which, and what to do."""


def bucket(rows: int, heads: int = 1) -> tuple[int, int]:
    """The first and the last number of rows that share a record with ``rows``: 2^k to 2^(k+1)-1.

    Args:
        heads: rows of a token; with several, it is the tokens that are 2^k to 2^(k+1)-1.
    """
    first = 1 << (rows // heads).bit_length() >> 1
    return heads * first, heads * min(max(first, 2 * first - 1), MAX_ROWS // heads)


def key(problem: Problem, backend: Backend) -> Key:
    """What this process, device and kernel text look up for a problem."""
    first, _ = bucket(problem.rows, problem.extras.heads)
    alike = replace(problem, rows=first, eps=0.0, alignment=problem.widest_vec)
    return key_of(alike, backend.device, backend.toolchain)


@functools.lru_cache(maxsize=REMEMBERED)
def key_of(problem: Problem, device: DeviceSpec, toolchain: Toolchain) -> Key:
    """As :func:`key`, of a problem at the lower end of its bucket, for any device and compiler."""
    choices, seen = [], [whole_text(problem.op)]
    for rows in bucket(problem.rows, problem.extras.heads):
        end = replace(problem, rows=rows)
        try:
            config = ladder.default_config(end, device)
        except InvalidConfig:  # the one who asks may have rows that something fits
            choices.append("")
        else:
            choices.append(config.slug)
            seen.append(render(end, config, device).digest)
    return Key(
        schema=SCHEMA, op=problem.op, cols=problem.cols, dtype=problem.dtype,
        weight_dtype=problem.weight_dtype, store_rstd=problem.store_rstd,
        has_rstd=problem.has_rstd, need_dx=problem.need_dx, need_dweight=problem.need_dweight,
        vec=problem.alignment, rows_from=problem.rows, device=device.name, arch=device.arch,
        compute_units=device.compute_units, compiler=toolchain.compiler, cupy=toolchain.cupy,
        kernels=sha256(seen), ladder=(choices[0], choices[1]), timing=TIMING_PROTOCOL,
        extras=problem.extras,
    )  # fmt: skip


# ---- choosing ------------------------------------------------------------------------------------


def choose(
    problem: Problem, backend: Backend, config: Config | str | None = None
) -> tuple[Config, str]:
    """The config that a caller's ``config`` stands for, and where it is from.

    Args:
        config: a Config or a slug ("given"), "ladder" for the ladder's ("ladder"), or None for
            :func:`resolve`.

    Raises:
        InvalidInput: it is none of these.
        InvalidConfig: the slug does not parse, or nothing fits the problem.
    """
    if config is None:
        return resolve(problem, backend)
    if isinstance(config, Config):
        return config, "given"
    if not isinstance(config, str):
        raise InvalidInput(
            f"config is {config!r}: give a slug such as 'b256-t256-v16-reg', a Config, 'ladder' or "
            "None"
        )
    if config == "ladder":
        return ladder.default_config(problem, backend.device), "ladder"
    return Config.parse(config), "given"


def resolve(problem: Problem, backend: Backend) -> tuple[Config, str]:
    """The best config known, and where it is from: "tuned", "known best" or "ladder".

    A record without a winner, or with one of the ladder's own choices, says that a search left the
    ladder in place; then the answer is the ladder's for these very rows. So it is, with a warning,
    where the space refuses a record's config for them.

    Raises:
        InvalidConfig: nothing fits the problem.
    """
    asked = key(problem, backend)
    record, origin = lookup(asked), "tuned"
    if record is None:
        record, origin = _known_best(asked.arch).get(_for_package(asked)), "known best"
    if record is not None and record.has_winner and record.config.slug not in asked.ladder:
        reason = space.reject_reason(problem, backend.device, record.config)
        if reason is None:
            return record.config, origin
        if asked not in _told:
            _told.add(asked)
            _warn(
                f"the {origin} config {record.config.slug} does not fit {problem} ({reason}): the "
                "ladder's is used, for this and whatever else of its bucket it does not fit"
            )
    return ladder.default_config(problem, backend.device), "ladder"


def until_saved(
    maxsize: int,
) -> Callable[[Callable[..., R]], functools._lru_cache_wrapper[R]]:
    """``functools.lru_cache`` for what follows from :func:`resolve`: emptied by a new record.

    So a call looks nothing up, and what is saved in this process takes effect at the next one.
    """

    def wrap(function: Callable[..., R]) -> functools._lru_cache_wrapper[R]:
        @functools.lru_cache(maxsize=maxsize)
        @functools.wraps(function)
        def cached(*args: Any, **kwargs: Any) -> R:
            while True:
                before = _saves
                found = function(*args, **kwargs)
                if before == _saves:  # else a thread saved meanwhile, and this may be outdated
                    return found

        _caches.append(cached)
        return cached

    return wrap


def forget() -> None:
    """Look records up anew, also what other processes have saved since they were last asked for."""
    _memory.clear()
    _told.clear()
    key_of.cache_clear()
    _known_best.cache_clear()
    _empty_caches()


def _empty_caches() -> None:
    global _saves
    _saves += 1
    for cache in _caches:
        cache.cache_clear()


_saves = 0
_caches: list[functools._lru_cache_wrapper[Any]] = []
_memory: dict[tuple[Path, Key], Record | None] = {}
_told: set[Key] = set()


# ---- the user's cache ----------------------------------------------------------------------------


def folder() -> Path:
    """Where the user's records lie; it need not exist yet."""
    return environment.cache_dir() / "tuned"


def lookup(key: Key) -> Record | None:
    """The record of a key in the user's cache; None where there is none that can be trusted.

    A process reads a file once; see :func:`forget`.
    """
    where = (folder(), key)
    if where not in _memory:
        # of two threads the first decides; and one that saves meanwhile is always right
        _memory.setdefault(where, _read(_path(key)).get(key))
    return _memory[where]


def save(key: Key, record: Record) -> Path | None:
    """Keep a record for this process, and in the user's cache for others.

    Returns:
        Its file; None, after a warning, where the cache cannot be written.
    """
    path, text = _path(key), document([(key, record)])
    _memory[folder(), key] = record
    _empty_caches()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock():
            environment.replace_text(path, text)
    except CANNOT_WRITE as error:
        _warn(
            f"{path} cannot be written ({error}), so the record of {record.config.slug} ends with "
            "this process: set RMSNORM_RAW_CACHE_DIR to a folder that you can write"
        )
        return None
    return path


def applying(backend: Backend) -> dict[Key, Record]:
    """The records of the user's cache that are served on this device, with these kernels."""
    return {key: record for key, record in _readable() if _applies(key, backend)}


def check(backend: Backend) -> environment.Check:
    """The line of ``rmsnorm-raw doctor`` on records."""
    found, device = _readable(), backend.device
    here = sum(_applies(key, backend) for key, _ in found)
    known = _known_best(device.arch)
    shipped = sum(_applies(key, backend, of_package=True) for key in known)
    return environment.Check(
        "tuned records",
        True if here or shipped else None,
        f"{folder()}: {here} of {len(found)} apply to {device.name} as it is here; known best: "
        f"{shipped} of {len(known)}",
    )


def export(keys_and_records: Iterable[tuple[Key, Record]], path: Path) -> None:
    """Write a ``known_best/<arch>.json``.

    Raises:
        InvalidInput: a record is not of the architecture that the file is named after.
        OSError: it cannot be written.
    """
    found = list(keys_and_records)
    if strangers := {key.arch for key, _ in found} - {path.stem}:
        raise InvalidInput(
            f"{path} would hold records of {', '.join(sorted(strangers))}: a file is of one "
            "architecture, <arch>.json"
        )
    environment.replace_text(path, document((_for_package(key), each) for key, each in found))


def _path(key: Key) -> Path:
    weight = SHORT_NAME.get(key.weight_dtype or "", "none")
    shape = f"{key.rows_from}x{key.cols}-{SHORT_NAME[key.dtype]}-{weight}"
    return folder() / key.arch / f"{key.op}-{shape}-{key.digest[:16]}.json"


def _lock() -> AbstractContextManager[object]:
    from filelock import FileLock  # which imports asyncio: 50 ms that only a writer pays

    return FileLock(folder() / ".lock", timeout=LOCK_TIMEOUT_S)


def _content(path: Path) -> bytes:
    """A file's bytes.

    Raises:
        OSError: it cannot be read, or is a pipe or the like, whose end may never come.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    return path.read_bytes()


def _read(path: Path) -> dict[Key, Record]:
    try:
        return parse(_content(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        _warn(f"{path} cannot be read ({error}): it is left alone")
    except Damaged:
        return _set_aside(path)
    return {}


def _set_aside(path: Path) -> dict[Key, Record]:
    """Rename a damaged file, unless another process has by now set it aside or written it anew."""
    try:
        with _lock():
            data = _content(path)
            try:
                return parse(data)
            except Damaged as damage:
                digest = hashlib.sha256(data).hexdigest()[:8]
                aside = path.replace(path.with_name(f"{path.name}.damaged-{digest}"))
                _warn(f"{path} is no record ({damage}): set aside as {aside.name}; search again")
    except FileNotFoundError:
        pass
    except CANNOT_WRITE as error:
        _warn(f"{path} is no record, and cannot be set aside ({error}): it is ignored; delete it")
    return {}


def _readable() -> list[tuple[Key, Record]]:
    """All records of the user's cache that read, of whatever device; nothing is set aside."""
    found: list[tuple[Key, Record]] = []
    try:
        paths = sorted(folder().glob("*/*.json"))
    except OSError as error:
        _warn(f"{folder()} cannot be read ({error}): its records are left alone")
        return found
    for path in paths:
        with contextlib.suppress(OSError, Damaged):
            found += parse(_content(path)).items()
    return found


def _applies(found: Key, backend: Backend, *, of_package: bool = False) -> bool:
    device = backend.device
    if (found.device, found.arch, found.compute_units) != (
        device.name, device.arch, device.compute_units,
    ):  # fmt: skip
        return False
    asked = key(found.problem, backend)
    return (_for_package(asked) if of_package else asked) == found


# ---- the package's records -----------------------------------------------------------------------


def _for_package(key: Key) -> Key:
    """The key as the package's records have it, with CuPy's major version alone."""
    return replace(key, cupy=key.cupy.partition(".")[0])


@functools.cache
def _known_best(arch: str) -> dict[Key, Record]:
    path = KNOWN_BEST / f"{arch}.json"
    try:
        return parse(_content(path))
    except FileNotFoundError:
        return {}
    except (OSError, Damaged) as error:
        _warn(f"{path} is not used ({error}): install the package again")
        return {}


def _warn(message: str) -> None:
    warnings.warn(message, StoreWarning, stacklevel=3)
