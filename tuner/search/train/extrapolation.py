"""Unmeasured operations behind a plan from a profile, and the error band that they widen.

The chosen decision is priced three times:

    as planned      which shapes and collectives lay outside the measured range
    stretched       everything extrapolated takes `EXTRAPOLATED_FACTOR` as long
    on datasheets   as if nothing had been measured

The band of a regime (calibration.py) was fitted on published runs priced by datasheets. Measured
kernels were never compared with whole runs there. The band therefore covers both predictions, and
is wider by what is extrapolated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from tuner.config.shapes import Hardware, Stages
from tuner.plans.train import Band, Provenance
from tuner.prices.measured import MeasuredPrices
from tuner.prices.train.collective_ratios import CollectiveRatios, MeasuredHardware
from tuner.prices.train.collectives import MERGED
from tuner.search.train.candidates import Candidates
from tuner.search.train.problem import TrainProblem
from tuner.search.train.search_result import SearchOutcome, price_in_layout
from tuner.units import format_ratio, format_s

EXTRAPOLATED_FACTOR: Final = 1.4
"""Factor within which a curve of GEMMs or attention on H200 that has not seen the largest sizes
(one to three octaves) predicts nine of ten of them (aiconfigurator's tables, vLLM 0.24)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtrapolationWeight:
    """Share of a plan's price that was extrapolated."""

    outside: tuple[str, ...]
    """Operations and collectives of the decision beyond what was measured."""
    stretch: float
    """Step time over the planned one if everything extrapolated takes `EXTRAPOLATED_FACTOR` as
    long."""
    datasheet_s: float
    """Seconds of a step of the same decision on the datasheet alone."""
    measured_s: float

    def widened(self, band: Band) -> Band:
        """Widen a band of measured over predicted seconds."""
        ratio = self.datasheet_s / self.measured_s
        return band[0] * min(1.0, ratio) / self.stretch, band[1] * max(1.0, ratio) * self.stretch


def weigh_extrapolation(
    search: SearchOutcome, candidate: Candidates, stages: Stages
) -> ExtrapolationWeight | None:
    """Measure how much of a decision's price was extrapolated; None without a profile."""
    problem = search.problem
    prices, hardware = problem.prices, problem.hardware
    if not isinstance(prices, MeasuredPrices):
        return None

    def step_s(variant: TrainProblem) -> float:
        detail = price_in_layout(replace(search, problem=variant), candidate, stages)
        return float(np.asarray(detail.step.step_s).ravel()[0])

    def stretched(factor: float) -> tuple[TrainProblem, MeasuredPrices, dict[str, str]]:
        stretched_prices = replace(prices, stretch=factor, extrapolation_counts={})
        links: dict[str, str] = {}
        machine = hardware
        if isinstance(hardware, MeasuredHardware):
            ratios = replace(hardware.collectives, stretch=factor, outside=links)
            machine = replace(hardware, collectives=ratios)
        return replace(problem, prices=stretched_prices, hardware=machine), stretched_prices, links

    as_found, measured_prices, links = stretched(1.0)
    measured_s = step_s(as_found)
    longer_s = step_s(stretched(EXTRAPOLATED_FACTOR)[0])
    sheet_s = step_s(replace(problem, prices=None, hardware=plain(hardware)))
    return ExtrapolationWeight(
        outside=list_extrapolated(measured_prices, links),
        stretch=longer_s / measured_s,
        datasheet_s=sheet_s,
        measured_s=measured_s,
    )


def list_extrapolated(prices: MeasuredPrices, links: Mapping[str, str]) -> tuple[str, ...]:
    """Name the operations outside the measured range."""
    return (
        *(f"{name} ({format_ratio(share)} of shapes)" for name, share in prices.outside.items()),
        *(f"{kind} ({reason})" for kind, reason in links.items()),
    )


def extrapolated_by_search(problem: TrainProblem) -> tuple[str, ...]:
    """Name the operations outside the measured range in a whole search."""
    if not isinstance(problem.prices, MeasuredPrices):
        return ()
    hardware = problem.hardware
    links = hardware.collectives.outside if isinstance(hardware, MeasuredHardware) else {}
    return list_extrapolated(problem.prices, links)


def plain(hardware: Hardware) -> Hardware:
    """Return a machine without its measured collectives."""
    if not isinstance(hardware, MeasuredHardware):
        return hardware
    return Hardware(**{field.name: getattr(hardware, field.name) for field in fields(Hardware)})


def from_datasheet(
    prices: MeasuredPrices, hardware: Hardware, *, is_moe: bool, num_devices: int
) -> tuple[str, ...]:
    """Operations that the profile lacks; collectives are named by where they run."""
    lacking = [name for name in prices.missing if is_moe or not name.startswith("grouped_gemm")]
    ratios = CollectiveRatios(groups={})
    if isinstance(hardware, MeasuredHardware):
        ratios = hardware.collectives
    places = [("inside a scale-up domain", True)]
    if num_devices > float(hardware.domain):
        places.append(("between domains", False))
    kinds: tuple[str, ...] = ("all_gather", "all_reduce", "send_recv")
    kinds += ("all_to_all", MERGED) if is_moe else ()
    collectives = [
        f"{kind} {words}"
        for kind in kinds
        for words, is_inside in places
        if not any(group.is_inside == is_inside for group in ratios.groups.get(kind, ()))
    ]
    return (*lacking, *collectives)


def extrapolation_notes(
    lacking: tuple[str, ...], weight: ExtrapolationWeight | None
) -> tuple[str, ...]:
    """Say what a price rests on, and how it differs from the datasheet's."""
    notes = []
    if lacking:
        notes.append(f"the profile lacks, and the datasheet prices: {', '.join(lacking)}")
    if weight is not None:
        ratio = format_ratio(weight.measured_s / weight.datasheet_s)
        notes.append(
            f"on the datasheet alone the same decision takes {format_s(weight.datasheet_s)}; with "
            f"the profile {ratio} of that, and the error band covers both"
        )
        if weight.stretch > 1.0005:
            wider = format_ratio(weight.stretch - 1.0)
            notes.append(f"the error band is wider by {wider} for what is extrapolated")
    return tuple(notes)


def with_extrapolation_notes(
    provenance: Provenance, problem: TrainProblem, weight: ExtrapolationWeight | None
) -> Provenance:
    """Add what the profile lacks and what was extrapolated."""
    if not isinstance(problem.prices, MeasuredPrices):
        return provenance
    lacking = from_datasheet(
        problem.prices,
        problem.hardware,
        is_moe=problem.model.moe is not None,
        num_devices=problem.num_devices,
    )
    return provenance.model_copy(
        update={
            "notes": provenance.notes + extrapolation_notes(lacking, weight),
            "extrapolated": provenance.extrapolated + (weight.outside if weight else ()),
        }
    )
