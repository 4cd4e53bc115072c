"""Values of options that carry a unit."""

from tuner.errors import TunerError
from tuner.units import parse_seconds


def seconds(text: str, *, option: str) -> float:
    """Read a duration that must be more than nothing.

    Raises:
        TunerError: it is none; the message names the option.
    """
    try:
        found = parse_seconds(text)
    except ValueError as error:
        raise TunerError(f"{option}: {error}") from error
    if found <= 0.0:
        raise TunerError(f"{option}: {text!r} must be more than nothing, e.g. 60s")
    return found
