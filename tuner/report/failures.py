"""What the failure log of a training plan shows."""

import math
from typing import Final

from tuner.faults.failure_rates import LEVEL, ObservedRate, exponential_test, observed_rates
from tuner.plans.train import Plan
from tuner.report.axes import axis, layout, time_axis
from tuner.report.content import (
    Cell,
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
from tuner.report.palette import GREY, filled
from tuner.spec.failure_log import FailureLog
from tuner.units import format_ratio, format_s

MOST_DRAWN: Final = 2000
"""Failures; of more, evenly spread ones."""


def failures_section(plan: Plan) -> Section | None:
    """Draw the failure log; None where the plan has none."""
    log = plan.failures
    if log is None:
        return None
    return Section(
        name="failures",
        heading="Failures in the log",
        blocks=some(_by_component(log), _over_time(log), _facts(log)),
    )


def _by_component(log: FailureLog) -> Figure:
    rates = observed_rates(log)
    return Figure(
        name="failures",
        title="Failures by component",
        reading=f"Failures in the log of goal.reliability, and the mean time between those of one"
        f" device, or one machine for the others, with the interval that covers the true one with a"
        f" chance of {format_ratio(LEVEL, digits=0)}.",
        traces=(
            {
                "type": "bar",
                "name": "failures",
                "x": [rate.component for rate in rates],
                "y": [rate.count for rate in rates],
                "marker": filled(0),
                "hovertext": [_words(rate) for rate in rates],
                "hoverinfo": "text",
            },
        ),
        layout=layout(x=axis("component", type="category"), y=axis("failures", rangemode="tozero")),
        table=Table(
            caption="Failures by component",
            header=("component", "failures", "mean time between them", "interval"),
            rows=tuple(
                (
                    word(rate.component),
                    number(rate.count, key=f"failures.counts.{rate.component}"),
                    _mtbf(rate),
                    _interval(rate),
                )
                for rate in rates
            ),
        ),
        height=320,
    )


def _words(rate: ObservedRate) -> str:
    if not rate.count:
        return f"{rate.component}: none"
    return f"{rate.component}: {rate.count:,}, one in {format_s(rate.mtbf_s)}"


def _mtbf(rate: ObservedRate) -> Cell:
    return seconds(rate.mtbf_s) if math.isfinite(rate.mtbf_s) else word("none was seen")


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
        reading="Failures since the log began, over observed time; a steady rate is a straight"
        " line, a burst is a step.",
        traces=(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "seen",
                "x": [times[place] for place in drawn],
                "y": [place + 1 for place in drawn],
                "line": {"shape": "hv", "color": filled(0)["color"]},
            },
            {
                "type": "scatter",
                "mode": "lines",
                "name": "at a steady rate",
                "x": [0.0, log.period_s],
                "y": [0.0, len(times)],
                "line": {"dash": "dot", "color": GREY},
            },
        ),
        layout=layout(x=time_axis("observed time"), y=axis("failures", rangemode="tozero")),
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
    facts = [
        ("observed", seconds(log.period_s, key="failures.period_s")),
        ("one device fails every", _every(log.device_mtbf_s)),
        ("one machine is lost every", _every(log.node_mtbf_s)),
        ("processes of a machine fail every", _every(log.mtbf_s("software"))),
    ]
    tested = exponential_test(log)
    if tested is not None:
        words = "no" if tested.is_rejected else "not refuted"
        facts.append(("exponential", word(f"{words} (p = {tested.probability:.2g})")))
    return NamedValues(facts=tuple(facts))


def _every(mtbf_s: float | None) -> Cell:
    return word("none was seen") if mtbf_s is None else seconds(mtbf_s)
