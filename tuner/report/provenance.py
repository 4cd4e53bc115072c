"""The provenance of a plan, as a section."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from tuner.report.content import Depth, Notes, Section, named, some

SHOWN_DIGITS = 16
"""Characters of a SHA-256 that are shown."""
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


def provenance_section(
    provenance: Any,
    *,
    hashes: Mapping[str, str] = NOTHING,
    notes: Sequence[str] = (),
) -> Section:
    """Say which version made the plan, and from which inputs.

    Args:
        provenance: of a plan of any goal.
        hashes: of inputs beside the spec, by their names.
        notes: beside its own.
    """
    listed = (*provenance.notes, *notes)
    hashed = {"spec": provenance.spec_sha256} | {
        f"input {name}": sha for name, sha in hashes.items()
    }
    return Section(
        name="provenance",
        heading="Provenance",
        blocks=some(
            named(
                ("made by", f"moetune {provenance.moetune_version}"),
                *(
                    (f"prices of {pool}", source)
                    for pool, source in getattr(provenance, "profile_source", NOTHING).items()
                ),
                *((name, f"SHA-256 {sha[:SHOWN_DIGITS]}…") for name, sha in hashed.items()),
                depth=Depth.PAGE,
            ),
            Notes(notes=listed, counted_as="notes") if listed else None,
        ),
    )
