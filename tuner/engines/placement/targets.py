"""Every engine that takes a placement, by the name users type."""

from collections.abc import Mapping
from typing import Final

from tuner.catalog.place_rules import PlaceTarget
from tuner.engines.registry import SERVE_ENGINES, engine_file

PLACE_ENGINES: Final = ("eplb", "megatron_lm")
"""Folders of others that take a placement."""
PLACE_FOLDERS: Final[Mapping[str, str]] = {
    module.PLACE_TARGET.name: folder
    for folder in (*sorted(SERVE_ENGINES), *PLACE_ENGINES)
    if hasattr(module := engine_file(folder, "capabilities"), "PLACE_TARGET")
}
PLACE_TARGETS: Final[Mapping[str, PlaceTarget]] = {
    name: engine_file(folder, "capabilities").PLACE_TARGET for name, folder in PLACE_FOLDERS.items()
}
