"""Converts between human units and SI numbers; the only file with 2**30 or 1e12.

Two similar families are distinguished: memory counts in powers of two (`GiB`), vendors and
networks in powers of ten (`GB/s` is 1e9 bytes a second, `Gbit/s` an eighth of that). Unit names
are case-sensitive, because `Gb` and `GB` differ; the error for a near miss suggests the right name.

Not covered: bare numbers. A size, duration or rate without unit is refused, never guessed.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

_PREFIXES: Final[Mapping[str, float]] = {
    "": 1.0,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
}
_BINARY: Final[Mapping[str, int]] = {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "Pi": 2**50,
}

_BYTES: Final[Mapping[str, float]] = {
    **{f"{prefix}B": factor for prefix, factor in _PREFIXES.items()},
    "KB": 1e3,
    **{f"{prefix}B": float(factor) for prefix, factor in _BINARY.items()},
}
_BYTES_PER_S: Final[Mapping[str, float]] = {
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in _PREFIXES.items()},
    **{f"{unit}/s": factor for unit, factor in _BYTES.items()},
}
_SECONDS: Final[Mapping[str, float]] = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 7 * 86400.0,
}
_PRINTED_SECONDS: Final = {unit: factor for unit, factor in _SECONDS.items() if unit != "w"}
"""Months are written in days, as schedulers and bills do."""
_PERIODS: Final[Mapping[str, float]] = {
    **_SECONDS,
    "second": 1.0,
    "minute": 60.0,
    "hour": 3600.0,
    "day": 86400.0,
    "week": 7 * 86400.0,
    "month": 30 * 86400.0,
    "year": 365 * 86400.0,
}
_SPELT_OUT: Final[Mapping[str, str]] = {
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("m", "mins", "minute", "minutes"), "min"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("day", "days"), "d"),
    **dict.fromkeys(("wk", "wks", "week", "weeks"), "w"),
    **{f"{prefix.lower()}bps": f"{prefix}bit/s" for prefix in _PREFIXES},
    **{f"{prefix.lower()}b": f"{prefix}B" for prefix in _PREFIXES},
}
"""Names that other programs use, in lower case; suggested, not accepted."""
_PER_S: Final[Mapping[str, float]] = {"/s": 1.0, "/min": 1 / 60.0, "/h": 1 / 3600.0}

_QUANTITY: Final = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s].*?|)\s*")
_SHARE: Final = re.compile(
    r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*%\s*(?:per|/)\s*(\S.*?)\s*"
)
_MOST_DIGITS: Final = 18
"""Most digits of a whole number; Python reads at most 4,300, and takes long for them."""
_LONGEST_QUANTITY: Final = 64
"""Characters; a longer text is no quantity."""


def parse_bytes(text: str) -> int:
    """Read a size such as `80GiB` or `600MB`, in bytes.

    Raises:
        ValueError: no number, no known unit, negative, or not finite.
    """
    return round(_parse(text, _BYTES, example="80GiB"))


def parse_seconds(text: str) -> float:
    """Read a duration such as `10min`, `50us` or `50000h`, in seconds.

    Raises:
        ValueError: no number, no known unit, negative, or not finite.
    """
    return _parse(text, _SECONDS, example="10min")


def parse_bytes_per_s(text: str) -> float:
    """Read a bandwidth such as `400Gbit/s` or `450GB/s`, in bytes per second.

    Raises:
        ValueError: no number, no known unit, negative, or not finite.
    """
    return _parse(text, _BYTES_PER_S, example="400Gbit/s")


def parse_per_s(text: str) -> float:
    """Read a rate of events such as `20/s`, per second.

    Raises:
        ValueError: no number, no known unit, negative, or not finite.
    """
    return _parse(text, _PER_S, example="20/s")


def parse_share_per_s(text: str) -> float:
    """Read a share lost in a period, such as `1% per week` or `0.5%/30d`, as a ratio per second.

    Months have 30 days and years 365.

    Raises:
        ValueError: no percentage, no period, nothing or nothing finite.
    """
    shown = _shown(text)
    match = _SHARE.fullmatch(text) if len(text) <= _LONGEST_QUANTITY else None
    if match is None:
        raise ValueError(f"{shown!r} is not a share of a period, such as '1% per week'")
    percent, period = match.groups()
    period_s = _PERIODS.get(period, 0.0)
    if not period_s:
        try:
            period_s = parse_seconds(period)
        except ValueError as error:
            words = ", ".join(name for name in _PERIODS if len(name) > 3)
            raise ValueError(
                f"{shown!r}: unknown period {period!r}; write {words} or a duration like '10d'"
            ) from error
    ratio = float(percent) / 100.0
    if not ratio > 0.0 or not period_s > 0.0 or not math.isfinite(ratio):
        raise ValueError(f"{shown!r}: share and period must be above zero and finite")
    return ratio / period_s


def parse_share(text: str) -> float:
    """Read a share such as `2%`.

    Raises:
        ValueError: the text is no percentage; one line.
    """
    number = text.strip().removesuffix("%").strip()
    if not text.strip().endswith("%") or not re.fullmatch(r"(\d+\.?\d*|\.\d+)", number):
        raise ValueError(f"{_shown(text)!r} is not a share, such as '2%'")
    return float(number) / 100.0


def _shown(text: str) -> str:
    return text if len(text) <= _LONGEST_QUANTITY else text[: _LONGEST_QUANTITY - 3] + "..."


def _parse(text: str, factors: Mapping[str, float], *, example: str) -> float:
    shown = _shown(text)
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST_QUANTITY else None
    if match is None:
        raise ValueError(f"{shown!r} is not a number with a unit, such as {example!r}")
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"{shown!r} has no unit; write it like {example!r}")
    if unit not in factors:
        raise ValueError(f"{shown!r}: unknown unit {unit!r}; {_nearest(unit, factors)}")
    value = float(number) * factors[unit]
    if value < 0:
        raise ValueError(f"{shown!r} must not be negative")
    if not math.isfinite(value):
        raise ValueError(f"{shown!r} is too large")
    return value


def _nearest(unit: str, factors: Mapping[str, float]) -> str:
    """Suggest the most likely unit, or list all."""
    spelt_out = _SPELT_OUT.get(unit.lower())
    if spelt_out in factors:
        return f"did you mean {spelt_out!r}?"
    by_lower = {name.lower(): name for name in reversed(list(factors))}
    near = difflib.get_close_matches(unit.lower(), list(by_lower), n=1, cutoff=0.5)
    if near:
        return f"did you mean {by_lower[near[0]]!r}?"
    return f"known: {', '.join(factors)}"


def format_bytes(size_bytes: float) -> str:
    """Write a size in bytes with a power-of-two unit, e.g. `79.1 GiB`."""
    return _scaled(size_bytes, {"B": 1.0, **{f"{p}B": float(f) for p, f in _BINARY.items()}})


def format_bytes_per_s(rate_bytes_per_s: float) -> str:
    """Write a bandwidth in bytes per second with a power-of-ten unit, e.g. `450 GB/s`."""
    return _scaled(rate_bytes_per_s, {f"{p}B/s": f for p, f in _PREFIXES.items()})


def format_flop_per_s(rate_flop_per_s: float) -> str:
    """Write an arithmetic rate in operations per second, e.g. `989 TFLOP/s`."""
    return _scaled(rate_flop_per_s, {f"{p}FLOP/s": f for p, f in _PREFIXES.items()})


def format_s(time_s: float) -> str:
    """Write a duration in seconds with the unit that suits its size, e.g. `3.20 ms`."""
    return _scaled(time_s, _PRINTED_SECONDS)


def format_count(count: float) -> str:
    """Write a count with the suffixes of parameter counts, e.g. `46.7B`; below 1000 as it is."""
    if abs(count) < 1e3:
        return f"{count:g}"
    return _scaled(count, {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}).replace(" ", "")


def format_counted(count: int, noun: str) -> str:
    """Count things whose plural ends in s, e.g. `1 device`, `1,024 devices`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_money(amount: float, currency: str | None) -> str:
    """Format an amount with its currency, such as `0.42 USD`; a bare number without one."""
    shown = f"{amount:,.0f}" if amount >= 10_000 else f"{amount:.4g}"
    return f"{shown} {currency or ''}".rstrip()


