"""Report section on the failure log of a training plan."""

import math

from tuner.faults.failure_rates import LEVEL, ObservedRate, observed_rates
from tuner.plans.train import Plan
from tuner.report.content import (
    Cell,
    Depth,
    NamedValues,
    Section,
    Table,
    between,
    number,
    seconds,
    word,
)
from tuner.spec.failure_log import FailureLog
from tuner.units import format_ratio, format_s


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
        blocks=(rates, _facts(log)),
        depth=Depth.PAGE,
    )


def _interval(rate: ObservedRate) -> Cell:
    low, high = rate.mtbf_s_band
    return between((low, high)) if math.isfinite(high) else word(f"more than {format_s(low)}")


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
