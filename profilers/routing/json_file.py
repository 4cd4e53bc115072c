"""One JSON object in a file of bounded size."""

import json
from pathlib import Path
from typing import Any, Final, NoReturn

from profilers.files import TooLargeError, read_bounded

MOST_BYTES: Final = 2**28


def read_object(path: Path) -> dict[str, Any]:
    """Parse the file.

    Raises:
        ValueError: it is too large, cut short, not UTF-8, not JSON, or no object.
    """
    try:
        content = read_bounded(path, most_bytes=MOST_BYTES)
    except TooLargeError as error:
        raise ValueError(f"{error.strerror} of JSON; store large counts as .npy") from error
    try:
        values = json.loads(content, parse_constant=_refused)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON, or cut short: {error}") from error
    except RecursionError as error:
        raise ValueError("not JSON that holds counts: nested too deep") from error
    if not isinstance(values, dict):
        kind = type(values).__name__
        message = f"holds a JSON {kind}; expected an object of named fields"
        raise ValueError(message)  # noqa: TRY004  # the content is wrong, not our caller
    return values


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"holds {constant}; counts are whole numbers of 0 or more")
