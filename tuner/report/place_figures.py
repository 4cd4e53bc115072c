"""Plots of a placement: loads by layer and rank, imbalance before and after, distance to bounds.

Loads are ratios to the mean of their layer: 1 is perfect.
"""

from typing import Final

from tuner.plans.place import LayerTimes, PlaceCertificate, PlacePrediction
from tuner.report.content import Cell, Depth, Figure, Table, between, number, seconds, word
from tuner.report.plot_style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERMILLION,
    axis,
    hatched,
    layout,
    second_bars,
    time_axis,
)

_SPREADS: Final = {"pass_before": "before", "pass_after": "plan"}


def imbalance_figure(predicted: PlacePrediction) -> Figure:
    """Draw every workload's imbalance: current, EPLB baseline and planned."""
    outcomes = predicted.outcomes
    names = [outcome.workload for outcome in outcomes]
    bands = [predicted.imbalance_band.get(outcome.workload) for outcome in outcomes]
    series = (
        ("before", [outcome.imbalance_before for outcome in outcomes], GREY, ""),
        ("EPLB", [outcome.imbalance_rule for outcome in outcomes], ORANGE, "/"),
        ("the plan", [outcome.imbalance_after for outcome in outcomes], BLUE, ""),
    )
    traces: list[dict[str, object]] = []
    for name, values, colour, shape in series:
        trace: dict[str, object] = {
            "type": "bar",
            "name": name,
            "x": names,
            "y": values,
            "marker": hatched(colour, shape),
            "hovertext": [f"{name}: {value:.4f}" for value in values],
            "hoverinfo": "text+x",
        }
        if name == "the plan" and all(band is not None for band in bands):
            pairs = [band for band in bands if band is not None]
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": [max(0.0, hi - at) for at, (_, hi) in zip(values, pairs, strict=True)],
                "arrayminus": [
                    max(0.0, at - lo) for at, (lo, _) in zip(values, pairs, strict=True)
                ],
                "color": "ink",
                "thickness": 1.5,
            }
        traces.append(trace)
    return Figure(
        name="imbalance",
        depth=Depth.FIRST,
        title="Imbalance of every workload",
        reading="Largest rank load over the mean on hold-out passes; 1 is perfect. The line on "
        "the plan's bar covers 90 % of the passes.",
        traces=tuple(traces),
        layout=layout(
            x=axis("", type="category"),
            y=axis("largest load / mean", rangemode="tozero"),
            barmode="group",
        ),
        table=Table(
            caption="Largest rank load over the mean, and its spread over passes and layers; "
            "passes: planned from + hold-out",
            header=(
                *("workload", "passes", "before", "EPLB", "the plan"),
                *(f"{kind} {which}" for kind in ("P50", "P99") for which in _SPREADS.values()),
            ),
            rows=tuple(
                (
                    word(outcome.workload),
                    word(f"{outcome.passes_planned_from}+{outcome.passes_judged}"),
                    *(
                        _ratio(getattr(outcome, name), f"predicted.outcomes.{at}.{name}")
                        for name in ("imbalance_before", "imbalance_rule", "imbalance_after")
                    ),
                    *(
                        _ratio(
                            getattr(getattr(outcome, name), kind),
                            f"predicted.outcomes.{at}.{name}.{kind}",
                        )
                        for kind in ("p50", "p99")
                        for name in _SPREADS
                    ),
                )
                for at, outcome in enumerate(outcomes)
            ),
        ),
        height=360,
    )


_FOLD: Final = ("imbalance_before", "imbalance_rule", "imbalance_after", "worst_rank_ratio")


