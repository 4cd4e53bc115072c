import pytest
from pydantic import ValidationError

from tests.rows import each_row
from tuner.costs.reference.operations import COMMUNICATION, Part
from tuner.costs.residuals import UNKNOWN_BAND, Residual, residual_for


def _residual(**changes: float) -> Residual:
    return Residual.model_validate(
        {
            "engine": "reference",
            "release": "",
            "device_kind": "cpu",
            "band_ratio": 0.1,
            "origin": "made up",
            "num_runs": 1,
        }
        | changes
    )


def test_computation_and_communication_have_a_factor_each() -> None:
    residual = _residual(computation=2.0, communication=3.0)
    seconds: dict[str, float] = dict.fromkeys(Part, 1.0)
    corrected = residual.applied(seconds)
    assert {part for part, value in corrected.items() if value == 3.0} == COMMUNICATION
    assert {part for part, value in corrected.items() if value == 2.0} == set(Part) - COMMUNICATION


def test_an_engine_that_nobody_compared_is_not_corrected_and_says_so() -> None:
    residual = residual_for("no such engine", device="any", device_kind="cpu")
    assert (residual.computation, residual.communication, residual.num_runs) == (1.0, 1.0, 0)
    assert residual.band_ratio == UNKNOWN_BAND
    assert "no run" in residual.origin


def test_runs_inside_a_node_say_nothing_about_links_between_nodes() -> None:
    inside, between = (
        residual_for("reference", device="AMD EPYC", device_kind="cpu", nodes=nodes)
        for nodes in (1, 2)
    )
    assert inside.num_runs > 0
    assert (between.computation, between.communication, between.num_runs) == (1.0, 1.0, 0)
    assert "several nodes" in between.origin


@each_row("changes", [{"computation": 0.0}, {"band_ratio": 0.0}])
def test_a_factor_of_nothing_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        _residual(**changes)
