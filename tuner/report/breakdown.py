"""Seconds of a step by cause, as a table and as bars."""

from collections.abc import Mapping
from typing import Final

from tuner.plans.breakdown import cause_words
from tuner.report.content import Depth, Figure, Table, seconds, share, word
from tuner.report.plot_style import axis, filled, layout, time_axis
from tuner.units import format_s

MOST_COMPARED: Final = 4
"""Runners-up drawn with the plan's decision."""


def breakdown_figure(
    steps: Mapping[str, Mapping[str, float]], *, name: str, title: str, reading: str
) -> Figure:
    """Draw seconds by cause of steps under their names; the first one is the plan's prediction."""
    table = breakdown_table(steps, caption=title, key="predicted.breakdown_s")
    causes = {cause for step in steps.values() for cause, spent_s in step.items() if spent_s}
    drawn = sorted(
        causes, key=lambda cause: (-max(step.get(cause, 0.0) for step in steps.values()), cause)
    )
    return Figure(
        name=name,
        title=title,
        reading=reading,
        traces=tuple(
            {
                "type": "bar",
                "orientation": "h",
                "name": cause_words(cause),
                "y": list(steps),
                "x": [step.get(cause, 0.0) for step in steps.values()],
                "marker": filled(place),
                "hovertext": [
                    f"{cause_words(cause)}: {format_s(step.get(cause, 0.0))}"
                    for step in steps.values()
                ],
                "hoverinfo": "text",
            }
            for place, cause in enumerate(drawn)
        ),
        layout=layout(
            x=time_axis("step time"),
            y=axis("", autorange="reversed", type="category"),
            barmode="stack",
        ),
        table=table,
        height=190 + 44 * len(steps),
        depth=Depth.MORE,
    )


def breakdown_table(
    steps: Mapping[str, Mapping[str, float]],
    *,
    caption: str = "Where a step's time goes",
    key: str = "",
    depth: Depth = Depth.FIRST,
) -> Table:
    """Return a row for each cause that takes time in some step, the longest of the first one first.

    Args:
        steps: seconds by cause, each step under its name; shares are of the first one.
        caption: of the table.
        key: path in `plan.json` of the first step's seconds.
        depth: of the screens that show it.
    """
    first, *others = steps.values()
    causes = dict.fromkeys(cause for step in steps.values() for cause in step)
    ordered = sorted(
        (cause for cause in causes if any(step.get(cause) for step in steps.values())),
        key=lambda cause: -first.get(cause, 0.0),
    )
    whole_s = sum(first.values())
    rows = [
        (
            word(cause_words(cause)),
            seconds(first.get(cause, 0.0), key=f"{key}.{cause}" if key and cause in first else ""),
            share(first.get(cause, 0.0) / whole_s),
            *(seconds(step.get(cause, 0.0)) for step in others),
        )
        for cause in ordered
    ]
    whole = (word("step"), seconds(whole_s), word(""), *(seconds(sum(s.values())) for s in others))
    name, *names = steps
    return Table(
        caption=caption,
        header=("cause", name, "share", *names),
        rows=(*rows, whole),
        depth=depth,
    )
