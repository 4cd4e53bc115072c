"""Why this deployment: certificate, runners-up, modes, and unlaunchable options."""

from collections.abc import Iterator

from tuner.config.serve_words import gain_words, short_serve
from tuner.plans.serve import ServeModeResult, ServePlan, ServePrediction
from tuner.report.axes import axis, layout, time_axis
from tuner.report.content import (
    Cell,
    Figure,
    NamedValues,
    Notes,
    Section,
    Table,
    number,
    seconds,
    some,
    word,
)
from tuner.report.front_figure import front_figure
from tuner.report.palette import CYCLE, SYMBOLS, VERMILLION
from tuner.report.serve_figures import alternatives_rows
from tuner.units import format_s


def choice_section(plan: ServePlan) -> Section:
    """Return the section on certificate and runners-up."""
    certificate = plan.certificate
    facts: list[tuple[str, Cell]] = [("certificate", word(certificate.status))]
    if certificate.objective is not None:
        said = f"objective ({plan.goal.objective})"
        facts.append((said, number(certificate.objective, key="certificate.objective")))
    if certificate.bound is not None:
        facts.append(("bound", number(certificate.bound, key="certificate.bound")))
    facts.append(("method", word(certificate.method)))
    facts.append(("solved in", seconds(certificate.solve_s, key="certificate.solve_s")))
    missing = tuple(
        f"{one.feature} (would {gain_words(one.gain_ratio, objective=plan.goal.objective)})"
        if one.gain_ratio > 0.0
        else one.feature
        for one in plan.unlaunchable
    )
    return Section(
        name="choice",
        heading="Why this one",
        blocks=some(
            NamedValues(facts=tuple(facts)),
            _candidates(plan),
            front_figure(plan),
            _modes(plan),
            Notes(notes=tuple(f"Not launchable: {one}" for one in missing)) if missing else None,
        ),
    )


def _modes(plan: ServePlan) -> Table | None:
    """Return the table of requested modes."""
    if not plan.modes:
        return None
    nothing = word("-")

    def row(at: int, one: ServeModeResult) -> tuple[Cell, ...]:
        path = f"modes.{at}"
        return (
            word(one.mode.replace("_", " ")),
            word(one.status),
            nothing if one.devices is None else number(one.devices, key=f"{path}.devices"),
            nothing
            if one.cost_per_hour is None
            else number(one.cost_per_hour, key=f"{path}.cost_per_hour"),
            nothing if one.ttft_s is None else seconds(one.ttft_s, key=f"{path}.ttft_s"),
            nothing if one.tpot_s is None else seconds(one.tpot_s, key=f"{path}.tpot_s"),
            word(one.told),
        )

    header = ("mode", "outcome", "devices", "cost per hour", "first token", "per token", "why")
    return Table(
        caption="Requested modes, means over requests",
        header=header,
        rows=tuple(row(at, one) for at, one in enumerate(plan.modes)),
    )


def _candidates(plan: ServePlan) -> Figure:
    rows = list(alternatives_rows(plan))
    lost = ["", *(one.lost_by for one in plan.alternatives)]
    has_cost = all(one.cost_per_hour is not None for *_, one in rows)
    return Figure(
        name="candidates",
        title="The candidates: latency against devices",
        reading="The plan and its stored runners-up, each the best of its kind; other "
        "candidates were priced and are not stored. Hover for the decision.",
        traces=tuple(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [decision.num_devices],
                "y": [one.tpot_s.p90],
                "marker": {
                    "color": VERMILLION if at == 0 else CYCLE[(at - 1) % len(CYCLE)],
                    "symbol": "star" if at == 0 else SYMBOLS[at % len(SYMBOLS)],
                    "size": 18 if at == 0 else 12,
                },
                "hovertext": [
                    f"{name}\n{short_serve(decision)}\nTTFT P90 "
                    f"{format_s(one.ttft_s.p90)}, TPOT P90 {format_s(one.tpot_s.p90)}"
                ],
                "hoverinfo": "text",
            }
            for at, (name, _, decision, one) in enumerate(rows)
        ),
        layout=layout(
            x=axis("devices", rangemode="tozero"),
            y=time_axis("TPOT P90", rangemode="tozero"),
            hovermode="closest",
        ),
        table=Table(
            caption="The plan and its runners-up",
            header=(
                "",
                "devices",
                "TTFT P90",
                "TPOT P90",
                "goodput, requests/s per device",
                *(("cost per hour",) if has_cost else ()),
                "decision",
                "why it lost",
            ),
            rows=tuple(
                (
                    word(name),
                    number(decision.num_devices),
                    seconds(one.ttft_s.p90, key=f"{key}.ttft_s.p90"),
                    seconds(one.tpot_s.p90, key=f"{key}.tpot_s.p90"),
                    number(one.goodput_per_device, key=f"{key}.goodput_per_device"),
                    *_cost(one, key=key, is_shown=has_cost),
                    word(short_serve(decision)),
                    word(why),
                )
                for (name, key, decision, one), why in zip(rows, lost, strict=True)
            ),
        ),
        height=380,
    )


def _cost(one: ServePrediction, *, key: str, is_shown: bool) -> Iterator[Cell]:
    if is_shown and one.cost_per_hour is not None:
        yield number(one.cost_per_hour, key=f"{key}.cost_per_hour")
