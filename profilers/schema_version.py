"""Release that reads a stored file whose schema is newer than this one knows.

Every stored file has a `schema_version`, and says who wrote it in `moetune_version`, at its top or
under `provenance`. Older versions are migrated by the reader of the file; a newer one is never
guessed at.
"""

import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def refusal_of_newer(content: bytes, *, known: int) -> str:
    """Say why a stored file cannot be read and what can; empty where its schema is no reason.

    Args:
        content: JSON; anything else is left to its reader.
        known: newest version of the schema that is read here.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    return refusal_of(values, known=known) if isinstance(values, dict) else ""


def refusal_of(values: dict[str, Any], *, known: int) -> str:
    """Say the same of JSON that was read already."""
    version = values.get("schema_version")
    if not isinstance(version, int) or version <= known:
        return ""
    provenance = values.get("provenance")
    writer = (provenance if isinstance(provenance, dict) else values).get("moetune_version")
    needed = f"moetune {writer}, which wrote it, or newer" if writer else "a newer moetune"
    return (
        f"schema_version {version} is not {known}, the newest that this version reads; needed is"
        f" {needed}, or write it anew"
    )


def moetune_version() -> str:
    """Return the version that writes a file; unknown outside an installed distribution."""
    try:
        return version("moetune")
    except PackageNotFoundError:
        return "unknown"
