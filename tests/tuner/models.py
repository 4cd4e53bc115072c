"""Models whose configurations ship with the examples."""

from functools import cache
from pathlib import Path
from typing import Final

from tuner.spec.huggingface.read import read_model
from tuner.spec.model import ModelSpec

MODELS: Final = Path(__file__).parents[2] / "examples" / "models"


@cache
def example_model(name: str) -> ModelSpec:
    """Read a model by the name of its folder."""
    return read_model(MODELS / name)
