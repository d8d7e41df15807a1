"""Formats sizes and durations, and parses sizes."""

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)}


def parse_bytes(text: str) -> int:
    """Parse a number of bytes, such as ``80GiB``, ``1.5 TB`` or ``4096``."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?)B?\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 80GiB, 1.5TB or 4096")
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(count: float) -> str:
    """Format a number of bytes in binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Format seconds, such as ``0.05 s``, ``3 min 20 s`` or ``2 h 40 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s" if seconds >= 0.95 else f"{seconds:.2f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    if seconds < 600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min" + f" {rest} s" * bool(rest)
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours:,} h" * bool(hours) + " " * bool(hours and rest) + f"{rest} min" * bool(rest)
