"""Heat maps of a placement's plan: load by layer and rank, before and after, for each workload.

Written beside the plan as JSON, and read back for its report.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from profilers.routing.recording import numbers
from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Placement
from tuner.errors import PlanUnreadableError, SpecError
from tuner.plans.place import PlacePlan
from tuner.report.heat_map import HeatMap, heat_map_json
from tuner.search.place.dispatch_choice import planned_dispatch
from tuner.search.place.evaluation import MOST_SOLVED, evaluate
from tuner.search.place.evidence import split_recordings, spread_passes
from tuner.spec.files import read_json_object
from tuner.spec.place_spec import PlaceSpec

MOST_MAPS: Final = 12
"""Maps that a report reads back."""
MOST_MAP_BYTES: Final = 64 * 2**20
"""Bytes of one heat-map file, at most."""


def heat_maps(spec: PlaceSpec, plan: PlacePlan) -> Mapping[str, str]:
    """Return one JSON file per workload, by file name; nothing without a plan.

    A cell is a rank's load over the layer's mean, averaged over hold-out passes.
    """
    if plan.decision is None:
        return {}
    chosen = Placement(expert_LS=np.array(plan.decision.physical_to_logical, dtype=np.int64))
    compared = () if plan.predicted is None else plan.predicted.dispatches
    dispatch = compared[0].rule if compared else planned_dispatch(spec)
    files = {}
    for number, evidence in enumerate(split_recordings(spec)):
        is_solved = dispatch in PASS_BY_PASS
        shown_PLE = (
            spread_passes(evidence.holdout_PLE, MOST_SOLVED) if is_solved else evidence.holdout_PLE
        )
        maps = {
            title: evaluate(
                placement, load_PLE=shown_PLE, ranks=ranks, dispatch=dispatch
            ).mean_ratio_LG(ranks)
            for title, placement, ranks in (
                ("before", spec.current, spec.current_ranks),
                ("after", chosen, spec.ranks),
            )
        }
        heat = HeatMap(title=evidence.name, layer_ids=spec.layer_ids, panels=maps)
        files[f"heat_map_{number}.json"] = heat_map_json(heat)
    return files


def read_heat_maps(folder: Path, names: Sequence[str]) -> tuple[HeatMap, ...]:
    """Read back the heat maps that a plan names, in the order of its workloads.

    Raises:
        PlanUnreadableError: one is missing or damaged.
    """
    matches = (re.fullmatch(r"report/heat_map_(\d+)\.json", name) for name in names)
    numbers = sorted(int(match[1]) for match in matches if match)[:MOST_MAPS]
    return tuple(_read(folder / "report" / f"heat_map_{number}.json") for number in numbers)


def _read(file: Path) -> HeatMap:
    try:
        values = read_json_object(file, what="heat map", most_bytes=MOST_MAP_BYTES)
        loads = {str(name): panel["load_ratio"] for name, panel in values["panels"].items()}
        what, axes = "load_ratio", "panels layers ranks"
        load_XLG = numbers([*loads.values()], what=what, axes=axes, are_whole=False)
        return HeatMap(
            title=str(values["title"]),
            layer_ids=tuple(int(layer) for layer in values["layer_ids"]),
            panels=dict(zip(loads, load_XLG, strict=True)),
        )
    except (SpecError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanUnreadableError(f"{file}: no heat map in it; plan again") from error
