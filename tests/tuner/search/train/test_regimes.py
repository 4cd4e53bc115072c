"""The band of a target: that of runs of its own layers, or its generation's."""

from tuner.costs.train.calibration import Band, Residuals, Where
from tuner.devices.catalogue import find_device
from tuner.search.train.regimes import band_for, regime_of

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
    return band_for((target,), find_device("h100-sxm"), RESIDUALS, precision="bf16")


def test_deepspeed_is_priced_as_plain_pytorch_without_its_band() -> None:
    assert regime_of(("deepspeed",), find_device("h100-sxm"), precision="bf16").family != ""
    assert _target_band("deepspeed") == OF_GENERATION


def test_the_reference_step_has_the_band_of_its_generation() -> None:
    assert _target_band("reference") == OF_GENERATION


def test_megatron_has_the_band_of_its_containers() -> None:
    assert _target_band("megatron-lm") == (0.7, 1.4)
    assert _target_band("megatron-bridge") == (0.7, 1.4)
