"""The band of a target: that of runs of its own layers, or its generation's."""

from dataclasses import replace

import numpy as np
import pytest

from tests.expect import refused
from tuner.costs.train.calibration import (
    GENERIC_BAND,
    Band,
    Correction,
    Residuals,
    Where,
    constants_of,
)
from tuner.devices.catalogue import find_device
from tuner.engines.targets import PROGRAMS, programs
from tuner.errors import SpecError
from tuner.prices.train.constants import Software
from tuner.search.train.regimes import priced_release, regime_of, step_band
from tuner.spec.goal import TrainEngine

OF_GENERATION = (0.6, 1.6)


def _band(low: float, high: float, **where: str) -> Band:
    return Band(where=Where(**where), low=low, high=high, groups=20, rows=20)


RESIDUALS = Residuals(
    origin="test",
    data_sha256="",
    rows=20,
    groups=20,
    stated_ratio=0.9,
    covered_ratio=None,
    corrections=(),
    bands=(
        _band(0.92, 1.08, generation="hopper", family="llm-foundry"),
        _band(0.7, 1.4, generation="hopper", family="nemo"),
        _band(*OF_GENERATION, generation="hopper"),
    ),
)


def _target_band(target: str) -> tuple[float, float]:
    sheet = find_device("h100-sxm")
    return step_band(PROGRAMS[target], sheet, RESIDUALS, precision="bf16", has_experts=True).edges


def test_deepspeed_is_priced_as_plain_pytorch_without_its_band() -> None:
    assert (
        regime_of(
            PROGRAMS["deepspeed"], find_device("h100-sxm"), precision="bf16", has_experts=True
        ).family
        != ""
    )
    assert _target_band("deepspeed") == OF_GENERATION


def test_the_reference_step_has_the_band_of_its_generation() -> None:
    assert _target_band("reference") == OF_GENERATION


def test_megatron_has_the_band_of_its_containers() -> None:
    assert _target_band("megatron-lm") == (0.7, 1.4)
    assert _target_band("megatron-bridge") == (0.7, 1.4)


def test_the_band_of_fp32_says_why_it_is_wide() -> None:
    sheet = find_device("h100-sxm")
    for precision, edges, word in (("fp32", GENERIC_BAND, "fp32"), ("bf16", (0.7, 1.4), "")):
        band = step_band(
            PROGRAMS["megatron-lm"], sheet, RESIDUALS, precision=precision, has_experts=True
        )
        assert band.edges == edges
        assert word in band.note


RELEASES = {
    "nemo": ("25.11", "26.02", "26.04", "26.04.01", "26.06", "26.08"),
    "torchtitan": ("2024.12", "2025.06"),
}


def _residuals(**changes: object) -> Residuals:
    plain = Residuals(
        origin="test",
        data_sha256="",
        rows=2,
        groups=2,
        stated_ratio=0.9,
        covered_ratio=None,
        corrections=(
            Correction(where=Where(family="nemo", release="26.04"), factors={"matmul_ratio": 0.9}),
        ),
        bands=(),
        releases=RELEASES,
    )
    return plain.model_copy(update=changes)


def test_without_an_engine_the_newest_release_of_the_target_is_priced_and_said() -> None:
    expected = {
        "megatron-bridge": "26.08",
        "megatron-bridge-26.04": "26.04.01",
        "megatron-bridge-26.02": "26.02",
        "torchtitan": "2025.06",
        "megatron-lm": "",
        "deepspeed": "",
    }
    found = {name: priced_release(programs((name,)), None, _residuals()) for name in expected}
    assert {name: one.release for name, one in found.items()} == expected
    assert all(not one.stated for one in found.values())
    assert "26.08, the newest published; set goal.engine" in found["megatron-bridge"].note
    assert "calibrated on all published releases of nemo" in found["megatron-lm"].note
    assert "constants of llm-foundry: no run of deepspeed is published" in found["deepspeed"].note
    assert priced_release(programs(("megatron-bridge",)), None, None).note == ""


def test_a_stated_release_changes_constants_software_and_band() -> None:
    residuals = _residuals()
    priced = priced_release(
        programs(("megatron-lm",)), TrainEngine(name="nemo", version="26.04"), residuals
    )
    assert (priced.release, priced.stated) == ("26.04", "26.04")
    sheet = find_device("h100-sxm")
    plain = regime_of(PROGRAMS["megatron-lm"], sheet, precision="bf16", has_experts=False)
    stated = regime_of(
        PROGRAMS["megatron-lm"], sheet, precision="bf16", has_experts=False, release=priced.release
    )
    assert (plain.software, stated.software) == (Software.MEGATRON_2025, Software.MEGATRON_2026)
    before, after = (
        float(np.ravel(constants_of([one], residuals).matmul_ratio)[0])
        for one in (replace(stated, release=""), stated)
    )
    assert after == pytest.approx(0.9 * before)


def test_only_a_stated_release_has_its_own_band() -> None:
    residuals = _residuals(
        bands=(
            _band(0.5, 2.0, family="nemo", generation="hopper"),
            _band(0.9, 1 / 0.9, family="nemo", generation="hopper", release="26.08"),
        )
    )
    sheet, named = find_device("h100-sxm"), programs(("megatron-bridge",))
    for engine, low in ((None, 0.5), (TrainEngine(name="megatron-bridge", version="26.08"), 0.9)):
        stated = priced_release(named, engine, residuals).stated
        found = step_band(
            named.first, sheet, residuals, precision="bf16", has_experts=True, release=stated
        )
        assert found.edges[0] == low


def test_what_nobody_published_or_the_target_does_not_launch_is_refused_with_what_is_known() -> (
    None
):
    rows = {
        ("megatron-bridge", "megatron-bridge", "26.04"): "known: 26.06, 26.08",
        ("megatron-bridge", "nemo", "27.01"): "known: 26.06, 26.08",
        ("megatron-bridge", "torchtitan", "2025.06"): "not what megatron-bridge launches",
        ("deepspeed", "llm-foundry", "1"): "not what deepspeed launches; known: deepspeed",
    }
    for (target, name, version), words in rows.items():
        with refused(SpecError, words, match=r"goal\.engine"):
            priced_release(
                programs((target,)), TrainEngine(name=name, version=version), _residuals()
            )


def test_a_stated_release_that_cannot_matter_is_said_to_change_nothing() -> None:
    engine = TrainEngine(name="deepspeed", version="0.19")
    assert "changes nothing" in priced_release(programs(("deepspeed",)), engine, _residuals()).note
    old = _residuals(releases={})
    told = priced_release(
        programs(("torchtitan",)), TrainEngine(name="torchtitan", version="1"), old
    )
    assert "changes nothing" in told.note


def test_the_way_out_of_an_unknown_release_says_what_is_priced_without_one() -> None:
    engine = TrainEngine(name="nemo", version="1.0")
    for target, usual in (("megatron-bridge", "the newest"), ("megatron-lm", "all of them")):
        with pytest.raises(SpecError, match=f"leave goal.engine out for {usual}"):
            priced_release(programs((target,)), engine, _residuals())
