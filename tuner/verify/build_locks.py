"""Stale build locks of JIT-compiled kernels, left by builds that were killed.

PyTorch compiles extensions, DeepSpeed's operators among them, into a folder of the user's. During a
build the file `lock` is open beside it; other processes wait until it is gone, for ever if the
builder was killed (torch 2.13, utils/file_baton.py and cpp_extension.py).

    removed     locks that were created while a trial ran, once all of its processes have ended
    reported    any others, before the first trial and where one did not end in time

Not covered: builders on other machines or in containers that share the folder, whose open files are
not visible here; their locks are removed only if they were created during the trial.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

MOST_LOCKS: Final = 1000
CLOCK_S: Final = 0.1
"""Possible lag of the file system's clock."""
PROCESSES: Final = Path("/proc")


def release_builds(environment: Mapping[str, str], *, since_s: float) -> None:
    """Remove the stale locks that were created at a time or later.

    Args:
        environment: of the trial.
        since_s: time by the file system's clock.
    """
    for lock in abandoned_locks(environment):
        with contextlib.suppress(OSError):
            if lock.stat().st_mtime >= since_s - CLOCK_S:
                lock.unlink()


def abandoned_locks(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the locks that no process of this machine has open; none if that is unknown."""
    if not PROCESSES.is_dir():
        return ()
    root = _build_folder(environment)
    places = itertools.chain(root.glob("*/lock"), root.glob("*/*/lock"))
    try:
        locks = {lock for lock in itertools.islice(places, MOST_LOCKS) if lock.is_file()}
    except OSError:
        return ()
    return tuple(sorted(locks - set(_open_files()))) if locks else ()


def _build_folder(environment: Mapping[str, str]) -> Path:
    stated = environment.get("TORCH_EXTENSIONS_DIR")
    if stated:
        return Path(stated).resolve()
    cache = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "torch_extensions").resolve()


def _open_files() -> Iterator[Path]:
    """Yield the files that processes have open, as far as visible to this one."""
    for process in PROCESSES.iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            for number in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    yield number.readlink()
