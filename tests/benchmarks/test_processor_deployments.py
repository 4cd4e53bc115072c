"""Stored launches of vLLM on a processor against what plans say of them today."""

import pytest

from tests.benchmarks.processor_deployments import DEPLOYMENTS, METRICS, RATES, STORED, figures


@pytest.mark.slow
def test_deployments_are_predicted_from_the_profile_alone() -> None:
    result = figures(STORED)
    assert len(result["rows"]) == len(DEPLOYMENTS) * len(RATES)
    for metric in METRICS:
        assert result[metric]["alone"] <= 0.3
        assert result[metric]["inside_alone"] >= 13
    for name, lost in result["choice"].items():
        # Some are predicted alike, and repeats of one differ by 40 %.
        assert lost <= 0.2, name
