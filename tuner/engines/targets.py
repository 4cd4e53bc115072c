"""Every launch target of training by the name users type."""

from collections.abc import Iterable, Mapping
from typing import Final

from tuner.catalog.manifest import Capabilities, anything
from tuner.catalog.programs import WRAPPERS, Programs
from tuner.catalog.target import Target
from tuner.engines.registry import TRAIN_ENGINES, engine_file

PROGRAMS: Final[Mapping[str, Target]] = {
    target.name: target
    for folder in TRAIN_ENGINES
    for target in engine_file(folder, "capabilities").TARGETS
}
"""Programs that train; their plain names are their newest releases."""
TARGETS: Final[Mapping[str, Capabilities]] = {
    **{name: target.capabilities for name, target in PROGRAMS.items()},
    **{name: anything(name) for name in sorted(WRAPPERS)},
}
"""What every target can express."""


def programs(names: Iterable[str]) -> Programs:
    """Return the programs of a list of targets."""
    return Programs(names=tuple(names), known=PROGRAMS)
