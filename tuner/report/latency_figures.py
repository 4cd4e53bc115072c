"""Latency distributions of a deployment, and goodput under other traffic.

A plan stores a latency as its mean, P50, P90 and P99 over the simulated requests. Where the traffic
was simulated again (tuner/report/replay.py) the whole distribution is drawn; otherwise those three
quantiles are joined.
"""

from collections.abc import Mapping
from typing import Final

from tuner.plans.serve import Band, Latency
from tuner.report.content import Cell, Figure, Table, between, number, seconds, share, word
from tuner.report.plot_style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERMILLION,
    axis,
    layout,
    limit_line,
    time_axis,
)
from tuner.report.replay import QUANTILES, Replay
from tuner.spec.serving.goal import Percentiles
from tuner.units import format_ratio, format_s

_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_MEAN_HEIGHT: Final = 0.25
"""Vertical position of the mean, which is no quantile."""


NO_LIMIT: Final = Percentiles()


def latency_table(rows: Mapping[str, tuple[Latency, Band, Percentiles]]) -> Table:
    """Return latencies over requests by name, each with the band of its mean and its SLO."""

    def cell(latency: Latency, limits: Percentiles, kind: str) -> Cell:
        value, limit_s = getattr(latency, kind), getattr(limits, kind)
        limit = "" if limit_s is None else f" (SLO {format_s(limit_s)})"
        return Cell(text=f"{format_s(value)}{limit}", value=value)

    return Table(
        caption="Over requests, predicted",
        header=("", "mean", "80 % band of the mean", *(kind.upper() for kind in _QUANTILES)),
        rows=tuple(
            (
                word(name),
                cell(latency, limits, "mean"),
                between(band),
                *(cell(latency, limits, kind) for kind in _QUANTILES),
            )
            for name, (latency, band, limits) in rows.items()
        ),
    )


def latency_figure(
    name: str,
    latency: Latency,
    band: Band,
    targets: Percentiles,
    *,
    key: str,
    simulated_s: tuple[float, ...] = (),
) -> Figure:
    """Draw a latency over requests, its mean with its band, and the SLO.

    Args:
        name: `ttft` or `tpot`.
        latency: as the plan stores it.
        band: of the mean.
        targets: the SLO.
        key: path of the latency in the plan.
        simulated_s: by `QUANTILES`, if the traffic was simulated again.
    """
    said = "Time to first token" if name == "ttft" else "Time per output token"
    stored = {kind: getattr(latency, kind) for kind in _QUANTILES}
    limits = {
        kind: value
        for kind in ("mean", *_QUANTILES)
        if (value := getattr(targets, kind)) is not None
    }
    reading = (
        "Cumulative distribution over all simulated requests; points are the plan's own figures."
        if simulated_s
        else "The plan's quantiles over simulated requests, joined; nothing is stored beyond P99."
    )
    table = Table(
        caption=said,
        header=(
            "over requests",
            "predicted",
            "target",
            *(("simulated again",) if simulated_s else ()),
        ),
        rows=tuple(
            (
                word(kind if kind == "mean" else kind.upper()),
                seconds(getattr(latency, kind), key=f"{key}.{kind}"),
                seconds(limits[kind]) if kind in limits else word("-"),
                *(_simulated_cell(kind, simulated_s) if simulated_s else ()),
            )
            for kind in ("mean", *_QUANTILES)
        ),
    )
    return Figure(
        name=name,
        title=said,
        reading=f"{reading} A red mark is an SLO limit: the point beside it should be left of it.",
        traces=(
            *_quantile_traces(stored, simulated_s),
            _mean(latency.mean, band),
            *([_targets(limits)] if limits else []),
        ),
        layout=layout(
            x=time_axis("time", type="log", dtick="D2", tickangle=0),
            y=axis(
                "",
                range=[0.0, 1.06],
                tickvals=[_MEAN_HEIGHT, *_QUANTILES.values()],
                ticktext=["mean", "P50", "P90", "P99"],
            ),
        ),
        table=table,
        height=340,
        is_small=True,
    )


def _simulated_cell(kind: str, simulated_s: tuple[float, ...]) -> tuple[Cell, ...]:
    if kind == "mean":
        return (word("-"),)
    return (seconds(simulated_s[QUANTILES.index(_QUANTILES[kind])]),)


