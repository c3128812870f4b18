"""Explanation: the space of a problem in words, to be read in a REPL."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from rmsnorm_raw import space
from rmsnorm_raw.config import Config
from rmsnorm_raw.device import DeviceSpec
from rmsnorm_raw.problem import Problem


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """What :func:`.workbench.explain` returns; print it, or let the REPL do so.

    Attributes:
        problem: what was asked about.
        device: for which device.
        space: every config, kept or refused with its reason.
        choice: the ladder's config.
        used: the config of a call that names none.
        origin: where that is from: "tuned", "known best" or "ladder".
    """

    problem: Problem
    device: DeviceSpec
    space: space.Space
    choice: Config
    used: Config
    origin: str

    @property
    def reasons(self) -> tuple[tuple[int, str, Config], ...]:
        """(count, reason, config) of each kind of refusal, the commonest first.

        Reasons that differ in their numbers alone are of one kind; the first stands for all.
        """
        kinds: dict[str, list[tuple[Config, str]]] = {}
        for config, reason in self.space.rejected:
            kinds.setdefault(re.sub(r"\d+", "#", reason), []).append((config, reason))
        refused = sorted(kinds.values(), key=len, reverse=True)
        return tuple((len(alike), alike[0][1], alike[0][0]) for alike in refused)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = self.space.kept
        yield f"{self.problem} on {self.device.name} ({self.device.arch})"
        yield f"{len(kept)} kept, -> the ladder's choice, {len(self.space.rejected)} rejected"
        if self.used != self.choice:
            yield f"in use: {self.used.slug} ({self.origin})"
        slugs = [("-> " if config == self.choice else "   ") + config.slug for config in kept]
        if self.choice not in kept:
            slugs.insert(0, f"-> {self.choice.slug}, outside the search")
        yield Columns(slugs, column_first=True)
        table = Table("count", "rejected because (one of its kind)", "config", box=None)
        for count, reason, config in self.reasons:
            table.add_row(str(count), reason, config.slug)
        yield table

    def __repr__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=120).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
