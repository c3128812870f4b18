"""Two-way covering arrays: few configs in which every pair of knob values of a space occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import fields

from rmsnorm_raw.config import Config


def pairs(config: Config) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """All pairs of (knob, value) of a config."""
    values = [(f.name, getattr(config, f.name)) for f in fields(config)]
    return set(itertools.combinations(values, 2))


def covering_array(configs: Sequence[Config], seed: int = 0) -> list[Config]:
    """A subset of ``configs`` with every pair of knob values that occurs in them (greedy)."""
    open_pairs = set().union(*(pairs(config) for config in configs)) if configs else set()
    rest = list(configs)
    random.Random(seed).shuffle(rest)
    chosen = []
    while open_pairs:
        best = max(rest, key=lambda config: len(open_pairs & pairs(config)))
        open_pairs -= pairs(best)
        rest.remove(best)
        chosen.append(best)
    return chosen
