"""Format bytes, seconds and counts for the entire package. 1 MB is always 10^6 bytes."""

KB, MB, GB = 10**3, 10**6, 10**9


def format_bytes(num_bytes: int) -> str:
    """Format bytes for display: 512 B, 75.3 kB, 4.80 MB, 1.51 GB."""
    size = abs(num_bytes)
    if size < KB:
        return f"{num_bytes} B"
    unit, name = (KB, "kB") if size < MB else (MB, "MB") if size < GB else (GB, "GB")
    return f"{_three_digits(num_bytes / unit)} {name}"


def in_mb(num_bytes: float) -> str:
    """Return bytes in MB, without the unit, as figures show them: 43.4, 1,422.6."""
    return f"{num_bytes / MB:,.1f}"


def format_seconds(seconds: float) -> str:
    """Format seconds for display: 850 µs, 12.3 ms, 4.56 s, 3 min 20 s, 5.20 h."""
    if seconds < 1e-3:
        return f"{_three_digits(seconds * 1e6)} µs"
    if seconds < 1:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{_three_digits(seconds)} s"
    if seconds < 7200:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    return f"{_three_digits(seconds / 3600)} h"


def format_count(count: int, noun: str = "") -> str:
    """Return a whole number with thousands separators, and a noun for what's counted: 1,199,882; 1 rank; 2 ranks."""
    return f"{count:,} {noun}{'s' * (count != 1)}" if noun else f"{count:,}"


def _three_digits(value: float) -> str:
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{decimals}f}"
