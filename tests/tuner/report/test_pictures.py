"""The README's pictures are there, small, and drawn by a script that names what a report has."""

import importlib.util
import struct
from pathlib import Path

import pytest

from tuner.plan_folder import kind_of_plan
from tuner.report.reading import report_of

PICTURES = Path(__file__).parents[3] / "examples" / "pictures"
MOST_BYTES = 200_000


@pytest.mark.parametrize("kind", ["training", "serving", "placement"])
def test_a_picture_is_small_enough_for_a_readme(kind: str) -> None:
    data = (PICTURES / f"{kind}.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) < MOST_BYTES
    width, height = struct.unpack(">II", data[16:24])
    assert width == 900
    assert height > 600
    assert '"$here/$kind.png"' in (PICTURES / "make.sh").read_text(encoding="utf-8")
    assert kind in (PICTURES / "make.sh").read_text(encoding="utf-8")


def test_what_is_drawn_is_in_the_reports(any_folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("draw", PICTURES / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shown = set(module.SHOWN[kind_of_plan(any_folder)])
    # Goodput is played, which reading a folder does not.
    assert shown - {"goodput"} <= {figure.name for figure in report_of(any_folder).figures}
