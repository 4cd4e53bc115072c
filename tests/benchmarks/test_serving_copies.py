"""The smallest case of the benchmark: 24 devices, over which 256 experts are even with copies."""

from tests.benchmarks import serving_copies


def test_copies_of_experts_let_24_devices_serve_more_than_16() -> None:
    without, with_copies = (
        serving_copies.planned("h100-sxm", 3, None, is_recorded=False, has_copies=has_copies)
        for has_copies in (False, True)
    )
    assert without.decision is not None
    assert with_copies.decision is not None
    assert without.decision.num_devices == 16
    assert with_copies.decision.num_devices == 24
    assert with_copies.decision.instances[0].redundant_experts == 8
    assert serving_copies.worth(with_copies) > 1.2 * serving_copies.worth(without)
