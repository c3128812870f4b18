"""The colours of a report, light and dark, as CSS variables."""

from __future__ import annotations

#: text and lines have a contrast of 4.5 or more with their background, in both themes
LIGHT = {
    "bg": "#ffffff", "ink": "#1b1f24", "soft": "#505862", "line": "#d5dae0", "panel": "#f4f6f8",
    "link": "#0b57c4", "good": "#12703a", "bad": "#b3261e", "same": "#5b6470",
    "s0": "#0b57c4", "s1": "#b8430a", "s2": "#84600a", "s3": "#12703a", "s4": "#7a2fb8",
    "s5": "#ad1a5f", "s6": "#0e6f7c", "s7": "#505862",
}  # fmt: skip
DARK = {
    "bg": "#14171b", "ink": "#e8ebef", "soft": "#aab3be", "line": "#3a414a", "panel": "#1e2329",
    "link": "#7db4ff", "good": "#5fd08b", "bad": "#ff8f85", "same": "#a3adb9",
    "s0": "#7db4ff", "s1": "#ff9c66", "s2": "#e3bd5b", "s3": "#5fd08b", "s4": "#cba3ff",
    "s5": "#ff8cc0", "s6": "#6ad3e2", "s7": "#aab3be",
}  # fmt: skip


def _theme(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


THEME = (
    f":root{{color-scheme:light dark;{_theme(LIGHT)}}}\n"
    f"@media (prefers-color-scheme: dark){{:root{{{_theme(DARK)}}}}}\n"
)


def channels(colour: str) -> tuple[int, ...]:
    """Red, green and blue of ``#rrggbb``, 0 to 255."""
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def contrast(one: str, other: str) -> float:
    """Of two colours, 1 to 21, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [channel / 255 for channel in channels(colour)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
