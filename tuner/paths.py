"""Path arguments of `tuner.api`, and the folder of a PLAN.

A plan is named by its folder or by the `plan.json` in it; every command and every function that
takes one calls `plan_folder`.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

AnyPath = str | os.PathLike[str]
"""A path argument."""

PLAN_FILE: Final = "plan.json"


def to_paths(paths: AnyPath | Iterable[AnyPath]) -> tuple[Path, ...]:
    """Return a tuple of paths; a single path counts as a list of one."""
    if isinstance(paths, str | os.PathLike):
        return (Path(paths),)
    return tuple(Path(path) for path in paths)


def plan_folder(plan: AnyPath) -> Path:
    """Return the folder of a plan that is named by its folder or its `plan.json`."""
    path = Path(plan)
    return path.parent if path.name == PLAN_FILE and not path.is_dir() else path
