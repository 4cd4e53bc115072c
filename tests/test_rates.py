"""Sizes become seconds in `tuner/prices` alone."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
RATES = ("bytes_per_s", "flop_per_s")
EXCEPTIONS = frozenset(
    {
        # An MFU is stated, or read, against the peak.
        "tuner/backtest/measured.py",
        "tuner/search/train/plan_fields.py",
        # Storage and the host's memory.
        "tuner/faults/level_seconds.py",
        "tuner/faults/reliability.py",
        # Links that carry KV.
        "tuner/costs/serve/kv_transfer.py",
        "solvers/instances/flows.py",
        "solvers/instances/milp.py",
    }
)


def _divides_by_a_rate(tree: ast.AST) -> bool:
    return any(
        name.endswith(RATES)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        for part in ast.walk(node.right)
        for name in [getattr(part, "attr", getattr(part, "id", ""))]
    )


def test_only_prices_storage_and_kv_links_divide_by_a_rate() -> None:
    files = {
        str(path.relative_to(ROOT))
        for package in ("tuner", "solvers")
        for path in (ROOT / package).rglob("*.py")
        if _divides_by_a_rate(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert files, "the walk finds no division at all"
    assert {name for name in files if not name.startswith("tuner/prices/")} == EXCEPTIONS
