"""The kinds of measurements that `moetune profile import` reads, by the name that users type.

Measurements of a machine become a profile. Recordings of routing become a stored recording: their
formats are in profilers/routing/formats.py, and `routing` takes any of them.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Final, cast

from profilers.errors import UnknownNameError
from profilers.imports.result import Imported, Importer
from profilers.routing.formats import FORMATS, FORMER

KINDS: Final[Mapping[str, str]] = {
    "aiconfigurator": "profilers.imports.aiconfigurator:read",
    "nccl-tests": "profilers.imports.nccl_tests:read",
}

OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "aiconfigurator": ("system", "framework", "operations"),
    "nccl-tests": ("collective",),
}
"""Options beside the path, by kind of import."""

ROUTING: Final = "routing"
"""The kind of any recording of routing."""


def is_routing(kind: str) -> bool:
    """Return whether a kind is a recording of routing, and no measurement."""
    return kind == ROUTING or kind in FORMATS


def softwares_of(kind: str, path: Path | None, *, options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the softwares that were measured where none is named, each a profile of its own.

    Empty if a kind does not distinguish softwares, or one is named.

    Raises:
        UnknownNameError: the options do not determine what was measured.
        ProfileUnreadableError: the source is missing or damaged.
    """
    if kind != "aiconfigurator" or "framework" in options:
        return ()
    from profilers.imports.aiconfigurator import frameworks

    return frameworks(path, system=options.get("system"))


def import_measurements(
    kind: str, path: Path | None, *, options: Mapping[str, str], created: str
) -> Imported:
    """Read measurements of that kind; `created` is the moment, ISO 8601 in UTC.

    Raises:
        UnknownNameError: the kind, or an option of it, does not exist.
        ProfileUnreadableError: the source is missing, damaged or holds nothing of use.
    """
    if kind not in KINDS:
        known = ", ".join((*KINDS, ROUTING, *FORMATS))
        former = f"; {FORMER}" if kind == "routing-csv" else ""
        raise UnknownNameError(f"import kind {kind!r} is not one of {known}{former}")
    if unknown := sorted(options.keys() - set(OPTIONS[kind])):
        raise UnknownNameError(
            f"{kind} has no option {unknown[0]!r}; it has {', '.join(OPTIONS[kind])}"
        )
    module, _, attribute = KINDS[kind].partition(":")
    importer = cast("Importer", getattr(import_module(module), attribute))
    return importer(path, options=options, created=created)
