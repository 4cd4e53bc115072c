"""How far the time of one recipe differs between releases of its software.

A recipe here is a model on a machine in one layout: source, software, model, device and how many,
precision, sequence, batch, micro-batch and every degree. Flags that a release sets by itself
(recomputation, dispatcher, graphs) may differ and are part of the scatter. Of the n >= 2 releases
that published it

    spread       slowest over fastest
    one number   the error that the recipe's geometric mean has on each of its runs: a prediction
                 that knows the recipe perfectly and not the release errs as much

Beside the P90 of predictions, the P90 of "one number" says how much of a tail may be scatter; the
error of the recipes' own means says what is left, missing terms. Letters: C runs.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.backtest.columns import PublishedRun
from tuner.cli.backtest_text import percent

LAYOUT: Final = (
    *("sequence", "micro_batch", "num_microbatches", "tensor", "context", "pipeline"),
    *("virtual_pipeline", "data", "expert", "expert_tensor"),
)
"""Fields of a strategy that a recipe is known by."""
FAR: Final = 1.25
"""A spread larger than the noise of one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseScatter:
    """Recipes that were published under several releases, and how far their times differ."""

    recipes: int
    rows: int
    """Runs of these recipes."""
    spread_median: float
    """Slowest over fastest release of a recipe, median over recipes."""
    spread_p90: float
    far_ratio: float
    """Share of the recipes whose spread is more than 1.25."""
    one_number_p90_ape: float
    """Error on these runs of each recipe's geometric mean: only the scatter between releases."""
    p90_ape: float
    """Error of the predictions on these runs."""
    means_p90_ape: float
    """Error of the predictions' geometric means per recipe: without the scatter."""


def scatter_text(name: str, scatter: ReleaseScatter) -> str:
    """Return how much recipes vary between releases, and the errors on the same runs."""
    return (
        f"between releases, {name}: {scatter.recipes} recipes ran under several,"
        f" {scatter.rows} runs; slowest over fastest {scatter.spread_median:.2f} median,"
        f" {scatter.spread_p90:.2f} P90, more than 1.25 in {percent(scatter.far_ratio)} of them\n"
        f"  P90 on these runs {percent(scatter.p90_ape)}; of one number per recipe (scatter alone)"
        f" {percent(scatter.one_number_p90_ape)}; of the recipes' means (without scatter) "
        f"{percent(scatter.means_p90_ape)}"
    )


def release_scatter(runs: Sequence[PublishedRun], predicted_s_C: Floats) -> ReleaseScatter | None:
    """Return the scatter of recipes that several releases ran; None where there are none."""
    recipes = recipes_of(runs)
    if not recipes:
        return None
    measured_C = np.array([run.measured_s or np.nan for run in runs])
    spreads, single, rows, means = [], [], [], []
    for places in recipes:
        measured, error = measured_C[places], np.log(predicted_s_C[places] / measured_C[places])
        mean_s = np.exp(np.log(measured).mean())
        spreads.append(measured.max() / measured.min())
        single.extend(np.abs(mean_s / measured - 1.0))
        rows.extend(np.abs(np.expm1(error)))
        means.append(abs(np.expm1(error.mean())))
    return ReleaseScatter(
        recipes=len(recipes),
        rows=len(rows),
        spread_median=float(np.median(spreads)),
        spread_p90=float(np.quantile(spreads, 0.9)),
        far_ratio=float(np.mean(np.array(spreads) > FAR)),
        one_number_p90_ape=float(np.quantile(single, 0.9)),
        p90_ape=float(np.quantile(rows, 0.9)),
        means_p90_ape=float(np.quantile(means, 0.9)),
    )


def recipes_of(runs: Sequence[PublishedRun]) -> list[list[int]]:
    """Group the measured runs that differ only in the release."""
    by_recipe: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        if run.release and run.measured_s is not None:
            by_recipe[_recipe(run)].append(place)
    return [
        places
        for _, places in sorted(by_recipe.items(), key=lambda item: item[1])
        if len({runs[place].release for place in places}) > 1
    ]


def _recipe(run: PublishedRun) -> tuple[object, ...]:
    layout = (float(np.asarray(getattr(run.strategy, name))) for name in LAYOUT)
    named = (run.row.source, run.family, run.row.text("model"), run.device.name)
    return (*named, str(run.precision), *layout)