def left_out_figure(predicted: PlacePrediction) -> Figure | None:
    """Draw the imbalance on a workload that was left out (leave-one-out)."""
    folds = predicted.left_out
    if not folds:
        return None
    names = [fold.workload for fold in folds]
    series = (
        ("before", [fold.imbalance_before for fold in folds], GREY, "circle"),
        ("EPLB on the others", [fold.imbalance_rule for fold in folds], ORANGE, "square"),
        ("planned without it", [fold.imbalance_after for fold in folds], BLUE, "diamond"),
    )
    return Figure(
        name="left-out",
        depth=Depth.FIRST,
        title="Leave-one-out",
        reading="Planned from the other workloads and evaluated on the one left out: what to "
        "expect on unrecorded traffic.",
        traces=tuple(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": names,
                "y": values,
                "marker": {"color": colour, "symbol": symbol, "size": 13},
                "hovertext": [f"{name}: {value:.4f}" for value in values],
                "hoverinfo": "text+x",
            }
            for name, values, colour, symbol in series
        ),
        layout=layout(
            x=axis("", type="category"), y=axis("largest load / mean", rangemode="tozero")
        ),
        table=Table(
            caption="Leave-one-out by workload",
            header=(
                *("left out", "before", "EPLB", "planned without it", "worst layer"),
                *(("traffic before", "EPLB", "plan") if folds[0].traffic else ()),
            ),
            rows=tuple(
                (
                    word(fold.workload),
                    *(
                        _ratio(getattr(fold, name), f"predicted.left_out.{at}.{name}")
                        for name in _FOLD
                    ),
                    *(
                        number(value, key=f"predicted.left_out.{at}.traffic.{place}")
                        for place, value in enumerate(fold.traffic or ())
                    ),
                )
                for at, fold in enumerate(folds)
            ),
        ),
        height=330,
    )


def bounds_figure(certificate: PlaceCertificate) -> Figure | None:
    """Draw each layer's objective against its proven bound."""
    layers = certificate.layers
    if not layers:
        return None
    names = [str(layer.layer) for layer in layers]
    return Figure(
        name="bounds",
        depth=Depth.MORE,
        title="Each layer against its bound",
        reading="The plan's objective in each layer, and the proven lower bound.",
        traces=(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "the plan",
                "x": names,
                "y": [layer.objective for layer in layers],
                "marker": {"color": BLUE, "size": 9},
            },
            {
                "type": "scatter",
                "mode": "markers",
                "name": "lower bound",
                "x": names,
                "y": [layer.bound for layer in layers],
                "marker": {
                    "color": VERMILLION,
                    "symbol": "line-ew-open",
                    "size": 14,
                    "line": {"width": 3},
                },
            },
        ),
        layout=layout(x=axis("layer", type="category"), y=axis("objective")),
        table=Table(
            caption="Objective and bound of every layer, the largest gap first",
            header=("layer", "the plan", "bound"),
            rows=tuple(
                (
                    word(layer.layer),
                    number(layer.objective, key=f"certificate.layers.{at}.objective"),
                    number(layer.bound, key=f"certificate.layers.{at}.bound"),
                )
                for at, layer in sorted(
                    enumerate(layers), key=lambda pair: pair[1].bound - pair[1].objective
                )
            ),
        ),
        height=330,
    )


def times_figure(predicted: PlacePrediction) -> Figure | None:
    """Draw the seconds of the expert layers, if a model and devices were named."""
    times = predicted.layer_times
    if not times:
        return None
    names = [layer_times.workload for layer_times in times]
    series = (
        ("before", [layer_times.before_s for layer_times in times], GREY, ""),
        ("EPLB", [layer_times.rule_s for layer_times in times], ORANGE, "/"),
        ("the plan", [layer_times.after_s for layer_times in times], GREEN, ""),
    )
    return Figure(
        name="layer-times",
        depth=Depth.FIRST,
        title="Expert layers of one pass",
        reading="Predicted seconds of all expert layers of one pass, mean over hold-out passes.",
        traces=second_bars(names, series),
        layout=layout(
            x=axis("", type="category"), y=time_axis("time", rangemode="tozero"), barmode="group"
        ),
        table=Table(
            caption="Seconds of the expert layers of one pass",
            header=("workload", "before", "EPLB", "the plan", "its band", "of it all-to-all"),
            rows=tuple(_times_row(layer_times, at) for at, layer_times in enumerate(times)),
        ),
        height=340,
    )


def _times_row(layer_times: LayerTimes, at: int) -> tuple[Cell, ...]:
    path = f"predicted.layer_times.{at}"
    return (
        word(layer_times.workload),
        seconds(layer_times.before_s, key=f"{path}.before_s"),
        seconds(layer_times.rule_s, key=f"{path}.rule_s"),
        seconds(layer_times.after_s, key=f"{path}.after_s"),
        between(layer_times.after_s_band),
        seconds(layer_times.exchange_after_s, key=f"{path}.exchange_after_s"),
    )


def _ratio(value: float, key: str) -> Cell:
    return Cell(text=f"{value:.4f}", value=value, key=key)