def parse_whole(text: str, *, digits: int = _MOST_DIGITS) -> int | None:
    """Return a whole number of at most so many digits, e.g. `64`; None where a text is none."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= digits
    return int(text) if is_number else None


def format_ratio(ratio: float, *, digits: int = 1) -> str:
    """Write a share as percent, e.g. `25.3 %`, with so many digits behind the point."""
    return f"{100.0 * ratio:.{digits}f} %"


def format_times(band: tuple[float, float]) -> str:
    """Write a band of a ratio of times, e.g. `0.95 to 1.21 times`."""
    return f"{band[0]:.2f} to {band[1]:.2f} times"


def format_number(value: float) -> str:
    """Write a number to four significant digits, from 1,000 on whole with grouped digits."""
    return f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:.4g}"


def _scaled(value: float, factors: Mapping[str, float]) -> str:
    """Write `value` to three significant digits in the largest unit not above it."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        unit = next((name for name, factor in factors.items() if factor == 1.0), "")
        return f"0 {unit}".rstrip()
    names = sorted(factors, key=lambda name: factors[name])
    # Compare after rounding, so that 999.9 MB/s is written 1.00 GB/s and not 1000 MB/s.
    reached = [name for name in names if abs(value) / factors[name] >= 0.9995]
    largest = reached[-1] if reached else names[0]
    scaled = value / factors[largest]
    digits = max(0, 2 - math.floor(math.log10(abs(scaled)) + 1e-12))
    return f"{scaled:.{min(digits, 2)}f} {largest}"


def spans(numbers: Iterable[int]) -> str:
    """Return ascending numbers as ranges: `0, 3-60`."""
    joined: list[list[int]] = []
    for number in numbers:
        if joined and number == joined[-1][-1] + 1:
            joined[-1] = [joined[-1][0], number]
        else:
            joined.append([number])
    return ", ".join("-".join(map(str, span)) for span in joined)
