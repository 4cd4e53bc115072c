"""What an estimate on a profile rests on that was not measured, and how wide its band becomes."""

from dataclasses import replace

from tuner.estimate.configuration import Configuration
from tuner.estimate.prices import Bench, measured_at, priced
from tuner.planner.analytic.extrapolation import (
    EXTRAPOLATED_FACTOR,
    Weighed,
    from_datasheet,
    notes_of,
    outside_of,
)


def band_and_notes(
    configuration: Configuration, bench: Bench
) -> tuple[tuple[float, float], float, tuple[str, ...]]:
    """Return the band of measured over predicted seconds, and what a reader must know of it.

    Between the two: the factor by which extrapolation alone moves the band's edges.
    """
    band = bench.band(configuration)
    if bench.measured is None:
        return band, 1.0, ()

    def step_s(asked: Bench) -> float:
        return priced((configuration,), asked)[0].step_s

    as_found = replace(bench, asked={}, beyond={})
    measured_s = step_s(as_found)
    longer = replace(bench, stretch=EXTRAPOLATED_FACTOR, asked={}, beyond={})
    kernels, hardware = measured_at(configuration, as_found)
    if kernels is None:
        return band, 1.0, ()
    found = Weighed(
        outside=outside_of(kernels, as_found.beyond),
        stretch=step_s(longer) / measured_s,
        datasheet_s=step_s(replace(bench, measured=None)),
        measured_s=measured_s,
    )
    lacking = from_datasheet(
        kernels,
        hardware,
        is_moe=bench.model.moe is not None,
        num_devices=configuration.devices,
    )
    header = bench.measured.profile.header
    notes = [f"profile: {bench.measured.source} on {header.machine.device}"]
    notes += notes_of(lacking, found)
    if found.outside:
        notes.append(f"priced outside the measured range: {', '.join(found.outside)}")
    return found.widened(band), found.stretch, tuple(notes)
