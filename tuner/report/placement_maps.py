"""Heat maps of a placement's plan: load by layer and rank, before and after, for each workload."""

from collections.abc import Mapping

import numpy as np

from solvers.placement.ranks import Placement
from tuner.place_plan import PlacePlan
from tuner.planner.place.comparing import judge_workload
from tuner.planner.place.evidence import evidence_of
from tuner.planner.place.notes import dispatch_of
from tuner.report.heat_map import HeatMap, heat_map_json, heat_map_svg
from tuner.spec.place_read import PlaceSpec


def heat_maps(spec: PlaceSpec, plan: PlacePlan) -> Mapping[str, str]:
    """Return one picture and one JSON file a workload, by file name; nothing without a plan.

    A cell is the mean over judged passes of a rank's load over the layer's mean.
    """
    if plan.decision is None:
        return {}
    chosen = Placement(expert_LS=np.array(plan.decision.physical_to_logical, dtype=np.int64))
    dispatch = dispatch_of(spec)
    files = {}
    for number, one in enumerate(evidence_of(spec)):
        maps = {
            title: judge_workload(spec, one, placement, dispatch).mean_ratio_LG(spec.ranks)
            for title, placement in (("before", spec.current), ("after", chosen))
        }
        heat = HeatMap(title=one.name, layer_ids=spec.layer_ids, panels=maps)
        files[f"heat_map_{number}.svg"] = heat_map_svg(heat)
        files[f"heat_map_{number}.json"] = heat_map_json(heat)
    return files
