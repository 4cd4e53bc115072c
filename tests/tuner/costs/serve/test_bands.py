"""Bands around predictions."""

import itertools
from collections.abc import Iterator
from typing import get_args

import pytest

from tests.tuner.decoders import DEEPSEEK_V3, MIXTRAL_8X7B, QWEN3_32B
from tuner.costs.serve.bands import (
    NEW_VENDOR,
    Bands,
    LatencyBand,
    bands_of,
    joined,
    ratio_bands,
    shipped,
)
from tuner.costs.serve.decoder import Decoder
from tuner.spec.serving.goal import EngineName, Mode

PUBLISHED = {"vllm": "0.19.0", "sglang": "0.5.9", "trtllm": "1.0.0rc3"}
"""A release of each engine that rows carry."""


def found(
    engine: str,
    *,
    mode: Mode = "aggregated",
    release: str | None = None,
    generation: str = "blackwell",
    has_kernels: bool = True,
    decoder: Decoder | None = None,
) -> Bands:
    return bands_of(
        engine,
        release=PUBLISHED.get(engine, "") if release is None else release,
        generation=generation,
        mode=mode,
        has_kernels=has_kernels,
        decoder=decoder,
    )


def every() -> Iterator[Bands]:
    for engine, mode, has in itertools.product(get_args(EngineName), get_args(Mode), (True, False)):
        yield found(engine, mode=mode, has_kernels=has)


def is_wider(one: Bands, other: Bands) -> bool:
    pairs = ((one.ttft, other.ttft), (one.tpot, other.tpot))
    return all(
        first.low_ratio < second.low_ratio and first.high_ratio > second.high_ratio
        for first, second in pairs
    )


def test_a_band_is_seconds_around_a_prediction() -> None:
    assert LatencyBand(low_ratio=0.5, high_ratio=3.0).around(2.0) == (1.0, 6.0)


def test_every_regime_has_a_band_for_new_pairs_that_holds_the_prediction() -> None:
    for bands in every():
        assert bands.is_new
        for band in (bands.ttft, bands.tpot):
            low, high = band.around(1.0)
            assert 0.0 < low <= 1.0 <= high
            assert low < high


def test_what_is_predicted_from_datasheets_may_take_longer() -> None:
    for engine in get_args(EngineName):
        # SGLang's are as wide.
        with_kernels = found(engine).tpot.high_ratio
        assert found(engine, has_kernels=False).tpot.high_ratio > 0.99 * with_kernels


def test_a_release_a_generation_or_a_mode_without_any_row_widens_the_band_and_is_named() -> None:
    for engine, has_kernels in itertools.product(get_args(EngineName), (True, False)):
        plain = found(engine, has_kernels=has_kernels)
        assert plain.lacking == (f"this model on {engine}",)
        cases: dict[str, Bands] = {
            f"{engine} 99.0": found(engine, release="99.0", has_kernels=has_kernels),
            "ampere devices": found(engine, generation="ampere", has_kernels=has_kernels),
            "cdna3 devices": found(engine, generation="cdna3", has_kernels=has_kernels),
            "mode shared_device": found(engine, mode="shared_device", has_kernels=has_kernels),
            "mode attention_expert": found(
                engine, mode="attention_expert", has_kernels=has_kernels
            ),
        }
        for name, bands in cases.items():
            assert bands.lacking == (f"this model on {engine}", name)
            assert is_wider(bands, plain), name
            assert name in bands.note
            assert bands.note.startswith("no published run of this model on")
    assert is_wider(
        found("vllm", release="99.0", generation="ampere"), found("vllm", release="99.0")
    )


QWEN3_32B_BANDS = found("vllm", decoder=QWEN3_32B, generation="hopper")


def test_a_pair_whose_runs_are_all_of_one_generation_is_new_to_others() -> None:
    assert (QWEN3_32B_BANDS.lacking, QWEN3_32B_BANDS.note) == ((), "")
    other = found("vllm", decoder=QWEN3_32B, generation="blackwell")
    assert other.lacking == ("blackwell devices",)
    assert is_wider(other, QWEN3_32B_BANDS)


def test_a_device_without_runs_has_neither_the_band_of_a_pair_elsewhere_nor_its_vendors() -> None:
    ampere, cdna3 = (
        found("vllm", decoder=QWEN3_32B, generation=name) for name in ("ampere", "cdna3")
    )
    assert is_wider(ampere, QWEN3_32B_BANDS)
    assert is_wider(ampere, found("vllm", generation="hopper"))
    assert is_wider(cdna3, ampere)
    assert cdna3.tpot.high_ratio == pytest.approx(NEW_VENDOR * ampere.tpot.high_ratio)


def test_bands_of_several_pools_name_what_each_lacks_once() -> None:
    one, other = found("vllm", release="99.0"), found("vllm", generation="ada")
    both = joined([one, other, one])
    assert both.lacking == ("this model on vllm", "vllm 99.0", "ada devices")
    assert both.ttft.high_ratio == pytest.approx(max(one.ttft.high_ratio, other.ttft.high_ratio))


def test_an_engine_without_rows_is_as_uncertain_as_new_pairs_of_all_others() -> None:
    new = found("unpublished", decoder=DEEPSEEK_V3)
    assert new.is_new
    assert new.lacking == ("this model on unpublished",)
    for engine in get_args(EngineName):
        one = found(engine)
        assert new.tpot.low_ratio <= one.tpot.low_ratio
        assert new.ttft.high_ratio >= one.ttft.high_ratio


def test_a_pair_is_known_by_its_network_and_its_engine_whatever_the_model_is_called() -> None:
    known = {("vllm", QWEN3_32B), ("sglang", DEEPSEEK_V3), ("trtllm", DEEPSEEK_V3)}
    new = {("vllm", DEEPSEEK_V3), ("vllm", MIXTRAL_8X7B)}
    for engine, decoder in known | new:
        assert found(engine, decoder=decoder).is_new is ((engine, decoder) in new)


def test_most_known_pairs_have_a_narrower_band_than_new_ones_of_their_engine() -> None:
    own = [one for one in shipped().bands if (one.mode, one.kernels) == ("aggregated", "tables")]
    new = {one.engine: one for one in own if not one.network}
    for metric in ("ttft", "tpot"):
        narrower = [
            getattr(one, metric)[1] / getattr(one, metric)[0]
            < getattr(new[one.engine], metric)[1] / getattr(new[one.engine], metric)[0]
            for one in own
            if one.network
        ]
        assert sum(narrower) > len(narrower) / 2


def test_what_ships_holds_pairs_that_were_left_out_as_often_as_the_target_asks() -> None:
    whole = {(one.mode, one.kernels): one for one in shipped().coverages}["aggregated", "tables"]
    assert whole.pairs >= 13
    assert whole.ttft >= 0.78
    assert whole.tpot >= 0.78


def test_ratios_of_two_layouts_are_known_better_than_either() -> None:
    ttft, tpot = ratio_bands()
    for engine in get_args(EngineName):
        bands = found(engine)
        for ratio, one in ((ttft, bands.ttft), (tpot, bands.tpot)):
            assert ratio.high_ratio / ratio.low_ratio < one.high_ratio / one.low_ratio
    assert shipped().ratios.tpot_covered >= 0.7
