"""Throughput per device against speed per user: the Pareto front of every mode, and the plan."""

from collections.abc import Iterator
from typing import Any, Final

from tuner.plans.serve import FrontPoint, ServePlan
from tuner.report.axes import axis, layout, limit_line, limit_text
from tuner.report.content import Cell, Depth, Figure, Table, maybe, number, seconds, word
from tuner.report.palette import CYCLE, GREEN, SYMBOLS, VERMILLION
from tuner.units import format_s

SHADE: Final = 0.08
"""Opacity of the region that meets the SLO."""


def front_figure(plan: ServePlan) -> Figure | None:
    """Draw the front; None if the plan has none (older versions)."""
    if not plan.pareto:
        return None
    target_s = strictest_tpot_s(plan)
    speeds = [point.tokens_per_s_per_user for point in plan.pareto]
    widest = 1.05 * max(*speeds, *([1.0 / target_s] if target_s else []))
    shapes, notes = [], []
    if target_s is not None:
        speed = 1.0 / target_s
        shapes = [limit_line(speed, is_vertical=True), _region(speed, to=widest)]
        said = f"SLO of {format_s(target_s)} per token"
        notes = [limit_text(said, speed, is_vertical=True)]
    return Figure(
        name="front",
        depth=Depth.MORE,
        title="Throughput per device against speed per user",
        reading="Output tokens/s per device against tokens/s of one request, with every instance "
        "at full batch and no queueing; no priced option of a mode beats its line in both. "
        "Right of the dashed line TPOT meets its SLO. The star is the plan under its traffic, "
        "queueing and idle time included.",
        traces=tuple(_traces(plan)),
        layout=layout(
            x=axis("output tokens/s per user", range=[0.0, widest]),
            y=axis("output tokens/s per device", rangemode="tozero"),
            shapes=shapes,
            annotations=notes,
            hovermode="closest",
        ),
        table=_table(plan),
        height=440,
    )


def strictest_tpot_s(plan: ServePlan) -> float | None:
    """Return the tightest limit on the time per output token; None without an SLO."""
    targets = plan.goal.slo.tpot
    stated = (targets.mean, targets.p50, targets.p90, targets.p99)
    return min((one for one in stated if one is not None), default=None)


def _region(speed: float, *, to: float) -> dict[str, Any]:
    """Return the shaded region of speeds that meet the SLO."""
    return {
        "type": "rect",
        "x0": speed,
        "x1": to,
        "xref": "x",
        "y0": 0,
        "y1": 1,
        "yref": "y domain",
        "fillcolor": GREEN,
        "opacity": SHADE,
        "line": {"width": 0},
        "layer": "below",
    }


def _traces(plan: ServePlan) -> Iterator[dict[str, Any]]:
    for place, mode in enumerate(dict.fromkeys(point.mode for point in plan.pareto)):
        own = [point for point in plan.pareto if point.mode == mode]
        yield {
            "type": "scatter",
            "mode": "lines+markers",
            "name": mode.replace("_", " "),
            "x": [point.tokens_per_s_per_user for point in own],
            "y": [point.tokens_per_s_per_device for point in own],
            "marker": {
                "color": CYCLE[place % len(CYCLE)],
                "symbol": [
                    SYMBOLS[place] if point.within_targets else f"{SYMBOLS[place]}-open"
                    for point in own
                ],
                "size": 8,
            },
            "line": {"color": CYCLE[place % len(CYCLE)], "width": 1.5},
            "hovertext": [_hover(point) for point in own],
            "hoverinfo": "text",
        }
    if plan.decision is not None and plan.predicted is not None:
        own_user = 1.0 / plan.predicted.tpot_s.mean if plan.predicted.tpot_s.mean > 0.0 else 0.0
        device = plan.predicted.output_tokens_per_s / plan.decision.num_devices
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": "the plan",
            "x": [own_user],
            "y": [device],
            "marker": {"color": VERMILLION, "symbol": "star", "size": 18},
            "hovertext": [f"the plan\n{own_user:.4g} tokens/s per user, {device:.4g} per device"],
            "hoverinfo": "text",
        }


def _hover(point: FrontPoint) -> str:
    prefill = f"\nprompts: {point.prefill}" if point.prefill else ""
    return (
        f"{point.tokens_per_s_per_user:.4g} tokens/s per user,"
        f" {point.tokens_per_s_per_device:.4g} per device\n{point.instance}{prefill}"
    )


def _degrees(instance: str) -> str:
    """Return the degrees of an instance without its batch."""
    before, knobs, _ = instance.partition(";")
    return f"{before})" if knobs else before


def _table(plan: ServePlan) -> Table:
    has_slo = plan.goal.slo.is_stated

    def row(at: int, point: FrontPoint) -> tuple[Cell, ...]:
        path = f"pareto.{at}"
        return (
            number(point.tokens_per_s_per_user, key=f"{path}.tokens_per_s_per_user"),
            number(point.tokens_per_s_per_device, key=f"{path}.tokens_per_s_per_device"),
            *((word("yes" if point.within_targets else "no"),) if has_slo else ()),
            word("yes" if point.on_joint_front else "no"),
            word(point.mode.replace("_", " ")),
            number(point.running, key=f"{path}.running"),
            seconds(point.ttft_s, key=f"{path}.ttft_s"),
            maybe(number, point.prefill_per_instance, key=f"{path}.prefill_per_instance"),
            word(" + ".join(_degrees(one) for one in (point.prefill, point.instance) if one)),
        )

    order = sorted(enumerate(plan.pareto), key=lambda pair: not pair[1].on_joint_front)
    return Table(
        caption="Pareto front of tokens/s per user and per device, every instance full, no "
        "queueing; that of all modes together first",
        header=(
            *("per user", "per device", *(("SLO met",) if has_slo else ())),
            *("best of all modes", "mode"),
            *("sequences per rank", "prompt alone", "prefill per decode instance", "instance"),
        ),
        rows=tuple(row(at, point) for at, point in order),
    )
