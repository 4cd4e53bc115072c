"""Expert loads of a training plan: assumed by its prices, and measured by its trials."""

from collections.abc import Mapping, Sequence

import numpy as np

from profilers.steps.config import LayerKind
from tuner.arrays import Floats
from tuner.config.train import TrainDecision
from tuner.plans.train import Plan
from tuner.report.content import Depth, Section
from tuner.report.heat_map import HeatMap
from tuner.report.heat_map_figure import heat_map_figure
from tuner.verify.records import TrialRecord


def loads_section(
    plan: Plan, trials: Sequence[TrialRecord], winner: TrainDecision | None
) -> Section | None:
    """Draw expert loads by layer; None if routing was assumed balanced and there were no trials."""
    layers = tuple(index for index, kind in enumerate(plan.model.layers) if kind is LayerKind.MOE)
    panels = dict(_panels(plan, trials, winner))
    panels = {
        name: panel
        for name, panel in panels.items()
        if panel.ndim == 2 and len(panel) == len(layers)
    }
    shape = next((panel.shape for panel in panels.values()), None)
    panels = {name: panel for name, panel in panels.items() if panel.shape == shape}
    if shape is None or 0 in shape:
        return None
    heat = HeatMap(title="experts", layer_ids=layers, panels=panels)
    return Section(
        name="loads",
        heading="Expert loads",
        depth=Depth.PAGE,
        blocks=(
            heat_map_figure(
                heat,
                name="expert-loads",
                title="Expert loads",
                reading="Token copies per expert over the layer's mean: as priced in the plan, and "
                "as measured in the last step of the fastest trial.",
                across="expert",
            ),
        ),
    )


def _panels(
    plan: Plan, trials: Sequence[TrialRecord], winner: TrainDecision | None
) -> Mapping[str, Floats]:
    loads_LE: dict[str, Floats] = {}
    if plan.load_ratio:
        loads_LE["priced with"] = np.array(plan.load_ratio, dtype=np.float64)
    ran = next((one for one in trials if one.decision == winner and one.measured_loads), None)
    if ran is not None:
        loads_LE["measured"] = np.array(ran.measured_loads, dtype=np.float64)
    means_L1 = {name: loads.mean(axis=1, keepdims=True) for name, loads in loads_LE.items()}
    return {
        name: loads / means_L1[name]
        for name, loads in loads_LE.items()
        if (means_L1[name] > 0.0).all()
    }
