"""Rooflines in environment.json: written, read again, and how far their probes moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rmsnorm_raw.bandwidth import BUFFERS_MOVED, PROBES, Reading, Roofline, Variant
from rmsnorm_raw.measure import Samples


def roofline_facts(roofline: Roofline) -> dict[str, object]:
    """A roofline for a JSON file: by probe, its speed, its time and how it was run."""
    return {
        reading.probe: {
            "gbps": reading.gbps,
            "median_us": reading.samples.median_us,
            "moved_bytes": reading.moved_bytes,
            "variant": reading.variant.slug,
            "knobs": asdict(reading.variant),
            "stopped": reading.samples.stopped,
        }
        for reading in roofline.readings
    }


def read_roofline(device: str, facts: Mapping[str, Any]) -> Roofline:
    """What :func:`roofline_facts` wrote, but for the single samples: medians are what it takes."""
    readings = tuple(
        Reading(
            probe, Variant(**facts[probe]["knobs"]), facts[probe]["moved_bytes"],
            Samples((facts[probe]["median_us"],), "cold", facts[probe]["stopped"], 1),
        )
        for probe in PROBES
    )  # fmt: skip
    buffer_bytes = readings[0].moved_bytes // BUFFERS_MOVED[readings[0].probe]
    return Roofline(device, buffer_bytes, readings)


def closing_facts(
    opening: Roofline, closing: Roofline, resumed: Iterable[Roofline] = ()
) -> dict[str, object]:
    """The probes at the end of a run for its JSON file, and how far they moved at any time."""
    return {
        "roofline_closing": roofline_facts(closing),
        "drift_pct": opening.drift_pct(*resumed, closing),
        "suspect": opening.is_suspect(*resumed, closing),
    }
