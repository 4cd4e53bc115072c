"""examples/spec-reference.md is what its generator writes, and tells every key."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.expect import present

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = present(
        importlib.util.spec_from_file_location("spec_reference", EXAMPLES / "spec_reference.py")
    )
    module = importlib.util.module_from_spec(spec)
    present(spec.loader).exec_module(module)
    return module


def test_stored_reference_is_what_the_schemas_say(generator: ModuleType) -> None:
    stored = (EXAMPLES / "spec-reference.md").read_text(encoding="utf-8")
    assert stored == generator.reference(), "run: python examples/spec_reference.py"


def test_every_key_of_every_object_has_a_row(generator: ModuleType) -> None:
    text = generator.reference()
    for name in generator.KINDS:
        schema = generator.json_schema(name)
        for part in (schema, *schema["$defs"].values()):
            assert all(f"| `{key}` |" in text for key in part.get("properties", ()))
