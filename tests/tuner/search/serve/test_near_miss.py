"""The cheaper near miss, and the resource that keeps a mode from serving."""

from pathlib import Path

import pytest

from tests.expect import present
from tests.printed import words_of
from tests.tuner import serve_specs
from tuner.costs.serve.bands import PublishedMode
from tuner.plans.serve import ServePlan
from tuner.report.serve_page import serve_report
from tuner.search.serve.near_miss import LONGER_RATIO
from tuner.units import format_ratio


def planned(
    folder: Path,
    *,
    rate: float = 30.0,
    nodes: int = 6,
    ttft_ms: float = 2000.0,
    tpot_ms: float = 40.0,
    mode: PublishedMode = "aggregated",
    objective: str = "cost",
    extra: str = "",
    input_tokens: int = 2000,
) -> ServePlan:
    """Llama-3.1-8B on machines of one H100."""
    return serve_specs.planned(
        folder,
        model="llama-3.1-8b",
        pools=f"{{name: h100, device: h100-sxm, nodes: {nodes}, devices_per_node: 1,"
        f" price_per_device_hour: 2.0{extra}}}",
        traffic=f"{{rate: {rate}/s, input_tokens: {input_tokens}, output_tokens: 300}}",
        slo=f"{{ttft: {{p90: {ttft_ms}ms}}, tpot: {{p90: {tpot_ms}ms}}}}",
        extra=f"objective: {objective}\n  modes: [{mode}]",
    )


def test_the_cheapest_deployment_that_misses_by_less_than_its_band_is_named(
    tmp_path: Path,
) -> None:
    fits = planned(tmp_path)
    assert fits.near_miss is None
    for target, reached in (
        ("ttft p90", present(fits.predicted).ttft_s.p90),
        ("tpot p90", present(fits.predicted).tpot_s.p90),
    ):
        limit_s = 0.95 * reached
        key = f"{target[:4]}_ms"
        plan = planned(tmp_path, **{key: 1e3 * limit_s})  # type: ignore[arg-type]  # a latency
        near = present(plan.near_miss)
        assert (
            near.decision.num_devices
            == present(fits.decision).num_devices
            < present(plan.decision).num_devices
        )
        assert near.cost_per_hour == 2.0 * near.decision.num_devices
        (missed,) = near.missed
        assert missed.target == target
        assert missed.limit_s == pytest.approx(limit_s)
        assert limit_s < missed.seconds <= LONGER_RATIO * reached
        assert ServePlan.model_validate_json(plan.model_dump_json()) == plan
        shown = words_of(serve_report(plan))
        share = format_ratio(missed.seconds / missed.limit_s - 1.0, digits=1)
        assert f"misses {target.upper()} by {share} (" in shown
        assert "less than the error band; 3 devices, the chosen one takes 4" in shown


def test_no_near_miss_is_named_beyond_the_band_or_where_the_rate_is_the_goal(
    tmp_path: Path,
) -> None:
    assert planned(tmp_path, ttft_ms=60.0).near_miss is None
    assert planned(tmp_path, objective="rate", nodes=1).near_miss is None


def test_a_mode_that_serves_nothing_names_the_resource_and_its_value(tmp_path: Path) -> None:
    for asked, says in (
        ({"rate": 200.0, "nodes": 1}, ("devices: 1 serve at most", "of 200 requests/s; TPOT: ")),
        (
            {"rate": 50.0, "nodes": 1, "tpot_ms": 400.0, "ttft_ms": 9000.0},
            ("devices: 1 serve at most", "KV room: ", " tokens a rank"),
        ),
        (
            {"rate": 20.0, "nodes": 4, "mode": "disaggregated", "extra": ", nic: 1Gbit/s"},
            ("KV transfers: at most", "a request moves 250 MiB", "NICs of h100 191 MiB/s"),
        ),
        ({"nodes": 1, "mode": "disaggregated"}, ("memory: one instance of each takes 1 for",)),
        ({"ttft_ms": 1.0}, ("aggregated: TTFT: a prompt alone takes",)),
        ({"tpot_ms": 1.0}, ("aggregated: TPOT: a request alone takes",)),
    ):
        plan = planned(tmp_path, **asked)
        assert plan.decision is None, asked
        (mode,) = plan.modes
        assert mode.status == "none", asked
        for words in says:
            assert words in mode.told, (asked, mode.told)


def test_a_missed_target_is_named_with_its_value(tmp_path: Path) -> None:
    (mode,) = planned(tmp_path, rate=9.8, nodes=1, ttft_ms=180.0).modes
    assert mode.status == "missed"
    assert mode.told.startswith("TTFT P90 of ")
    assert "(SLO 180 ms) on 1 device, with 0 % of spare capacity" in mode.told
