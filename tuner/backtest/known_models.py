"""Models that published rows name without describing them, from the configs of `examples/models`.

A name is cut into words. A config is meant whose folder's words follow each other in it, unless a
number follows their last one, which makes it another version: "Nemotron V3 Ultra 550B" is
`nemotron-3-ultra`, "GLM-5.5 Air" is nothing here. Of several the one with most words counts. Models
that were made of another one's by its maker ("Llama-3.3-Nemotron-Super-49B") are neither.
Installed without the examples, no such row has a model.
"""

import re
from functools import cache
from pathlib import Path
from typing import Final

from tuner.spec.huggingface.read import read_model
from tuner.spec.model import ModelSpec

SHIPPED: Final = Path(__file__).parents[2] / "examples" / "models"

Words = tuple[str, ...]


def find_model(name: str) -> ModelSpec | None:
    """Return the shipped model that a row names, or None."""
    words = name_words(name)
    if {"llama", "nemotron"} <= set(words):
        return None
    fitting = [
        (len(folder_words), path)
        for folder_words, path in _shipped()
        if _names(words, folder_words)
    ]
    return _read(max(fitting)[1]) if fitting else None


def name_words(name: str) -> Words:
    """Lower-case words and numbers of a model's name; "v3" is "3"."""
    return tuple(re.sub(r"\bv(?=\d)", "", re.sub(r"[^a-z0-9]+", " ", name.lower())).split())


def _names(words: Words, folder_words: Words) -> bool:
    """Return whether a folder's words are a run of a name's, and end where its version does."""
    for start in range(len(words) - len(folder_words) + 1):
        end = start + len(folder_words)
        goes_on = folder_words[-1].isdigit() and "".join(words[end : end + 1]).isdigit()
        if words[start:end] == folder_words and not goes_on:
            return True
    return False


@cache
def _shipped() -> tuple[tuple[Words, Path], ...]:
    configs = sorted(SHIPPED.glob("*/config.json"))
    return tuple((name_words(path.parent.name), path.parent) for path in configs)


@cache
def _read(folder: Path) -> ModelSpec:
    return read_model(folder)
