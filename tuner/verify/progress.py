"""The timed steps that the reference step tells while it runs, a JSON line each.

Written by `python -m profilers.steps --progress`, on a disk that the watcher sees too. Warm-up is
not told.
"""

import json
from pathlib import Path
from typing import Final

PROGRESS_NAME: Final = "progress.jsonl"


def steps_so_far(folder: Path) -> tuple[float, ...]:
    """Return the timed steps of a trial so far, in seconds; a line that is not whole waits."""
    try:
        text = (folder / PROGRESS_NAME).read_text(encoding="utf-8")
        return tuple(float(json.loads(line)["step_s"]) for line in text.split("\n")[:-1])
    except (OSError, ValueError, KeyError, TypeError):
        return ()
