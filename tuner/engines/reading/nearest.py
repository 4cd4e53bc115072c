"""The nearest legal number to an illegal one, for error messages."""

from math import gcd


def nearest_divisor(whole: int, wanted: int) -> int:
    """Return the divisor of `whole` that is closest to `wanted`, the smaller on ties."""
    small = [size for size in range(1, int(whole**0.5) + 1) if whole % size == 0]
    divisors = {*small, *(whole // size for size in small)} or {1}
    return min(sorted(divisors), key=lambda size: abs(size - wanted))


def nearest_multiple(wanted: int, unit: int) -> int:
    """Return the multiple of `unit`, at least one, that is closest to `wanted`."""
    return max(unit, round(wanted / unit) * unit)


def nearest_common_divisor(first: int, second: int, wanted: int) -> int:
    """Return the number that divides both and is closest to `wanted`, the smaller on ties."""
    return nearest_divisor(gcd(first, second), wanted)
