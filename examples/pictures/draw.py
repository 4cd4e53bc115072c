"""Draws the headline of a plan's report and the figures that a README has room for."""

import sys
from dataclasses import replace
from pathlib import Path

from tuner.goals.registry import goal_of_folder
from tuner.report.content import Figure, Report, Section
from tuner.report.page import page_html
from tuner.report.picture import picture
from tuner.report.written import plotly_script

SHOWN = {
    "train": ("timeline", "candidates"),
    "serve": ("instances", "ttft", "tpot", "goodput"),
    "place": ("imbalance", "heat-map-0"),
}
"""Figures by the kind of plan."""

WIDTH = 900
"""Pixels."""


def main(folder: Path, out: Path) -> None:
    """Draw one plan's picture."""
    goal = goal_of_folder(folder)
    report = goal.report(folder, replay=goal.replay(folder))
    page = page_html(_short(report, SHOWN[goal.kind]), plotly_script())
    out.write_bytes(picture(page, width=WIDTH))


def _short(report: Report, names: tuple[str, ...]) -> Report:
    figures = {figure.name: figure for figure in report.figures}
    shown: tuple[Figure, ...] = tuple(figures[name] for name in names)
    heading = "From the report"
    return replace(report, sections=(Section(name="figures", heading=heading, blocks=shown),))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
