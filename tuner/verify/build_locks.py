"""Locks on kernels that programs compile when they first need them, left by builds that were ended.

PyTorch compiles extensions, DeepSpeed's operators among them, into a folder of the user's. While
somebody builds one, the file `lock` lies beside it, open; whoever comes meanwhile waits until it is
gone, for ever where the builder was killed (torch 2.13, utils/file_baton.py and cpp_extension.py).

    released    locks that were made while a trial ran, once all of its processes have ended
    named       any others, where a trial did not end in time

Not covered: builders on other machines or in containers that share the folder, whose open files
cannot be seen here; their locks are younger than a trial's start only where they began beside it.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

MOST_LOCKS: Final = 1000
CLOCK_S: Final = 0.1
"""By which the clock of files may be behind."""
PROCESSES: Final = Path("/proc")


def release_builds(environment: Mapping[str, str], *, since_s: float) -> None:
    """Remove the locks that nobody holds and that were made at a time or later.

    Args:
        environment: of the trial.
        since_s: of the clock of files.
    """
    for lock in abandoned_locks(environment):
        with contextlib.suppress(OSError):
            if lock.stat().st_mtime >= since_s - CLOCK_S:
                lock.unlink()


def abandoned_locks(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the locks that no process of this machine holds open; none where that is not known."""
    if not PROCESSES.is_dir():
        return ()
    root = _build_folder(environment)
    places = itertools.chain(root.glob("*/lock"), root.glob("*/*/lock"))
    try:
        found = {lock for lock in itertools.islice(places, MOST_LOCKS) if lock.is_file()}
    except OSError:
        return ()
    return tuple(sorted(found - set(_open_files()))) if found else ()


def _build_folder(environment: Mapping[str, str]) -> Path:
    stated = environment.get("TORCH_EXTENSIONS_DIR")
    if stated:
        return Path(stated).resolve()
    cache = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "torch_extensions").resolve()


def _open_files() -> Iterator[Path]:
    """Yield the files that processes have open, as far as this one may see."""
    for process in PROCESSES.iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            for number in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    yield number.readlink()
