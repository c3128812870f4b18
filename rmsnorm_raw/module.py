"""Binary: a Source compiled on a backend, with what the toolchain says of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from time import monotonic

from rmsnorm_raw.backends import Backend, Code, Resources
from rmsnorm_raw.errors import CompileError
from rmsnorm_raw.source import Source


@dataclass(frozen=True, slots=True, repr=False)
class Binary:
    """A compiled Source.

    Attributes:
        source: what was compiled.
        backend: where it lives.
        code: its functions, by entry point.
    """

    source: Source
    backend: Backend
    code: Code

    @property
    def resources(self) -> dict[str, Resources]:
        """Registers, LDS and spills of each entry point."""
        return self.code.resources

    @property
    def object_digest(self) -> str:
        """Digest of the machine code: equal digests are the same kernel, to be timed once."""
        return self.code.object_digest

    def __repr__(self) -> str:
        name = f"{self.source.name} {self.source.slug}"
        return f"<Binary {name} on {self.backend.name}, code {self.object_digest[:8]}>"


def build(source: Source, backend: Backend) -> Binary:
    """Compile a source on a backend (or take it from the backend's cache).

    Raises:
        CompileError: with the slug, the compiler's log and the next step.
    """
    return Binary(source, backend, backend.compile(source))


def build_all(
    sources: Iterable[Source],
    backend: Backend,
    *,
    until: float = math.inf,
    begun: Callable[[Source], None] = lambda source: None,
    ended: Callable[[Source, Binary | CompileError], None] = lambda source, found: None,
) -> dict[str, Binary | CompileError]:
    """Compile each distinct source once, as many at a time as there are cores.

    Args:
        until: a time of :func:`time.monotonic`; a source whose turn comes later is left out.
        begun: called as a source begins, on the thread that compiles it.
        ended: called as one ends, in no order, on the caller's thread.

    Returns:
        By the digest of a source: its binary, or why there is none.
    """

    def one(source: Source) -> Binary | CompileError | None:
        if monotonic() > until:
            return None
        begun(source)
        try:
            return build(source, backend)
        except CompileError as error:
            return error

    distinct = {source.digest: source for source in sources}
    found: dict[str, Binary | CompileError] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        building: dict[Future[Binary | CompileError | None], Source] = {
            pool.submit(one, source): source for source in distinct.values()
        }
        try:
            for future in as_completed(building):
                if (made := future.result()) is not None:
                    found[building[future].digest] = made
                    ended(building[future], made)
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt does not wait for what has not begun
    return found
