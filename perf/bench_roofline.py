"""The three probes, each as its best variant, on the suites' own clock."""

from __future__ import annotations

from typing import Any

import rmsnorm_raw
from rmsnorm_raw import bandwidth

CONTESTS = {"roofline": bandwidth.PROBES}
ON_DEVICE = True


def test_probe(contest: str, benchmark: Any, session: Any) -> None:
    roofline = session.opening or bandwidth.roofline(session.backend)
    reading = roofline.reading(contest)
    call = bandwidth.call_of(reading, session.backend, stream=session.stream)
    samples = session.time(benchmark, [call])
    benchmark.extra_info["version"] = rmsnorm_raw.__version__
    session.note(
        benchmark, contest, "rmsnorm_raw.bandwidth", reading.variant.slug,
        moved_bytes=reading.moved_bytes, samples=samples,
    )  # fmt: skip
