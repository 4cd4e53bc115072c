"""The stored trials near their limit, compared with today's predictions."""

import json
from pathlib import Path

from tests.benchmarks.fit_or_not import is_as_expected, kept

FOLDER = Path(__file__).parents[2] / "examples/profiles/fit-or-not"
STORED = FOLDER / "trials.jsonl"


def test_what_is_predicted_to_fit_has_fitted_and_little_else() -> None:
    for name in ("trials.jsonl", "hold-out.jsonl", "hold-out-2.jsonl"):
        rows = kept(FOLDER / name)
        assert is_as_expected(rows), name
        assert len(rows) >= 100, name
        fits = [row.status for row in rows if row.is_predicted_to_fit]
        assert fits.count("ok") > 40, name
        assert fits.count("out_of_memory") == 0, name
        assert sum(row.status == "ok" for row in rows) > 50, name
        assert sum(row.status == "out_of_memory" for row in rows) > 40, name


def test_a_trial_that_is_off_is_not_as_expected(tmp_path: Path) -> None:
    row = json.loads(STORED.read_text(encoding="utf-8").splitlines()[0])
    assert row["status"] == "ok"
    file = tmp_path / "trials.jsonl"
    for changed, is_right in (
        ({}, True),
        ({"status": "crashed", "reason": "shapes differ"}, False),
        # A third of what the trial needs, and yet it is said to have run; and the other way round.
        ({"limit_bytes": 10**8, "status": "ok"}, False),
        ({"limit_bytes": 10**12, "status": "out_of_memory"}, False),
    ):
        file.write_text(json.dumps(row | changed) + "\n", encoding="utf-8")
        assert is_as_expected(kept(file)) is is_right, changed
