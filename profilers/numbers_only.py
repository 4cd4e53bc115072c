"""Numbers of stored files are numbers: JSON's `true` is not 1, and `"1"` is not either.

pydantic takes truth values and texts for numbers unless a field is strict. Strict fields refuse
numpy's integers, which records are made from in memory; so only what is read from JSON is held to
it. A `Literal[1]` takes `true` in either case, since both are equal in Python, and is guarded too.
"""

from typing import Any, Final

from pydantic_core import core_schema

_NUMBERS: Final = ("int", "float")
_KEPT: Final = ("keys_schema", "metadata", "default", "serialization", "expected", "config")
"""Parts of a schema that hold no field; keys of JSON's objects are texts always."""


def numbers_only(schema: Any) -> Any:
    """Return a core schema whose numbers, read from JSON, are numbers."""
    if isinstance(schema, list):
        return [numbers_only(member) for member in schema]
    if isinstance(schema, tuple):
        return tuple(numbers_only(member) for member in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if kind in _NUMBERS and "strict" not in schema:
        return core_schema.json_or_python_schema(
            json_schema={**schema, "strict": True},
            python_schema=schema,
        )
    if kind == "json-or-python":
        return schema
    if kind == "literal" and any(type(value) is int for value in schema["expected"]):
        return core_schema.no_info_before_validator_function(_no_truth, schema)
    return {key: value if key in _KEPT else numbers_only(value) for key, value in schema.items()}


def _no_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")  # noqa: TRY004 - pydantic reports no other kind
    return value
