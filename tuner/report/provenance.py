"""The provenance of a plan, as a section."""

from collections.abc import Mapping, Sequence

from tuner.report.content import Cell, Depth, Notes, Section, named, some

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
    hashed = {"spec": spec_sha256} | {f"input {name}": sha for name, sha in hashes.items()}
    return Section(
        name="provenance",
        heading="Provenance",
        blocks=some(
            named(
                ("made by", f"moetune {version}"),
                *((f"prices of {pool}", source) for pool, source in sources.items()),
                *((name, f"SHA-256 {sha[:SHOWN_DIGITS]}…") for name, sha in hashed.items()),
                *more,
                depth=Depth.PAGE,
            ),
            Notes(notes=tuple(notes), counted_as="notes") if notes else None,
        ),
    )
