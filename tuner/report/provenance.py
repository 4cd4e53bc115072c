"""The provenance of a plan, as a section."""

from collections.abc import Mapping, Sequence

from tuner.report.content import Cell, Depth, NamedValues, Notes, Section, some, word

SHOWN_DIGITS = 16
"""Characters of a SHA-256 that are shown."""


def provenance_section(
    *,
    version: str,
    spec_sha256: str,
    sources: Mapping[str, str],
    hashes: Mapping[str, str],
    notes: Sequence[str],
    more: Sequence[tuple[str, Cell]] = (),
) -> Section:
    """Say which version made the plan, and from which inputs."""
    facts = [
        ("made by", word(f"moetune {version}")),
        ("spec", word(f"SHA-256 {spec_sha256[:SHOWN_DIGITS]}…")),
        *((f"prices of {pool}", word(source)) for pool, source in sources.items()),
        *(
            (f"input {name}", word(f"SHA-256 {sha[:SHOWN_DIGITS]}…"))
            for name, sha in hashes.items()
        ),
        *more,
    ]
    return Section(
        name="provenance",
        heading="Provenance",
        blocks=some(
            NamedValues(facts=tuple(facts), depth=Depth.PAGE),
            Notes(notes=tuple(notes), counted_as="notes") if notes else None,
        ),
    )
