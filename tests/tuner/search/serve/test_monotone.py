"""A looser target never takes more devices, more traffic never fewer, and bounds hold."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.expect import present
from tests.tuner.serve_specs import planned
from tuner.plans.serve import ServeCertificate


def certificate(
    folder: Path, *, rate: float = 10.0, ttft_s: float = 2.0, tpot_s: float = 0.05
) -> ServeCertificate | None:
    """DeepSeek-V3 on 32 H200; None where nothing fits."""
    plan = planned(
        folder,
        model="deepseek-v3",
        pools="{name: h200, device: h200-sxm, nodes: 4, devices_per_node: 8}",
        engine="sglang",
        traffic=f"{{rate: {rate}/s, input_tokens: 4000, output_tokens: 1000}}",
        slo=f"{{ttft: {{p90: {ttft_s}s}}, tpot: {{p90: {tpot_s}s}}}}",
        extra="quantization: fp8_block\n  objective: devices\n  modes: [aggregated, disaggregated]",
    )
    return None if plan.decision is None else plan.certificate


def devices(found: Sequence[ServeCertificate | None]) -> list[float]:
    """Of each plan, none being the most; bounds are checked on the way."""
    for one in found:
        if one is not None:
            assert present(one.bound) <= present(one.objective) * (1.0 + 1e-6)
            gap = 1.0 - present(one.bound) / present(one.objective)
            assert one.gap_ratio == pytest.approx(max(gap, 0.0), abs=1e-6)
            assert (one.status == "optimal") == (one.gap_ratio <= 1e-6)
    objectives = [None if one is None else one.objective for one in found]
    return [float("inf") if one is None else one for one in objectives]


@pytest.mark.slow
def test_more_time_to_the_first_token_never_takes_more_devices(tmp_path: Path) -> None:
    found = devices([certificate(tmp_path, ttft_s=at) for at in (0.45, 0.6, 2.0)])
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


@pytest.mark.slow
def test_more_time_per_token_never_takes_more_devices(tmp_path: Path) -> None:
    found = devices([certificate(tmp_path, tpot_s=at) for at in (0.03, 0.04, 0.06)])
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


def test_more_traffic_never_takes_fewer_devices(tmp_path: Path) -> None:
    found = devices([certificate(tmp_path, rate=at) for at in (1.0, 8.0, 20.0)])
    assert found == sorted(found)
    assert found[0] < found[-1]
