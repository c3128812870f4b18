"""What ``rmsnorm-raw inspect`` says of a kernel: facts, and lists of its launches and code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from rmsnorm_raw import console, workbench
from rmsnorm_raw.backends import Resources
from rmsnorm_raw.backends.isa import Instruction
from rmsnorm_raw.backends.kernel_report import LaunchReport

Facts = dict[str, object]
Lists = dict[str, list[dict[str, object]]]
#: after the title of the waits
WAITS_MEAN = """, in the row loop once it has settled, or in all of a kernel without one:
vmcnt(N) waits until N of a wave's memory operations are in flight, of which the oldest end first"""


def facts(kernel: workbench.Kernel) -> tuple[Facts, Lists]:
    """The facts of a kernel, and its lists by title."""
    device = kernel.binary.backend.device
    space = workbench.enumerate_configs(kernel.problem, device)
    found: Facts = {
        "problem": str(kernel.problem),
        "device": f"{device.name} ({device.arch})",
        "config": kernel.config.slug,
        "chosen_by": kernel.origin,
        "kept_configs": len(space.kept),
        "rejected_configs": len(space.rejected),
        "logical_bytes": kernel.problem.logical_bytes(),
        "source_digest": kernel.source.digest,
    }
    lists: Lists = {
        "launches": [
            {
                "entry_point": it.entry_point,
                "grid": it.grid,
                "block": it.block,
                "lds_bytes": it.lds_bytes,
            }
            for it in kernel.launches
        ],
        "resources": [
            {"entry_point": name} | _counts(taken) for name, taken in kernel.resources.items()
        ],
    }
    if isinstance(kernel, workbench.OfflineKernel):
        faults = kernel.faults
        found["compiler"] = f"hiprtc of ROCm {kernel.release}"
        found["static_gate"] = f"{len(faults)} faults" if faults else "passed"
        lists |= {"faults": [{"fault": fault} for fault in faults]} if faults else {}
        lists |= _machine_code(kernel.resources)
    lists["defines"] = [{"name": name, "value": value} for name, value in kernel.source.defines]
    return found, lists


def print_facts(facts: Facts, lists: Lists) -> None:
    """Tables of both on stdout."""
    console.print_table(("", ""), facts.items())
    for title, entries in lists.items():
        print(f"\n{title}{WAITS_MEAN if title == 'waits' else ''}")
        if title in ("resources", "instructions"):  # many facts of few kernels
            names = dict.fromkeys(name for entry in entries for name in entry)
            rows_of_facts = ([name, *(entry.get(name) for entry in entries)] for name in names)
            console.print_table(("", *("" for _ in entries)), rows_of_facts)
        else:
            console.print_table(
                entries[0].keys() if entries else (), (it.values() for it in entries)
            )


def _counts(taken: Resources) -> dict[str, object]:
    """What :func:`_machine_code` does not give in lists of their own."""
    return {name: fact for name, fact in asdict(taken).items() if name not in ("mix", "waits")}


def _machine_code(resources: Mapping[str, LaunchReport]) -> dict[str, list[dict[str, object]]]:
    return {
        "in_flight": [
            {"entry_point": name, "in_flight": each.in_flight} for name, each in resources.items()
        ],
        "waits": [
            {
                "entry_point": name,
                "at": hex(wait.instruction.offset),
                "vmcnt": wait.instruction.vmcnt,
                "waits_for": _operations(wait.ends),
                "leaves_in_flight": _operations(wait.leaves),
            }
            for name, report in resources.items()
            for wait in report.waits
        ],
        "instructions": [{"entry_point": name, **each.mix} for name, each in resources.items()],
    }


def _operations(operations: Iterable[Instruction]) -> str:
    kinds = Counter(operation.group for operation in operations)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"
