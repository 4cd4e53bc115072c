"""How sure a change is to beat a launch, and which release both are priced for."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from tuner.engines.megatron_lm import read as megatron
from tuner.errors import SpecError
from tuner.estimate.estimate import estimate, shipped_residuals
from tuner.estimate.records import Change, Estimate
from tuner.spec.spec import Spec

LAUNCH = Path(__file__).parent / "launches" / "mixtral.sh"
MakeSpec = Callable[..., Spec]


def _estimated(spec: Spec) -> Estimate:
    launch = megatron.read(LAUNCH.read_text(), source=LAUNCH.name)
    return estimate(spec, launch, residuals=shipped_residuals())


def _changes(result: Estimate) -> list[Change]:
    both = [one for one in (result.smallest_change, result.best_pair) if one is not None]
    return [*result.changes, *both]


def test_every_change_has_a_band_of_its_ratio_narrower_than_a_time_s(spec_of: MakeSpec) -> None:
    result = _estimated(spec_of("mixtral-8x7b", nodes=8))
    low, high = result.step_time_s_band
    wrong = []
    for one in _changes(result):
        lowest, highest = one.ratio_band
        holds = lowest < 1.0 - one.gain_ratio < highest
        is_narrow = highest / lowest < (high / low) ** 0.5
        is_tuned = one.within_band == (lowest <= 1.0 <= highest)
        if not (holds and is_narrow and is_tuned):
            wrong.append(one)
    assert result.changes
    assert not wrong


def test_the_release_that_the_goal_names_is_priced_and_said(spec_of: MakeSpec) -> None:
    plain = _estimated(spec_of("mixtral-8x7b", nodes=8))
    named = _estimated(
        spec_of("mixtral-8x7b", nodes=8, engine={"name": "nemo", "version": "25.11"})
    )
    assert any("on all published releases of nemo" in note for note in plain.notes)
    assert any("priced as nemo 25.11" in note for note in named.notes)
    with pytest.raises(ValidationError, match="in quotes"):
        spec_of("mixtral-8x7b", nodes=8, engine={"name": "nemo", "version": 26.04})
    assert named.step_time_s != plain.step_time_s
    with pytest.raises(SpecError, match=r"goal\.engine\.version: '1\.0' is no release"):
        _estimated(spec_of("mixtral-8x7b", nodes=8, engine={"name": "nemo", "version": "1.0"}))
