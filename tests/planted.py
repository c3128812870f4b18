"""Kernel texts of any architecture for the simulator, whole and with faults planted in them."""

from __future__ import annotations

import dataclasses

from rmsnorm_raw.device import KNOWN, SIMULATED, DeviceSpec
from rmsnorm_raw.source import Source


def simulated(arch: str) -> DeviceSpec:
    """The simulator's device with the branch of the text that an architecture compiles."""
    return dataclasses.replace(SIMULATED[KNOWN[arch].wave], arch=arch)


def replaced(source: Source, *pieces: tuple[str, str]) -> Source:
    """A source with each first piece of its text replaced by the second."""
    text = source.text
    for old, new in pieces:
        assert old in text, "the text has changed: plant this fault anew"
        text = text.replace(old, new)
    return dataclasses.replace(source, text=text)
