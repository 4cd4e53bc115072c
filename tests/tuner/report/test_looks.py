"""What the eye needs: contrast in both schemes, colours that differ in lightness."""

import re
from importlib import resources
from itertools import pairwise

from tests.rows import each_row
from tuner.report.plot_style import CYCLE, filled

TEXTS = ("--ink", "--faint", "--accent", "--good", "--bad")
GROUNDS = ("--ground", "--raised", "--code")


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255.0 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def schemes() -> dict[str, dict[str, str]]:
    style = resources.files("tuner.report").joinpath("page.css").read_text(encoding="utf-8")
    light, dark, paper = re.findall(r":root \{([^}]*)\}", style)
    return {
        name: dict(re.findall(r"(--[a-z]+): (#[0-9a-f]{6})", text))
        for name, text in (("light", light), ("dark", dark), ("paper", paper))
    }


@each_row("name", ["light", "dark", "paper"])
def test_text_can_be_read_on_every_ground(name: str) -> None:
    # 4.5 is level AA of WCAG 2.2, success criterion 1.4.3.
    scheme = schemes()[name]
    for text in TEXTS:
        for ground in GROUNDS:
            assert contrast(scheme[text], scheme[ground]) >= 4.5, (text, ground)


def test_a_stack_repeats_no_look() -> None:
    looks = [
        (marker["color"], str(marker["pattern"])) for marker in map(filled, range(3 * len(CYCLE)))
    ]
    assert len(set(looks)) == len(looks)
    assert all(before != after for before, after in pairwise(looks))
