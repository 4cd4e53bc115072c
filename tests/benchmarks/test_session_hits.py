"""The requests that a launch of vLLM is sent find in its caches what is counted on."""

from pathlib import Path

import pytest

from tests.benchmarks.session_hits import POLICIES, emitted, expectations, spec_text
from tuner.spec.serving.routers import RouterPolicy


def test_sessions_in_turn_lose_what_one_that_stays_finds(tmp_path: Path) -> None:
    text = spec_text("session", requests=64, hit=0.5)
    counted = {}
    for policy in POLICIES:
        files = emitted(text, policy, tmp_path)
        planned, counted[policy] = expectations("session", policy, files, hit=0.5)
        assert counted[policy] == pytest.approx(planned, abs=0.1)
        assert f"--policy {policy.value}" in files["router.sh"].text
    assert counted[RouterPolicy.CACHE_AWARE] == pytest.approx(0.5, abs=0.01)
