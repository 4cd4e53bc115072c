"""Extrapolations of an estimate on a profile, and how they widen its error band."""

from dataclasses import replace

from tuner.estimate.configuration import Configuration
from tuner.estimate.prices import PricingSetup, price_configurations, prices_and_hardware
from tuner.search.train.extrapolation import (
    EXTRAPOLATED_FACTOR,
    ExtrapolationWeight,
    extrapolation_notes,
    from_datasheet,
    list_extrapolated,
)


def band_and_notes(
    configuration: Configuration, setup: PricingSetup
) -> tuple[tuple[float, float], float, tuple[str, ...]]:
    """Return the band of measured over predicted seconds, and notes on it.

    Between the two: the factor by which extrapolation alone moves the band's edges.
    """
    band, widening = setup.band(configuration)
    widenings = (widening,) if widening else ()
    if setup.measured is None:
        return band, 1.0, widenings

    def step_s(variant: PricingSetup) -> float:
        return price_configurations((configuration,), variant)[0].step_s

    baseline = replace(setup, extrapolation_counts={}, extrapolated_collectives={})
    measured_s = step_s(baseline)
    stretched = replace(
        setup, stretch=EXTRAPOLATED_FACTOR, extrapolation_counts={}, extrapolated_collectives={}
    )
    prices, hardware = prices_and_hardware(configuration, baseline)
    if prices is None:
        return band, 1.0, widenings
    weight = ExtrapolationWeight(
        outside=list_extrapolated(prices, baseline.extrapolated_collectives),
        stretch=step_s(stretched) / measured_s,
        datasheet_s=step_s(replace(setup, measured=None)),
        measured_s=measured_s,
    )
    lacking = from_datasheet(
        prices,
        hardware,
        is_moe=setup.model.moe is not None,
        num_devices=configuration.devices,
    )
    header = setup.measured.profile.header
    notes = [f"profile: {setup.measured.source} on {header.machine.device}"]
    notes += extrapolation_notes(lacking, weight)
    if weight.outside:
        notes.append(f"priced outside the measured range: {', '.join(weight.outside)}")
    return weight.widened(band), weight.stretch, (*widenings, *notes)
