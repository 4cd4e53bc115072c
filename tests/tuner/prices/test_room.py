"""Sizes become seconds in one room: nothing outside divides by a rate, which its name says."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
LISTED = {
    "tuner/backtest/measured.py": "the MFU of published runs",
    "tuner/costs/serve/kv_transfer.py": "KV transfers",
    "tuner/faults/level_seconds.py": "checkpoints to hosts and storage",
    "tuner/faults/reliability.py": "checkpoints to storage",
    "tuner/search/train/plan_fields.py": "the MFU of a plan",
}
RATE = re.compile(r"(bytes|flop)_per_s(_[A-Z]+)?$", re.IGNORECASE)


def rates_divided_by(tree: ast.AST) -> list[int]:
    """Lines that divide by something that holds a rate."""
    return [
        division.lineno
        for division in ast.walk(tree)
        if isinstance(division, ast.BinOp) and isinstance(division.op, ast.Div)
        for part in ast.walk(division.right)
        if isinstance(part, ast.Name | ast.Attribute)
        if RATE.search(part.id if isinstance(part, ast.Name) else part.attr)
    ]


def test_nothing_outside_divides_by_a_rate() -> None:
    dividing = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / "tuner").rglob("*.py"))
        if not path.is_relative_to(ROOT / "tuner" / "prices")
        if (lines := rates_divided_by(ast.parse(path.read_text())))
    }
    assert dividing.keys() == LISTED.keys(), dividing


def test_a_rate_is_found_however_it_is_reached() -> None:
    for line in ("x / rate.bytes_per_s", "x / (0.8 * peak_flop_per_s)", "x / f(sheet.bytes_per_s)"):
        assert rates_divided_by(ast.parse(line)) == [1]
    assert not rates_divided_by(ast.parse("x / rate_per_s + y * bytes_per_s"))
