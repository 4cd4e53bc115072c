"""EPLB's own arrays, for a runtime above them (deepseek-ai/EPLB d52c72d)."""

from typing import Final

from tuner.catalog.place_rules import PlaceTarget

PLACE_TARGET: Final = PlaceTarget(name="eplb", release="d52c72d")
