"""Log tails of failed trials, kept beside their records when the trial folder is removed.

trials/0003.json    the record
trials/0003.log     the tails of the logs in the trial's folder, each under its name
"""

import contextlib
import itertools
from pathlib import Path
from typing import Final

from tuner.verify.launcher import log_tail

MOST_LOGS: Final = 16
MOST_FILES: Final = 10_000
"""Files examined in a folder that an engine may have filled."""
PATTERNS: Final = ("*.log", "log.txt")


def kept_logs_line(trials: Path) -> tuple[str, ...]:
    """Say where the logs of failed trials are kept; nothing if there are none.

    Args:
        trials: folder of the plan's trials.
    """
    if not any(trials.glob("[0-9]*.log")):
        return ()
    return (f"logs of failed trials: {trials / '*.log'}",)


def kept_log(folder: Path) -> str:
    """Return the tails of the logs in a trial's folder, the latest one last.

    Args:
        folder: of the trial; it may be gone.
    """
    logs = []
    # Files may disappear meanwhile, and those of other users cannot be read.
    with contextlib.suppress(OSError):
        for file in itertools.islice(folder.rglob("*"), MOST_FILES):
            if any(file.match(pattern) for pattern in PATTERNS) and not file.is_symlink():
                with contextlib.suppress(OSError):
                    logs.append((file.stat().st_mtime_ns, str(file), file))
    parts = []
    for *_, file in sorted(logs)[-MOST_LOGS:]:
        with contextlib.suppress(OSError):
            if tail := log_tail(file):
                parts.append(f"== {file.relative_to(folder)}\n{tail}")
    return "\n".join(parts)
