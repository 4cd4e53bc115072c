"""Seconds of a step by cause, as a table."""

from collections.abc import Mapping

from tuner.plans.breakdown import cause_words
from tuner.report.content import Depth, Table, seconds, share, word


def breakdown_table(
    steps: Mapping[str, Mapping[str, float]], *, key: str = "", depth: Depth = Depth.FIRST
) -> Table:
    """Return a row for each cause that takes time in some step, the longest of the first one first.

    Args:
        steps: seconds by cause, each step under its name; shares are of the first one.
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
        caption="Where a step's time goes",
        header=("cause", name, "share", *names),
        rows=(*rows, whole),
        depth=depth,
    )
