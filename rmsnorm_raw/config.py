"""Config: the knobs of a kernel and their slug.

Which values fit a problem is decided in :mod:`rmsnorm_raw.space`, and the default is picked in
:mod:`rmsnorm_raw.ladder`.
"""

from __future__ import annotations

import difflib
import numbers
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rmsnorm_raw.errors import InvalidConfig

Path = Literal["registers", "pingpong", "lds", "two_pass"]
Policy = Literal["default", "keep", "stream"]
Finish = Literal["kernel", "early", "last_block"]

PATH_SLUG = {"registers": "reg", "pingpong": "pp", "two_pass": "2p"}
POLICY_SLUG = {"keep": "k", "stream": "s"}
FINISH_SLUG = {"kernel": "fk", "early": "fe", "last_block": "fl"}


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    """One point of the kernel space. Omitted knobs have the fixed defaults below, never a guess.

    Attributes:
        block: threads of a block (``b``).
        threads_per_row: lanes that share a row (``t``). Up to ``block``, a block has block / it
            rows. Above, a row has it / block blocks, 2, 4 or 8: forward's ``reg`` alone.
        vec: bytes of x that a lane moves at once (``v``).
        path: how a row travels. ``reg``: read once, kept in registers. ``pp``: the next row is
            loaded into a second register set while this one is reduced. ``lds<stages>[b][r][p]``:
            asynchronous copies into an LDS ring, by lanes or (``b``) in bulk; after the reduction
            the row comes from registers or (``r``) from the ring again; backward's programs that
            get ahead of the others wait for them (``p``, in bulk alone). ``2p``: rows too wide to
            keep are read twice.
        stages: depth of the LDS ring; 0 on other paths.
        bulk: the ring is filled by bulk row copies (sm_90).
        reread: the row is read from the ring again after the reduction.
        paced: a program ahead of the others asks for its next row later, so that all end together.
        load_policy: of the rows, ``-lk`` keep or ``-ls`` stream.
        store_policy: of the rows, ``-sk`` keep or ``-ss`` stream.
        waves_per_eu: ``-w``, AMD's second launch bound; 0 for none.
        min_blocks: ``-m``, CUDA's second launch bound; 0 for none. 1 is no bound, but NVRTC then
            spends registers on loads in flight.
        programs: ``-p``, blocks per compute unit of a persistent grid; 0 for one block a row group.
        finish: of dW, ``-fk`` a second kernel, ``-fe`` the same, started while the first one ends
            (sm_90), or ``-fl`` the last block.

    Raises:
        InvalidConfig: a knob has a value that no config has.
    """

    block: int = 256
    threads_per_row: int = 0  # 0 stands for block and is replaced by it
    vec: int = 16
    path: Path = "registers"
    stages: int = 0
    bulk: bool = False
    reread: bool = False
    paced: bool = False
    load_policy: Policy = "default"
    store_policy: Policy = "default"
    waves_per_eu: int = 0
    min_blocks: int = 0
    programs: int = 0
    finish: Finish = "kernel"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise InvalidConfig(f"{name}={value!r}", f"is not one of {', '.join(choices)}")
        for name in (*_NUMBERS.values(), "stages"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
                raise InvalidConfig(f"{name}={value!r}", "is not a whole number of 0 or more")
            object.__setattr__(self, name, int(value))
        for name in ("bulk", "reread", "paced"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidConfig(f"{name}={value!r}", "is not True or False")
        if not self.threads_per_row:
            object.__setattr__(self, "threads_per_row", self.block)

    @property
    def rows_per_block(self) -> int:
        """Rows that a block works on at a time."""
        return max(1, self.block // max(1, self.threads_per_row))

    @property
    def blocks_per_row(self) -> int:
        """Blocks that share a row; 1 unless ``threads_per_row`` is more than ``block``."""
        return max(1, self.threads_per_row // max(1, self.block))

    @property
    def slug(self) -> str:
        """The config's one name: test ids, CSV, caches, errors and the REPL all use it."""
        ring = f"lds{self.stages}{'b' * self.bulk}{'r' * self.reread}{'p' * self.paced}"
        path = PATH_SLUG.get(self.path, ring)
        parts = [f"b{self.block}", f"t{self.threads_per_row}", f"v{self.vec}", path]
        if self.load_policy != "default":
            parts.append(f"l{POLICY_SLUG[self.load_policy]}")
        if self.store_policy != "default":
            parts.append(f"s{POLICY_SLUG[self.store_policy]}")
        for letter, value in (
            ("w", self.waves_per_eu),
            ("m", self.min_blocks),
            ("p", self.programs),
        ):
            if value:
                parts.append(f"{letter}{value}")
        if self.finish != "kernel":
            parts.append(FINISH_SLUG[self.finish])
        return "-".join(parts)

    def __repr__(self) -> str:
        return f"Config.parse({self.slug!r})"

    def __str__(self) -> str:
        return self.slug

    @classmethod
    def parse(cls, slug: str) -> Config:
        """The config that a slug names; knobs may come in any order, omitted ones keep defaults.

        Raises:
            InvalidConfig: a part that names no knob (with what may have been meant), or one twice.
        """
        if not slug.strip():
            raise InvalidConfig(slug, f"is empty; {_READS_LIKE}")
        parts = slug.strip().split("-")
        knobs = [_knob(part) for part in parts]
        fields: dict[str, object] = {}
        for part, knob in zip(parts, knobs, strict=True):
            if knob is None:
                raise InvalidConfig(slug, f"{part!r} names no knob; {_suggestion(slug)}")
            for field in knob.keys() & fields.keys():
                raise InvalidConfig(slug, f"{part!r} sets {field} a second time: give a knob once")
            fields.update(knob)
        return cls(**fields)  # type: ignore[arg-type]


_NUMBERS = {
    "b": "block", "t": "threads_per_row", "v": "vec", "w": "waves_per_eu", "m": "min_blocks",
    "p": "programs",
}  # fmt: skip
_CHOICES = {
    "path": get_args(Path), "load_policy": get_args(Policy), "store_policy": get_args(Policy),
    "finish": get_args(Finish),
}  # fmt: skip
_PATHS = {short: long for long, short in PATH_SLUG.items()}
_POLICIES = {short: long for long, short in POLICY_SLUG.items()}
_FINISHES = {short: long for long, short in FINISH_SLUG.items()}
_EXAMPLES = (
    *(f"b{n}" for n in (64, 128, 256, 512, 1024)),
    *(f"t{n}" for n in (8, 32, 64, 128, 256, 512, 2048)),
    "v2", "v4", "v8", "v16", *_PATHS, *(f"lds{n}" for n in range(2, 9)), "lds3b", "lds3r", "lds3br",
    "lds3bp", "lk", "ls", "sk", "ss", "w1", "w2", "w4", "m1", "m2", "m4", "p1", "p2", "p4",
    *FINISH_SLUG.values(),
)  # fmt: skip


def _knob(part: str) -> dict[str, object] | None:
    """The fields that a part of a slug sets; None where it names no knob."""
    if part in _PATHS:
        return {"path": _PATHS[part]}
    if part in _FINISHES:
        return {"finish": _FINISHES[part]}
    if ring := re.fullmatch(r"lds([0-9])(b?)(r?)(p?)", part):
        return {
            "path": "lds", "stages": int(ring[1]), "bulk": bool(ring[2]),
            "reread": bool(ring[3]), "paced": bool(ring[4]),
        }  # fmt: skip
    if policy := re.fullmatch(r"([ls])([ks])", part):
        field = "load_policy" if policy[1] == "l" else "store_policy"
        return {field: _POLICIES[policy[2]]}
    if (number := re.fullmatch(r"([btvwmp])([0-9]{1,5})", part)) and int(number[2]) > 0:
        return {_NUMBERS[number[1]]: int(number[2])}
    return None


#: likeness, 0 to 1, from which a part may have been meant; below it nothing is suggested
NEAR = 0.6
_READS_LIKE = "a slug reads like 'b256-t256-v16-reg'"


def _suggestion(slug: str) -> str:
    """What may have been meant by a slug that does not parse, in whatever case and separators."""
    plain = re.sub(r"[\s_,]+", "-", slug.strip().lower())
    if difflib.get_close_matches(plain, ["ladder"], cutoff=0.7):
        return "config='ladder' is the ladder's choice"
    near = _nearest([PATH_SLUG.get(part, part) for part in plain.split("-")])
    return f"the nearest valid slug is {near!r}" if near else _READS_LIKE


def _nearest(parts: Sequence[str]) -> str:
    """The slug with each part that is no knob replaced by the most similar one not given yet.

    "" where a part is like none.
    """
    knobs = [_knob(part) for part in parts]
    given = {field for knob in knobs if knob for field in knob}
    near: list[str] = []
    for part, knob in zip(parts, knobs, strict=True):
        if knob is None:
            similar = difflib.get_close_matches(part, _EXAMPLES, n=len(_EXAMPLES), cutoff=NEAR)
            free = [name for name in similar if not given & (_knob(name) or {}).keys()]
            if not free:
                return ""
            part = free[0]
            given |= (_knob(part) or {}).keys()
        if part not in near:
            near.append(part)
    return "-".join(near)