def _quantile_traces(
    stored: dict[str, float], simulated_s: tuple[float, ...]
) -> list[dict[str, object]]:
    points: dict[str, object] = {
        "type": "scatter",
        "mode": "markers" if simulated_s else "lines+markers",
        "name": "the plan's quantiles",
        "x": list(stored.values()),
        "y": [_QUANTILES[kind] for kind in stored],
        "line": {"color": BLUE, "width": 2},
        "marker": {"color": BLUE, "size": 10},
        "hovertext": [f"{kind.upper()}: {format_s(value)}" for kind, value in stored.items()],
        "hoverinfo": "text",
    }
    if not simulated_s:
        return [points]
    curve: dict[str, object] = {
        "type": "scatter",
        "mode": "lines",
        "name": "all requests, simulated again",
        "x": list(simulated_s),
        "y": list(QUANTILES),
        "line": {"color": BLUE, "width": 2, "shape": "linear"},
        "hovertext": [
            f"{format_ratio(share_)} within {format_s(value)}"
            for share_, value in zip(QUANTILES, simulated_s, strict=True)
        ],
        "hoverinfo": "text",
    }
    return [curve, points]


def _mean(mean_s: float, band: Band) -> dict[str, object]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "mean, with its band",
        "x": [mean_s],
        "y": [_MEAN_HEIGHT],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, band[1] - mean_s)],
            "arrayminus": [max(0.0, mean_s - band[0])],
            "color": GREEN,
            "thickness": 2,
            "width": 6,
        },
        "marker": {"color": GREEN, "symbol": "diamond", "size": 11},
        "hovertext": [f"mean: {format_s(mean_s)}, {format_s(band[0])} to {format_s(band[1])}"],
        "hoverinfo": "text",
    }


def _targets(limits: dict[str, float]) -> dict[str, object]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "SLO limit",
        "x": list(limits.values()),
        "y": [_QUANTILES.get(kind, _MEAN_HEIGHT) for kind in limits],
        "marker": {
            "color": VERMILLION,
            "symbol": "line-ns-open",
            "size": 26,
            "line": {"width": 3, "color": VERMILLION},
        },
        "hovertext": [f"{kind} at most {format_s(value)}" for kind, value in limits.items()],
        "hoverinfo": "text",
    }


def goodput_figure(replay: Replay) -> Figure:
    """Draw the goodput of the same instances as the traffic grows."""
    rates = replay.rates
    load_unit = "requests/s offered" if replay.is_open else "concurrent requests"
    planned = replay.as_planned.offered
    hover = [
        f"{point.offered:,.4g} {load_unit}\n{point.requests_per_s:,.4g} requests/s in all\n"
        f"{point.good_per_s:,.4g} within the SLO\nTTFT P90 {format_s(point.ttft_s.p90)}\n"
        f"TPOT P90 {format_s(point.tpot_s.p90)}"
        for point in rates
    ]
    series = (
        ("all requests", [point.requests_per_s for point in rates], GREY, "dot", "square"),
        (
            "within the SLO (goodput)",
            [point.good_per_s for point in rates],
            ORANGE,
            "solid",
            "circle",
        ),
    )
    return Figure(
        name="goodput",
        title="Goodput as the traffic grows",
        reading="The planned instances, unchanged, under the planned traffic at other "
        f"{'rates' if replay.is_open else 'concurrency'}, simulated again; the "
        "dashed line is the planned load.",
        traces=tuple(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [point.offered for point in rates],
                "y": values,
                "line": {"color": colour, "dash": dash, "width": 2},
                "marker": {"color": colour, "symbol": symbol, "size": 9},
                "hovertext": hover,
                "hoverinfo": "text",
            }
            for name, values, colour, dash, symbol in series
        ),
        layout=layout(
            x=axis(load_unit, rangemode="tozero"),
            y=axis("requests/s", rangemode="tozero"),
            shapes=[limit_line(planned, is_vertical=True)],
        ),
        table=Table(
            caption="The same instances under other traffic",
            header=(
                "times the planned load",
                load_unit,
                *(() if replay.is_open else ("served, requests/s",)),
                "within SLO, requests/s",
                "share within SLO",
                "TTFT P90",
                "TPOT P90",
            ),
            rows=tuple(
                (
                    word(f"{point.factor:g}"),
                    number(point.offered),
                    *(() if replay.is_open else (number(point.requests_per_s),)),
                    number(point.good_per_s),
                    share(point.good_per_s / point.requests_per_s if point.requests_per_s else 0.0),
                    seconds(point.ttft_s.p90),
                    seconds(point.tpot_s.p90),
                )
                for point in rates
            ),
        ),
        height=380,
    )
