from collections.abc import Callable
from typing import Any

from tests.rows import each_row
from tuner.report.content import (
    Block,
    Depth,
    NamedValues,
    Notes,
    Paragraph,
    Section,
    Table,
    number,
    word,
)
from tuner.report.terminal import MOST_ROWS, Screen, blocks_text, report_text

NUMBERS = Table(
    caption="Stages",
    header=("stage", "layers", "why"),
    rows=((word("first"), number(4), word("it fits")), (word("2"), number(12), word("-"))),
)


def shown(*blocks: Block, width: int = 80, is_whole: bool = False) -> list[str]:
    return blocks_text(blocks, Screen(width=width, is_whole=is_whole)).splitlines()


def test_numbers_are_right_aligned() -> None:
    assert shown(NUMBERS) == [
        "Stages",
        "  stage  layers  why",
        "  first       4  it fits",
        "  2          12  -",
    ]


def test_a_wide_table_wraps_its_longest_words_first() -> None:
    words = word("it is the fastest of all that fit the devices of the pool")
    table = Table(
        caption="", header=("plan", "time", "why"), rows=((word("a"), number(1.5), words),)
    )
    assert shown(table, width=44) == [
        "  plan  time  why",
        "  a      1.5  it is the fastest of all that",
        "              fit the devices of the pool",
    ]


def test_a_table_that_cannot_wrap_is_stacked() -> None:
    names = tuple(f"column-{at}" for at in range(12))
    table = Table(caption="Wide", header=names, rows=(tuple(map(number, range(12))),))
    assert shown(table)[:3] == ["Wide", "  0", "    column-1       1"]


def test_a_long_table_and_notes_are_cut_unless_wanted_whole() -> None:
    blocks = (
        Table(caption="", header=("",), rows=tuple((word(at),) for at in range(MOST_ROWS + 2))),
        Notes(notes=("first", "second"), counted_as="notes"),
    )
    assert shown(*blocks)[-3:] == [
        "  and 2 more rows, shown by --verbose",
        "",
        "2 notes, shown by --verbose",
    ]
    assert shown(*blocks, is_whole=True)[-4:] == [f"  {MOST_ROWS + 1}", "", "- first", "- second"]


def test_a_screen_shows_what_is_marked_for_its_depth() -> None:
    sections = (
        Section(
            name="a",
            heading="A",
            blocks=(Paragraph(text="first"), Paragraph(text="more", depth=Depth.MORE)),
        ),
        Section(name="b", heading="B", depth=Depth.PAGE, blocks=(Paragraph(text="page"),)),
    )
    texts = [blocks_text(sections, Screen(depth=depth)) for depth in Depth]
    assert texts == ["A\nfirst", "A\nfirst\n\nmore", "A\nfirst\n\nmore\n\nB\npage"]


def test_signs_that_steer_a_terminal_are_spelled_out() -> None:
    foul = "a\x1b[31m\u202e\nb"
    blocks = (
        Paragraph(text=foul),
        NamedValues(facts=((foul, word(foul)),)),
        Table(caption=foul, header=(foul,), rows=((word(foul),),)),
        Notes(notes=(foul,)),
    )
    lines = shown(*blocks)
    assert all(line.isprintable() for line in lines)
    assert len([line for line in lines if r"a\x1b[31m\u202e\nb" in line]) == 6


@each_row("kind", ["verified", "train", "serve", "place"])
def test_lines_keep_to_the_width_at_every_depth(shown: Callable[[str], Any], kind: str) -> None:
    for width in (80, 100, 200):
        for depth in Depth:
            text = report_text(shown(kind).report, Screen(width=width, depth=depth, is_whole=True))
            long = [line for line in text.splitlines() if len(line) > width]
            assert not long, (width, depth, long[:3])
