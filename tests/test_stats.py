"""Intervals cover what they claim, and verdicts follow from intervals alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsnorm_raw.errors import InvalidInput
from rmsnorm_raw.stats import Outcome, compare, compare_intervals, median_interval, percentile

TRIALS = 2000


def draw(rng: np.random.Generator, shape: str, size: tuple[int, ...]) -> np.ndarray:
    """Times with a true median of 100 us, in the shapes that GPU times come in."""
    noise = rng.normal(size=size)
    if shape == "skewed":
        return 100 + rng.exponential(1.0, size) - np.log(2)
    times = 100 * np.exp(0.01 * noise)
    if shape == "outliers":  # one in twenty, and the median stays: as many fall either way
        return np.where(rng.random(size) < 0.05, times * np.where(noise > 0, 1.5, 0.8), times)
    if shape == "stepped":  # a CUDA event counts in 0.5 us
        return np.round(times * 2) / 2
    return times


def test_percentiles_are_linear_between_samples() -> None:
    times = [float(t) for t in range(11)]
    assert percentile(times, 50) == 5.0
    assert percentile(times, 10) == 1.0
    assert percentile([1.0, 2.0], 90) == pytest.approx(1.9)


@pytest.mark.parametrize(
    ("n", "k"),
    # ranks from printed tables of the distribution-free interval
    [(6, 1), (8, 1), (9, 2), (12, 3), (17, 5), (20, 6), (100, 40)],
)
def test_median_interval_takes_the_tabulated_ranks(n: int, k: int) -> None:
    times = [float(t) for t in range(1, n + 1)]
    assert median_interval(times[::-1]) == (k, n + 1 - k)


@pytest.mark.parametrize("n", [6, 12, 36])
@pytest.mark.parametrize("shape", ["normal", "skewed", "outliers"])
def test_median_interval_covers_the_median(n: int, shape: str) -> None:
    samples = draw(np.random.default_rng(n), shape, (TRIALS, n))
    intervals = [median_interval(row) for row in samples.tolist()]
    covered = np.mean([low <= 100 <= high for low, high in intervals])
    # 2000 trials at 95 % have a standard deviation of 0.5 %
    assert covered >= 0.935


def test_five_samples_have_no_interval() -> None:
    with pytest.raises(InvalidInput, match="at least 6"):
        median_interval([1.0] * 5)


@pytest.mark.parametrize("n", [6, 12, 36])
@pytest.mark.parametrize("shape", ["normal", "skewed", "outliers", "stepped"])
def test_ratio_interval_covers_the_ratio_and_is_not_needlessly_wide(n: int, shape: str) -> None:
    rng = np.random.default_rng(n)
    baseline, candidate = draw(rng, shape, (2, TRIALS, n))
    found = [compare(a, b) for a, b in zip(baseline, candidate, strict=True)]
    covered = np.mean([c.low <= 1 <= c.high for c in found])
    assert covered >= 0.93
    # two median intervals divided by each other cover over 99.9 %: too wide to decide anything
    assert covered < 0.995


@pytest.mark.parametrize(
    ("speedup", "wanted"),
    [(1.05, Outcome.FASTER), (1 / 1.05, Outcome.SLOWER), (1.0, Outcome.SAME)],
)
def test_clear_cases_are_told(speedup: float, wanted: Outcome) -> None:
    rng = np.random.default_rng(7)
    verdicts = []
    for _ in range(300):
        baseline = draw(rng, "outliers", (40,))
        candidate = draw(rng, "outliers", (40,)) / speedup
        verdicts.append(compare(baseline, candidate, noise_pct=2.0).verdict)
    assert verdicts.count(wanted) >= 0.95 * len(verdicts)


def test_equal_kernels_are_seldom_called_different() -> None:
    rng = np.random.default_rng(8)
    pairs = draw(rng, "skewed", (TRIALS, 2, 12))
    verdicts = [compare(a, b, noise_pct=0.0).verdict for a, b in pairs]
    wrong = sum(v in (Outcome.FASTER, Outcome.SLOWER) for v in verdicts)
    assert wrong <= 0.07 * TRIALS


def test_too_few_noisy_samples_are_unclear() -> None:
    baseline = [100.0, 90.0, 110.0, 95.0, 105.0, 100.0]
    assert compare(baseline, [t * 0.97 for t in baseline]).verdict is Outcome.UNCLEAR


@pytest.mark.parametrize(
    ("ratio", "wanted"),
    # without spread the interval is a point, so these sit on either side of each rule's bound
    [
        (1.0101, Outcome.FASTER),
        (1.0099, Outcome.SAME),
        (1 / 1.0099, Outcome.SAME),
        (1 / 1.0101, Outcome.SLOWER),
    ],
)
def test_the_bounds_are_the_noise(ratio: float, wanted: Outcome) -> None:
    found = compare([100.0 * ratio] * 12, [100.0] * 12, noise_pct=1.0)
    assert found.verdict is wanted
    assert found.low == pytest.approx(ratio)
    assert found.high == pytest.approx(ratio)


times = st.lists(st.floats(1.0, 1000.0), min_size=6, max_size=30)


@given(times, times, st.floats(0.0, 20.0))
def test_swapping_mirrors_the_verdict(a: list[float], b: list[float], noise_pct: float) -> None:
    mirror = {Outcome.FASTER: Outcome.SLOWER, Outcome.SLOWER: Outcome.FASTER}
    forth, back = compare(a, b, noise_pct), compare(b, a, noise_pct)
    assert back.ratio == pytest.approx(1 / forth.ratio)
    assert back.low == pytest.approx(1 / forth.high)
    if (
        min(
            abs(end - bound)
            for end in (forth.low, forth.high)
            for bound in (1 + noise_pct / 100, 1 / (1 + noise_pct / 100))
        )
        > 1e-9
    ):
        assert back.verdict is mirror.get(forth.verdict, forth.verdict)


def test_it_prints_as_one_line() -> None:
    fast = compare([103.0, 102.0, 104.0] * 8, [100.0, 99.9, 100.1] * 8)
    assert str(fast) == f"FASTER 1.03x [{fast.low:.2f}, {fast.high:.2f}]"
    assert str(compare([100.2] * 12, [100.0] * 12)) == "SAME 1.002x [1.002, 1.002]"


def test_bad_input_is_named() -> None:
    good = [1.0] * 6
    with pytest.raises(InvalidInput, match="5 samples"):
        compare(good, good[:5])
    with pytest.raises(InvalidInput, match="above 0"):
        compare(good, [0.0, *good])
    with pytest.raises(InvalidInput, match="noise_pct"):
        compare(good, good, noise_pct=-1)


def test_a_comparison_is_one_line_in_a_repl() -> None:
    found = compare([103.0] * 12, [100.0] * 12)
    assert repr(found) == f"<Comparison {found}>" == "<Comparison FASTER 1.030x [1.030, 1.030]>"


def summary(times_us: np.ndarray) -> tuple[float, float, float]:
    times = list(times_us)
    return (percentile(times, 50), *median_interval(times))


@pytest.mark.parametrize("n", [12, 60])
def test_intervals_cover_the_ratio_as_samples_do_and_are_little_wider(n: int) -> None:
    rng = np.random.default_rng(1)
    covered, widths = [], []
    for _ in range(1000):
        one, other = rng.normal(110, 1, n), rng.normal(100, 1, n)
        found, exact = compare_intervals(summary(one), summary(other)), compare(one, other)
        covered.append(found.low <= 1.1 <= found.high)
        widths.append((found.high - found.low) / (exact.high - exact.low))
    assert np.mean(covered) >= 0.94
    assert 0.9 < np.median(widths) < 1.4


def test_intervals_decide_as_the_bounds_say() -> None:
    tight = (100.0, 99.9, 100.1)
    assert compare_intervals((103.0, 102.9, 103.1), tight).verdict is Outcome.FASTER
    assert compare_intervals(tight, (103.0, 102.9, 103.1)).verdict is Outcome.SLOWER
    assert compare_intervals((100.2, 100.1, 100.3), tight).verdict is Outcome.SAME
    assert compare_intervals((103.0, 98.0, 108.0), tight).verdict is Outcome.UNCLEAR
    # the clock's steps may leave no width
    assert str(compare_intervals((103.0,) * 3, (100.0,) * 3)) == "FASTER 1.030x [1.030, 1.030]"
    with pytest.raises(InvalidInput, match="above 0"):
        compare_intervals(tight, (1.0, 0.0, 2.0))
    with pytest.raises(InvalidInput, match="noise_pct"):
        compare_intervals(tight, tight, noise_pct=-1)
