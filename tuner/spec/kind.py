"""Kind of a spec's goal, found before the rest of the spec is read."""

from pathlib import Path
from typing import Final

from tuner.spec.files import read_small_text, shown_path
from tuner.spec.yaml_text import parse_yaml

ONLY_ESTIMATED: Final = "rl"
"""Goal whose launches are estimated, and which is not planned."""


def goal_kind(path: Path) -> str | None:
    """Return `goal.kind` of a spec, None where it has none; the rest may be wrong.

    Raises:
        SpecError: the file is no YAML.
    """
    raw = parse_yaml(read_small_text(path, what="spec"), source=shown_path(path))
    goal = raw.get("goal") if isinstance(raw, dict) else None
    kind = goal.get("kind") if isinstance(goal, dict) else None
    return kind if isinstance(kind, str) else None
