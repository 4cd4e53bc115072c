"""The table of benchmarks reads, and rows are predicted within a half of what was measured."""

from pathlib import Path

import numpy as np

from tests.benchmarks.serving_bursts import estimate_burst, kind_of, read_rows


def test_bursts_of_every_page_are_predicted_within_a_factor(tmp_path: Path) -> None:
    rows = [row for row in read_rows() if row["input_tokens"] == "4000"]
    assert len({row["page"] for row in rows}) == 6
    ratios = []
    for row in rows[::2]:
        burst = estimate_burst(row, tmp_path)
        assert all(0.5 < ratio < 1.7 for ratio in burst.ratios[:3]), burst
        # 1.01 to 1.06: whole steps made 1.5 times as long alone give 0.83 to 0.97.
        assert 0.98 < burst.priced_ratio < 1.12, burst
        ratios.append(burst.ratios)
    # 1.24 and 0.87: simulated steps made 1.5 times as long gives 0.83 and 1.30.
    requests, _, tpot, _ = np.median(ratios, axis=0)
    assert 1.0 < requests < 1.45
    assert 0.7 < tpot < 1.15


def test_launches_of_the_cookbook_get_their_first_tokens_and_further_ones_in_time(
    tmp_path: Path,
) -> None:
    rows = [row for row in read_rows() if kind_of(row) == "cookbook"]
    assert len({row["page"] for row in rows}) == 17
    ratios = [estimate_burst(row, tmp_path).ratios for row in rows[::6]]
    # 0.80 and 0.92 over all rows; prompts whose launches nothing waits for give 0.5.
    _, _, tpot, ttft = np.median(ratios, axis=0)
    assert 0.7 < tpot < 1.1
    assert 0.75 < ttft < 1.3
