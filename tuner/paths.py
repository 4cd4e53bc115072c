"""Paths as callers of `tuner.api` give them, and the folder that a PLAN means.

A plan is named by its folder or by the `plan.json` in it; every command and every function that
takes one asks `plan_folder`.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

AnyPath = str | os.PathLike[str]
"""What may stand for a path."""

PLAN_FILE: Final = "plan.json"


def paths_of(paths: AnyPath | Iterable[AnyPath]) -> tuple[Path, ...]:
    """Return paths; a single one may stand for a list of one."""
    if isinstance(paths, str | os.PathLike):
        return (Path(paths),)
    return tuple(Path(path) for path in paths)


def plan_folder(plan: AnyPath) -> Path:
    """Return the folder of a plan that is named by its folder or its `plan.json`."""
    path = Path(plan)
    return path.parent if path.name == PLAN_FILE and not path.is_dir() else path
