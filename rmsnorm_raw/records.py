"""Records: what a search found, for which key, and how both are written down.

A document is JSON, sorted, with a checksum of each record: a file that was cut or changed in any
way does not pass for a record, and one of another schema is told from a damaged one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn

from rmsnorm_raw.config import Config
from rmsnorm_raw.extras import NO_EXTRAS, Extras
from rmsnorm_raw.problem import Op, Problem

#: of documents and keys; raise it with any change of their fields or of what these mean
SCHEMA = 1
#: regime -> "tuned" and "ladder" -> microseconds
Times = Mapping[str, Mapping[str, tuple[float, ...]]]


@dataclass(frozen=True, slots=True)
class Key:
    """What a record was measured for and with. Two equal keys may share a record.

    Attributes:
        schema: :data:`SCHEMA`.
        op, cols, dtype, weight_dtype, store_rstd, has_rstd, need_dx, need_dweight: the problem's.
        vec: ``Problem.widest_vec``, which is all that alignment decides.
        rows_from: the bucket of rows: from here to less than twice as many.
        device, arch, compute_units: the device's; ``device`` is its name.
        compiler, cupy: see :class:`rmsnorm_raw.backends.Toolchain`.
        kernels: digest of all the text of the operation, and of what it is rendered to.
        ladder: the slugs of the ladder's choices at both ends of the bucket; "" where nothing fits.
        timing: :data:`rmsnorm_raw.measure.TIMING_PROTOCOL`.
        extras: the problem's; written down only where there are any, and then what differs from
            none.
    """

    schema: int
    op: Op
    cols: int
    dtype: str
    weight_dtype: str | None
    store_rstd: bool
    has_rstd: bool
    need_dx: bool
    need_dweight: bool
    vec: int
    rows_from: int
    device: str
    arch: str
    compute_units: int
    compiler: str
    cupy: str
    kernels: str
    ladder: tuple[str, str]
    timing: int
    extras: Extras = NO_EXTRAS

    @property
    def problem(self) -> Problem:
        """The problem at the lower end of the bucket."""
        return Problem(
            self.op, self.rows_from, self.cols, self.dtype, self.weight_dtype,
            store_rstd=self.store_rstd, has_rstd=self.has_rstd, need_dx=self.need_dx,
            need_dweight=self.need_dweight, alignment=self.vec, extras=self.extras,
        )  # fmt: skip

    @property
    def digest(self) -> str:
        """SHA-256 of all fields, as hex."""
        return sha256(_key_fields(self))


@dataclass(frozen=True, slots=True)
class Record:
    """What a search found for a key.

    Attributes:
        config: the winner; the ladder's where no other was faster beyond doubt.
        reason: why, in a sentence.
        samples: the times; where the ladder stayed, there are no tuned ones.
        counts: candidates, and failures by kind.
        environment: digest of the run's environment.json.
        effort: of the search.
    """

    config: Config
    reason: str
    samples: Times
    counts: Mapping[str, int]
    environment: str
    effort: str

    @property
    def has_winner(self) -> bool:
        """Whether something was timed that took the ladder's place."""
        return any("tuned" in sides for sides in self.samples.values())


class Damaged(Exception):
    """A file that is not what was written."""


def document(keys_and_records: Iterable[tuple[Key, Record]]) -> str:
    """The text of a document: a line a field, times on one line.

    Raises:
        ValueError: a time is not finite.
    """
    entries = []
    for key, record in keys_and_records:
        entry = {"key": _key_fields(key), "record": _fields(record)}
        entries.append(entry | {"sha256": sha256(entry)})
    entries.sort(key=lambda entry: json.dumps(entry, sort_keys=True))
    whole = {"schema": SCHEMA, "records": entries}
    text = json.dumps(whole, indent=1, sort_keys=True, allow_nan=False)
    return re.sub(r"\[\n([^][{}\"]*)\n\s*\]", _on_one_line, text) + "\n"


def _key_fields(key: Key) -> dict[str, Any]:
    """As JSON has them; keys of the plain operation are those from before there were extras."""
    found = asdict(key)
    none = asdict(NO_EXTRAS)
    extras = {name: each for name, each in found.pop("extras").items() if each != none[name]}
    return found | ({"extras": extras} if extras else {})


def _fields(record: Record) -> dict[str, object]:
    samples = {
        regime: {name: [float(time) for time in times] for name, times in sides.items()}
        for regime, sides in record.samples.items()
    }
    return {
        "config": record.config.slug, "reason": record.reason, "samples": samples,
        "counts": dict(record.counts), "environment": record.environment, "effort": record.effort,
    }  # fmt: skip


def _on_one_line(numbers: re.Match[str]) -> str:
    return f"[{' '.join(numbers[1].split())}]"


def parse(data: bytes) -> dict[Key, Record]:
    """The records of a document; none where it is of another schema.

    Raises:
        Damaged: it does not read, or is not what :func:`document` wrote.
    """
    try:
        whole = json.loads(data, parse_constant=_refuse)
        if whole["schema"] != SCHEMA:
            return {}
        return dict(map(_entry, whole["records"]))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _entry(entry: dict[str, Any]) -> tuple[Key, Record]:
    content = {"key": entry["key"], "record": entry["record"]}
    if entry["sha256"] != sha256(content):
        raise ValueError("the checksum is of another content")
    key, found = dict(entry["key"]), dict(entry["record"])
    extras = Extras(**key.pop("extras", {}))
    if key.keys() != {field.name for field in fields(Key)} - {"extras"}:
        raise ValueError("the key has other fields")
    first, last = key.pop("ladder")
    known = Key(**key, ladder=(first, last), extras=extras)
    known.problem  # noqa: B018 - raises InvalidInput, a ValueError, where there is no such problem
    samples = {
        regime: {name: tuple(times) for name, times in sides.items()}
        for regime, sides in found.pop("samples").items()
    }
    config = Config.parse(found.pop("config"))
    return known, Record(config=config, samples=samples, **found)


def sha256(content: object) -> str:
    """Digest of JSON content, as hex."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
