"""Binary: a Source compiled on a backend, with what the toolchain says of it."""

from __future__ import annotations

from dataclasses import dataclass

from rmsnorm_raw.backends import Backend, Code, Resources
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
