"""A report in the requested format, and the record of the written file."""

from importlib import resources
from pathlib import Path
from typing import Literal

from profilers.records import Record
from tuner.errors import EnvironmentMissingError
from tuner.report.content import Report
from tuner.report.markdown import markdown
from tuner.report.page import page_html
from tuner.report.picture import picture

Kind = Literal["html", "md", "png"]


class Written(Record):
    """Output of `moetune report --json`."""

    file: str
    format: Kind
    bytes: int
    """Bytes of the file."""
    title: str
    found: bool
    """Whether the plan has something to launch."""
    figures: tuple[str, ...]
    """Names of the plots."""
    sections: tuple[str, ...]


def rendered(report: Report, *, kind: Kind) -> str | bytes:
    """Return the file's content.

    Raises:
        EnvironmentMissingError: plotly is missing, or for a picture Chromium.
    """
    if kind == "md":
        return markdown(report)
    page = page_html(report, plotly_script())
    return page if kind == "html" else picture(page)


def describe_file(report: Report, *, kind: Kind, file: Path, content: str | bytes) -> Written:
    """Return the record of the written file."""
    data = content.encode() if isinstance(content, str) else content
    return Written(
        file=str(file),
        format=kind,
        bytes=len(data),
        title=report.title,
        found=report.is_found,
        figures=tuple(figure.name for figure in report.figures),
        sections=tuple(section.name for section in report.sections),
    )


def plotly_script() -> str:
    """Return the minified script.

    Raises:
        EnvironmentMissingError: plotly is not installed, or its script cannot be inlined.
    """
    install_command = "pip install 'moetune[report]'"
    try:
        file = resources.files("plotly").joinpath("package_data/plotly.min.js")
    except ModuleNotFoundError as error:
        raise EnvironmentMissingError(f"plotly is not installed; {install_command}") from error
    if not file.is_file():
        raise EnvironmentMissingError(f"the installed plotly lacks its script; {install_command}")
    script = file.read_text(encoding="utf-8")
    if "</script" in script.lower():
        raise EnvironmentMissingError(
            f"the installed plotly's script cannot be inlined; {install_command}"
        )
    return script
