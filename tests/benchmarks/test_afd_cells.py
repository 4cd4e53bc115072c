"""Properties of the AFD table that hold whatever its figures."""

from tests.benchmarks.afd_cells import REQUESTS, rows


def test_a_cell_takes_longer_than_as_many_devices_that_hold_both() -> None:
    result = list(rows())
    assert {requests for *_, requests, _ in result} == set(REQUESTS)
    for name, attention, experts, requests, (one, halves, together) in result:
        at = f"{name} {attention} + {experts}, {requests:.0f} requests"
        # Of a step without halves one side is idle while the other works.
        # Devices that hold both wait for their host too where they span nodes.
        assert one > together, at
        assert halves > together, at
