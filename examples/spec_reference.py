"""Write the reference of the spec from its schemas: python examples/spec_reference.py [FILE].

One table for each object of a spec, one row for each key: its type, its default and the first
sentence of its description. An object that several kinds of spec share is written once.
tests/test_spec_reference.py holds examples/spec-reference.md against what this writes.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tuner.cli.schema import json_schema

Schema = Mapping[str, Any]

REFERENCE: Final = Path(__file__).parent / "spec-reference.md"

KINDS: Final[Mapping[str, str]] = {
    "spec": "Training",
    "serve-spec": "Serving",
    "place-spec": "Placement of experts",
    "rl-spec": "Reinforcement learning",
}
"""Name of a schema to the title of its chapter."""

OPENING: Final = """\
# Spec reference

Written by `python examples/spec_reference.py` from the schemas that `moetune schema spec`,
`serve-spec`, `place-spec` and `rl-spec` print; do not edit it by hand.

A spec is one YAML file, and its paths are relative to it. Quantities carry their unit, as the type
shows: `400Gbit/s`, `80GiB`, `10min`, `20/s`. A list of one may be written without brackets. Where
the default is a dash, the key may be absent. `engines/README.md` lists what `emit` may name.
"""

LONGEST_DEFAULT: Final = 40
"""Characters; a longer default is the object's or list's own, which the table below it shows."""


def main() -> None:
    """Write the reference, to the file that is named or beside this script."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else REFERENCE
    out.write_text(reference(), encoding="utf-8")


def reference() -> str:
    """Return the whole reference."""
    sections = [OPENING]
    first_place: dict[str, tuple[str, str]] = {}
    for name, title in KINDS.items():
        schema = json_schema(name)
        sections.append(f"## {title}\n")
        for path, part in _objects(schema):
            first = first_place.setdefault(json.dumps(part, sort_keys=True), (title, path))
            if path:
                sections.append(f"### `{path}`\n")
            if first == (title, path):
                sections.append(f"{_first_sentence(part)}\n\n{_table(schema, part)}")
            else:
                sections.append(f"The keys of `{first[1]}` under {first[0]}.\n")
    return "\n".join(sections)


def _objects(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Give every object of a spec with the path to it, from the outside inwards."""
    waiting: list[tuple[str, Schema]] = [("", schema)]
    while waiting:
        path, part = waiting.pop(0)
        yield path, part
        inner = [
            (f"{path}.{key}{mark}".lstrip("."), actual)
            for key, field in part["properties"].items()
            for actual, mark in _objects_of(schema, field)
        ]
        waiting = inner + waiting


def _objects_of(schema: Schema, field: Schema) -> Iterator[tuple[Schema, str]]:
    """Give the objects that a key may hold, each with what follows the key in a path."""
    for kind in _alternatives(schema, field):
        if "properties" in kind:
            yield kind, ""
        elif kind.get("type") == "array" and "items" in kind:
            yield from ((actual, "[]") for actual, _ in _objects_of(schema, kind["items"]))


def _alternatives(schema: Schema, field: Schema) -> tuple[Schema, ...]:
    """Return what a key may be, references followed; whether it may be absent is left out."""
    parts = field.get("anyOf", field.get("oneOf"))
    if parts is None:
        actual = _followed(schema, field)
        return () if actual.get("type") == "null" else (actual,)
    return tuple(kind for part in parts for kind in _alternatives(schema, part))


def _followed(schema: Schema, part: Schema) -> Schema:
    reference = part.get("$ref")
    return part if reference is None else schema["$defs"][reference.rpartition("/")[2]]


def _table(schema: Schema, part: Schema) -> str:
    needed = part.get("required", ())
    rows = [
        f"| `{key}` | {_type(schema, field)} | {_default(field, is_needed=key in needed)}"
        f" | {_meaning(schema, field)} |"
        for key, field in part["properties"].items()
    ]
    return "\n".join(("| key | type | default | meaning |", "|---|---|---|---|", *rows, ""))


def _type(schema: Schema, field: Schema) -> str:
    return " or ".join(_name(schema, part) for part in _alternatives(schema, field))


def _name(schema: Schema, part: Schema) -> str:
    if "const" in part:
        return f"`{part['const']}`"
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if "examples" in part:
        return f"such as `{part['examples'][0]}`"
    if "properties" in part:
        return "object"
    if part.get("type") == "array":
        items = part.get("items") or part["prefixItems"][0]
        return f"list of {_type(schema, items)}"
    if "additionalProperties" in part:
        return f"{_type(schema, part['additionalProperties'])} by name"
    plain = str(part["type"])
    return {"string": "text", "boolean": "true, false"}.get(plain, plain)


def _default(field: Schema, *, is_needed: bool) -> str:
    if is_needed:
        return "required"
    value = field.get("default")
    text = json.dumps(value)
    is_plain = value not in (None, {}, [], "") and len(text) <= LONGEST_DEFAULT
    return f"`{text.strip(chr(34))}`" if is_plain else "-"


def _meaning(schema: Schema, field: Schema) -> str:
    """Return the key's own first sentence, else that of the type it holds."""
    for part in (field, *_alternatives(schema, field), *_items(schema, field)):
        if "description" in part:
            return _first_sentence(part).replace("|", "\\|")
    raise ValueError(f"{field.get('title')}: give the field a docstring")


def _items(schema: Schema, field: Schema) -> Iterator[Schema]:
    for part in _alternatives(schema, field):
        if "items" in part:
            yield _followed(schema, part["items"])


def _first_sentence(part: Schema) -> str:
    text = " ".join(str(part["description"]).split())
    first: str = re.split(r"(?<!e\.g)(?<!et al)\.\s+(?=[A-Z`])", text, maxsplit=1)[0]
    return first.rstrip(".") + "."


if __name__ == "__main__":
    main()
