import re
from collections.abc import Callable
from typing import Any

from tests.rows import each_row
from tuner.report.content import (
    Cell,
    Figure,
    File,
    NamedValues,
    Paragraph,
    Report,
    Section,
    Table,
    number,
    seconds,
    word,
)
from tuner.report.markdown import MOST_ROWS, markdown


def report(*blocks: Paragraph | Table | Figure | File) -> Report:
    return Report(
        title="a | b",
        kind="Training plan",
        verdict="Launch it.",
        is_found=True,
        facts=NamedValues(facts=(("step time", seconds(0.0325)),)),
        proof="Proven.",
        sections=(Section(name="s", heading="More", blocks=blocks),),
    )


def test_a_report_is_headings_and_tables() -> None:
    table = Table(
        caption="Stages",
        header=("stage", "layers"),
        rows=((word("0|1"), number(4)), (word("*2*"), number(5))),
    )
    assert markdown(report(Paragraph(text="As\nplanned."), table)).splitlines() == [
        "## a \\| b",
        "",
        "*Training plan.* Launch it.",
        "",
        "|  |  |",
        "|---|---|",
        "| step time | 32.5 ms |",
        "",
        "> Proven.",
        "",
        "### More",
        "",
        "As planned.",
        "",
        "**Stages**",
        "",
        "| stage | layers |",
        "|---|---|",
        "| 0\\|1 | 4 |",
        "| \\*2\\* | 5 |",
    ]


def test_a_long_table_is_cut_and_says_so() -> None:
    rows = tuple((word(index), Cell(text="x")) for index in range(MOST_ROWS + 3))
    text = markdown(report(Table(caption="Long", header=("a", "b"), rows=rows)))
    assert "3 more rows are on the page." in text
    assert text.count("| x |") == MOST_ROWS


def test_launch_files_are_named_and_not_printed() -> None:
    text = markdown(report(File(path="launch/run.sh", text="rm -rf /", shown_bytes=8)))
    assert "- launch/run.sh, 8.00 B" in text
    assert "rm -rf" not in text


@each_row("kind", ["verified", "train", "serve", "place"])
def test_every_kind_of_plan_fits_a_comment_of_a_pull_request(
    shown: Callable[[str], Any], kind: str
) -> None:
    text = markdown(shown(kind).report)
    assert len(text) < 65_536
    widths = [
        [len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines() if line[:1] == "|"]
        for block in text.split("\n\n")
    ]
    assert all(len(set(own)) <= 1 for own in widths)
