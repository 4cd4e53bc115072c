"""One JSON object in a file of bounded size."""

import json
from pathlib import Path
from typing import Any, Final, NoReturn

MOST_BYTES: Final = 2**28


def read_object(path: Path) -> dict[str, Any]:
    """Parse the file.

    Raises:
        ValueError: it is too large, cut short, not UTF-8, not JSON, or no object.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(
            f"{size} bytes of JSON, at most {MOST_BYTES} are read; store large counts as .npy"
        )
    try:
        values = json.loads(path.read_bytes(), parse_constant=_refused)
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
