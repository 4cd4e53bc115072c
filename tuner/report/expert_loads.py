"""Expert loads of a training plan: assumed by its prices, and measured by its trials."""

from collections.abc import Sequence

import numpy as np

from profilers.steps.config import LayerKind
from tuner.arrays import Floats
from tuner.config.train import TrainDecision
from tuner.plans.train import Plan
from tuner.report.content import Depth, Section
from tuner.report.heat_map import HeatMap, heat_map_figure
from tuner.verify.records import TrialRecord


def loads_section(
    plan: Plan, trials: Sequence[TrialRecord], winner: TrainDecision | None
) -> Section | None:
    """Draw expert loads by layer; None if routing was assumed balanced and there were no trials."""
    layers = tuple(index for index, kind in enumerate(plan.model.layers) if kind is LayerKind.MOE)
    ran = next(
        (trial for trial in trials if trial.decision == winner and trial.measured_loads), None
    )
    panels: dict[str, Floats] = {}
    measured = () if ran is None else ran.measured_loads
    for name, loads in (("priced with", plan.load_ratio), ("measured", measured)):
        loads_LE = np.array(loads, dtype=np.float64, ndmin=2)
        is_comparable = all(panel.shape == loads_LE.shape for panel in panels.values())
        has_all = len(loads) == len(layers) and bool(loads_LE.any(axis=1).all())
        if is_comparable and has_all and loads_LE.size:
            panels[name] = loads_LE / loads_LE.mean(axis=1, keepdims=True)
    if not panels:
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
