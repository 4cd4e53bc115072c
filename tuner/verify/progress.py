"""Timed steps that the reference step reports while it runs, a JSON line each.

Written by `python -m profilers.steps --progress`, on a disk that this process sees too. Warm-up
steps are not reported.
"""

import json
from pathlib import Path
from typing import Final

from profilers.files import read_bounded

PROGRESS_NAME: Final = "progress.jsonl"
MOST_BYTES: Final = 64 * 2**20


def steps_so_far(folder: Path) -> tuple[float, ...]:
    """Return the timed steps of a trial so far, in seconds; incomplete lines are skipped."""
    try:
        text = read_bounded(folder / PROGRESS_NAME, most_bytes=MOST_BYTES).decode()
        return tuple(float(json.loads(line)["step_s"]) for line in text.split("\n")[:-1])
    except (OSError, ValueError, KeyError, TypeError):
        return ()
