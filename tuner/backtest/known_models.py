"""Models that published rows name without describing them, from the configs of `examples/models`.

A name is cut into words, and a config is meant whose folder's words are all among them: "Nemotron
V3 Ultra 550B" is `nemotron-3-ultra`. Of several the one with most words counts. Installed without
the examples, no such row has a model.
"""

import re
from functools import cache
from pathlib import Path
from typing import Final

from tuner.spec.huggingface.read import read_model
from tuner.spec.model import ModelSpec

SHIPPED: Final = Path(__file__).parents[2] / "examples" / "models"


def find_model(name: str) -> ModelSpec | None:
    """Return the shipped model that a row names, or None."""
    words = _words(name)
    fitting = [(len(own), path) for own, path in _shipped() if own <= words]
    return _read(max(fitting)[1]) if fitting else None


@cache
def _shipped() -> tuple[tuple[frozenset[str], Path], ...]:
    configs = sorted(SHIPPED.glob("*/config.json"))
    return tuple((_words(path.parent.name), path.parent) for path in configs)


@cache
def _read(folder: Path) -> ModelSpec:
    return read_model(folder)


def _words(name: str) -> frozenset[str]:
    """Lower-case words and numbers; "v3" is "3"."""
    return frozenset(re.sub(r"\bv(?=\d)", "", re.sub(r"[^a-z0-9]+", " ", name.lower())).split())
