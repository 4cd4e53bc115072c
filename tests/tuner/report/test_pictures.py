"""The README's pictures are there, small, and drawn by a script that names what a report has."""

import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.expect import present
from tests.rows import each_row
from tuner.plans.folder import plan_kind

PICTURES = Path(__file__).parents[3] / "examples" / "pictures"
MOST_BYTES = 200_000


@each_row("kind", ["training", "serving", "placement"])
def test_a_picture_is_small_enough_for_a_readme(kind: str) -> None:
    data = (PICTURES / f"{kind}.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) < MOST_BYTES
    width, height = struct.unpack(">II", data[16:24])
    assert width == 900
    assert height > 600
    assert '"$here/$kind.png"' in (PICTURES / "make.sh").read_text(encoding="utf-8")
    assert kind in (PICTURES / "make.sh").read_text(encoding="utf-8")


@each_row("kind", ["verified", "train", "serve", "place"])
def test_what_is_drawn_is_in_the_reports(shown: Callable[[str], Any], kind: str) -> None:
    spec = present(importlib.util.spec_from_file_location("draw", PICTURES / "draw.py"))
    module = importlib.util.module_from_spec(spec)
    present(spec.loader).exec_module(module)
    drawn = set(module.SHOWN[plan_kind(shown(kind).folder)])
    # Goodput is played, which reading a folder does not.
    assert drawn - {"goodput"} <= {figure.name for figure in shown(kind).report.figures}
