"""What requests meet: distributions of latencies, and what other traffic would meet.

A plan stores a latency as its mean, P50, P90 and P99 over the requests that were played. Where the
traffic was played again (tuner/report/replay.py) the whole distribution is drawn beside them;
otherwise those three quantiles are joined, and nothing is known between or beyond.
"""

from typing import Final

from tuner.report.axes import axis, layout, limit_line, seconds_axis
from tuner.report.content import Cell, Figure, Table, number, seconds, share, word
from tuner.report.palette import BLUE, GREEN, GREY, ORANGE, VERMILLION
from tuner.report.replay import SHARES, Replay
from tuner.serve_plan import Band, Latency
from tuner.spec.serving.goal import Percentiles
from tuner.units import format_s

_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_MEAN_HEIGHT: Final = 0.25
"""Where the mean stands, which is no quantile."""


def latency_figure(
    name: str,
    latency: Latency,
    band: Band,
    targets: Percentiles,
    *,
    key: str,
    again_s: tuple[float, ...] = (),
) -> Figure:
    """Draw a latency over requests, its mean with its band, and the targets.

    Args:
        name: `ttft` or `tpot`.
        latency: as the plan stores it.
        band: of the mean.
        targets: of the spec.
        key: where the plan has the latency.
        again_s: by `SHARES`, where the traffic was played again.
    """
    said = "Time to first token" if name == "ttft" else "Time per output token"
    stored = {kind: getattr(latency, kind) for kind in _QUANTILES}
    limits = {
        kind: value
        for kind in ("mean", *_QUANTILES)
        if (value := getattr(targets, kind)) is not None
    }
    reading = (
        "The share of requests served by then, all simulated requests; points are the plan's own "
        "figures."
        if again_s
        else "The plan's quantiles over simulated requests, joined; nothing is known beyond P99."
    )
    table = Table(
        caption=said,
        header=("over requests", "predicted", "target", *(("simulated again",) if again_s else ())),
        rows=tuple(
            (
                word(kind if kind == "mean" else kind.upper()),
                seconds(getattr(latency, kind), key=f"{key}.{kind}"),
                seconds(limits[kind]) if kind in limits else word("-"),
                *(_again(kind, again_s) if again_s else ()),
            )
            for kind in ("mean", *_QUANTILES)
        ),
    )
    drawn = [*stored.values(), *limits.values(), *band, *(one for one in again_s if one > 0.0)]
    return Figure(
        name=name,
        title=said,
        reading=f"{reading} A red mark is a target: the point beside it should be left of it.",
        traces=(
            *_distribution(stored, again_s),
            _mean(latency.mean, band),
            *([_targets(limits)] if limits else []),
        ),
        layout=layout(
            x=seconds_axis("time", drawn),
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


def _again(kind: str, again_s: tuple[float, ...]) -> tuple[Cell, ...]:
    if kind == "mean":
        return (word("-"),)
    return (seconds(again_s[SHARES.index(_QUANTILES[kind])]),)


def _distribution(stored: dict[str, float], again_s: tuple[float, ...]) -> list[dict[str, object]]:
    points: dict[str, object] = {
        "type": "scatter",
        "mode": "markers" if again_s else "lines+markers",
        "name": "the plan's quantiles",
        "x": list(stored.values()),
        "y": [_QUANTILES[kind] for kind in stored],
        "line": {"color": BLUE, "width": 2},
        "marker": {"color": BLUE, "size": 10},
        "hovertext": [f"{kind.upper()}: {format_s(value)}" for kind, value in stored.items()],
        "hoverinfo": "text",
    }
    if not again_s:
        return [points]
    curve: dict[str, object] = {
        "type": "scatter",
        "mode": "lines",
        "name": "all requests, simulated again",
        "x": list(again_s),
        "y": list(SHARES),
        "line": {"color": BLUE, "width": 2, "shape": "linear"},
        "hovertext": [
            f"{share_:.1%} within {format_s(value)}"
            for share_, value in zip(SHARES, again_s, strict=True)
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
        "name": "target: at most",
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
    """Draw what the same instances serve within every target as the traffic grows."""
    rates = replay.rates
    asked = "requests/s offered" if replay.is_open else "requests under way"
    planned = replay.as_planned.asked
    hover = [
        f"{one.asked:,.4g} {asked}\n{one.requests_per_s:,.4g} requests/s in all\n"
        f"{one.good_per_s:,.4g} within every target\nfirst token P90 {format_s(one.ttft_s.p90)}\n"
        f"per token P90 {format_s(one.tpot_s.p90)}"
        for one in rates
    ]
    series = (
        ("all requests", [one.requests_per_s for one in rates], GREY, "dot", "square"),
        (
            "within every target (goodput)",
            [one.good_per_s for one in rates],
            ORANGE,
            "solid",
            "circle",
        ),
    )
    return Figure(
        name="goodput",
        title="Goodput as the traffic grows",
        reading="The planned instances, unchanged, under the planned traffic at other "
        f"{'rates' if replay.is_open else 'numbers of requests under way'}, simulated again; the "
        "dashed line is what was planned for.",
        traces=tuple(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [one.asked for one in rates],
                "y": values,
                "line": {"color": colour, "dash": dash, "width": 2},
                "marker": {"color": colour, "symbol": symbol, "size": 9},
                "hovertext": hover,
                "hoverinfo": "text",
            }
            for name, values, colour, dash, symbol in series
        ),
        layout=layout(
            x=axis(asked, rangemode="tozero"),
            y=axis("requests/s", rangemode="tozero"),
            shapes=[limit_line(planned, is_vertical=True)],
        ),
        table=Table(
            caption="The same instances under other traffic",
            header=(
                "times as planned",
                asked,
                "all, per s",
                "in time, per s",
                "of them",
                "first token, P90",
                "per token, P90",
            ),
            rows=tuple(
                (
                    word(f"{one.factor:g}"),
                    number(one.asked),
                    number(one.requests_per_s),
                    number(one.good_per_s),
                    share(one.good_per_s / one.requests_per_s if one.requests_per_s else 0.0),
                    seconds(one.ttft_s.p90),
                    seconds(one.tpot_s.p90),
                )
                for one in rates
            ),
        ),
        height=380,
    )
