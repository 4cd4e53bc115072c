"""What the failure log of a training plan shows."""

import math
from typing import Final

from tuner.faults.failure_rates import LEVEL, ObservedRate, observed_rates
from tuner.plans.train import Plan
from tuner.report.axes import axis, layout
from tuner.report.content import (
    Cell,
    Depth,
    Figure,
    NamedValues,
    Section,
    Table,
    between,
    number,
    seconds,
    some,
    word,
)
from tuner.report.palette import BLUE, GREY
from tuner.spec.failure_log import FailureLog
from tuner.units import format_ratio, format_s

DAY_S: Final = 86_400.0
MOST_DRAWN: Final = 2000
"""Failures; of more, evenly spread ones."""


def failures_section(plan: Plan) -> Section | None:
    """Show the failure log; None where the plan has none."""
    log = plan.failures
    if log is None:
        return None
    rates = Table(
        caption="Failures by component, with the mean time between those of one device, or one"
        " machine for the others, and the interval that covers the true one with a chance of"
        f" {format_ratio(LEVEL, digits=0)}",
        header=("component", "failures", "mean time between them", "interval"),
        rows=tuple(
            (
                word(rate.component),
                number(rate.count, key=f"failures.counts.{rate.component}"),
                _every(rate.mtbf_s),
                _interval(rate),
            )
            for rate in observed_rates(log)
        ),
    )
    return Section(
        name="failures",
        heading="Failures in the log",
        blocks=some(rates, _over_time(log), _facts(log)),
        depth=Depth.PAGE,
    )


def _interval(rate: ObservedRate) -> Cell:
    low, high = rate.mtbf_s_band
    return between((low, high)) if math.isfinite(high) else word(f"more than {format_s(low)}")


def _over_time(log: FailureLog) -> Figure | None:
    """Draw when failures happened, beside a steady rate."""
    times = log.clock_s
    if len(times) < 2:
        return None
    stride = math.ceil(len(times) / MOST_DRAWN)
    drawn = range(0, len(times), stride)
    return Figure(
        name="failures-over-time",
        title="Failures over time",
        reading="Failures since the log began, over observed days; a steady rate is a straight"
        " line, a burst is a step.",
        traces=(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "seen",
                "x": [times[place] / DAY_S for place in drawn],
                "y": [place + 1 for place in drawn],
                "line": {"shape": "hv", "color": BLUE},
            },
            {
                "type": "scatter",
                "mode": "lines",
                "name": "at a steady rate",
                "x": [0.0, log.period_s / DAY_S],
                "y": [0.0, len(times)],
                "line": {"dash": "dot", "color": GREY},
            },
        ),
        layout=layout(
            x=axis("days since the log began", rangemode="tozero"),
            y=axis("failures", rangemode="tozero"),
        ),
        table=Table(
            caption="Failures over time",
            header=("failure", "at"),
            rows=tuple(
                (number(place + 1), seconds(times[place], key=f"failures.clock_s.{place}"))
                for place in range(0, len(times), math.ceil(len(times) / 20))
            ),
        ),
        height=320,
    )


def _facts(log: FailureLog) -> NamedValues:
    facts = (
        ("observed", seconds(log.period_s, key="failures.period_s")),
        ("one device fails every", _every(log.device_mtbf_s)),
        ("one machine is lost every", _every(log.node_mtbf_s)),
        ("processes of a machine fail every", _every(log.mtbf_s("software"))),
    )
    return NamedValues(facts=facts)


def _every(mtbf_s: float | None) -> Cell:
    is_seen = mtbf_s is not None and math.isfinite(mtbf_s)
    return seconds(mtbf_s or 0.0) if is_seen else word("none was seen")
