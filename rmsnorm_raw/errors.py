"""Exceptions. Each message says what was wrong and what to do next."""

from __future__ import annotations

from typing import Any


def install(extra: str) -> str:
    """The command that installs an extra, for messages: the package is on no index."""
    return f'pip install -e ".[{extra}]" in the clone'


class RmsnormRawError(Exception):
    """Base class of everything this package raises on purpose."""


class InvalidInput(RmsnormRawError, ValueError):
    """An argument that no kernel can serve: wrong shape, dtype, device, eps, overlap."""


class InvalidConfig(RmsnormRawError, ValueError):
    """A slug that does not parse, or a config that does not fit the problem.

    Attributes:
        slug: the offending slug, as written.
        reason: why it was refused.
    """

    def __init__(self, slug: str, reason: str) -> None:
        super().__init__(f"config {slug!r}: {reason}")
        self.slug = slug
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by what it was made of, and not by its message."""
        return type(self), (self.slug, self.reason), vars(self)


class BackendUnavailable(RmsnormRawError, RuntimeError):
    """A backend was asked for that this machine cannot run; the message names what to install."""


class CompileError(RmsnormRawError, RuntimeError):
    """The device compiler refused a source.

    Attributes:
        slug: the config's slug ("" for sources that have none, such as the probes).
        log: the compiler's own words, unshortened.
        next_step: what to do about it.
    """

    def __init__(self, slug: str, log: str, next_step: str) -> None:
        head = f"config {slug!r} does not compile" if slug else "the source does not compile"
        super().__init__(f"{head}\n{log.rstrip()}\n{next_step}")
        self.slug = slug
        self.log = log
        self.next_step = next_step

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by what it was made of, and not by its message."""
        return type(self), (self.slug, self.log, self.next_step), vars(self)


class LaunchError(RmsnormRawError, RuntimeError):
    """A kernel could not be launched, or failed on the device."""


class SimulatorError(LaunchError):
    """The CPU simulator caught a fault (divergence, bad copy, broken guard) and names its line."""


class WrongResult(RmsnormRawError, RuntimeError):
    """A kernel failed the correctness gate; it gets no time."""


class Unmeasurable(RmsnormRawError, RuntimeError):
    """There is no honest time to be had: the message says why and what can be measured instead."""
