"""Releases in the order in which they came out."""

from profilers.imports.releases import release_order
from tests.rows import each_row


@each_row(
    ("older", "newer"),
    [("1.3.0rc20", "1.3.0"), ("0.5.6", "0.5.6.post2"), ("0.5.9", "0.5.10"), ("1.2", "1.2.1")],
)
def test_versions_are_ordered_as_people_read_them(older: str, newer: str) -> None:
    assert release_order(older) < release_order(newer)
