"""Every engine that takes a placement, by the name users type."""

from collections.abc import Mapping
from typing import Final

from tuner.catalog.place_rules import PlaceTarget
from tuner.catalog.registry import place_targets

PLACE_FOLDERS: Final[Mapping[str, str]] = {
    target.name: folder for folder, target in place_targets()
}
PLACE_TARGETS: Final[Mapping[str, PlaceTarget]] = {
    target.name: target for _, target in place_targets()
}
