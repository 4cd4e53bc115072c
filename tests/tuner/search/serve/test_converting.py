"""What a measured conversion of pages adds to a KV transfer."""

from dataclasses import replace
from pathlib import Path

import pytest

from profilers.records import Case, Measurement
from tests.profilers.testing import fake_profile
from tests.tuner.serve_specs import serve_spec
from tuner.config.serve import Role
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.goals.serve_spec import read_serve_spec
from tuner.prices.profile import ProfilePrices
from tuner.prices.serve.machine import ServingMachine
from tuner.search.serve.options import Option, ServingPool
from tuner.search.serve.problem import ServeProblem
from tuner.search.serve.solve_mode import build_serve_problem
from tuner.search.settings import SearchSettings

MIXTRAL = Path(__file__).parents[4] / "examples" / "models" / "mixtral-8x7b"
RATE = 2e9
"""Bytes per second that the table says."""


def table(kind: str) -> ProfilePrices:
    """Mixtral's layer, 2 x 8 heads x 128 x 2 bytes a token, from one rank into one or two."""
    rows = [
        Measurement(
            case=Case(
                operation="kv_conversion",
                kind=kind,
                dtype="bf16",
                axes={
                    "tokens": tokens,
                    "heads": 8,
                    "width": 128,
                    "page_from": 16,
                    "page_to": 16,
                    "tensor_from": 1,
                    "tensor_to": tensor,
                },
            ),
            times_s=(tokens * 4096 / RATE,),
        )
        for tokens in (256, 2048, 16384)
        for tensor in (1, 2)
    ]
    return ProfilePrices.from_profile(fake_profile(rows))


@pytest.fixture
def problem(tmp_path: Path) -> ServeProblem:
    path = serve_spec(
        tmp_path,
        pools="{name: h20, device: h20, devices_per_node: 8}",
        traffic="{rate: 2/s, input_tokens: 4000, output_tokens: 400}",
        slo="{ttft: {p90: 4s}, tpot: {p90: 60ms}}",
        extra="modes: [disaggregated]",
    )
    spec = read_serve_spec(path)
    sheet = find_device("h20")
    serving_pool = ServingPool(
        pool=spec.cluster.pools[0],
        machine=ServingMachine(engines=ENGINE_TRAITS, sheet=sheet, tables=None),
        memory_bytes=float(sheet.memory_bytes),
        source="datasheet",
    )
    return build_serve_problem(spec, (serving_pool,), SearchSettings())


def option(problem: ServeProblem, role: Role, *, tensor: int, kind: str | None = None) -> Option:
    found = next(
        one
        for one in problem.options.options
        if (one.role, one.degrees.attention_tensor, one.degrees.pipeline) == (role, tensor, 1)
    )
    measured = None if kind is None else table(kind)
    return replace(found, serving_pool=replace(found.serving_pool, conversions=measured))


def test_heads_that_are_cut_anew_take_the_measured_rate(problem: ServeProblem) -> None:
    own = problem.kv_transfers
    sender = option(problem, Role.PREFILL, tensor=1)
    plain = own.seconds(sender, option(problem, Role.DECODE, tensor=2))
    receiver = option(problem, Role.DECODE, tensor=2, kind="hnd_hnd")
    # Each of two ranks makes pages of the half that it receives.
    received = own.moved(sender, receiver).received
    assert received == 32 * 2 * 8 * 128 * 2 * 4000 / 2
    assert own.seconds(sender, receiver) - plain == pytest.approx(received / RATE, rel=1e-3)


def test_pages_that_are_alike_are_not_converted(problem: ServeProblem) -> None:
    own = problem.kv_transfers
    sender = option(problem, Role.PREFILL, tensor=1)
    receiver = option(problem, Role.DECODE, tensor=1, kind="hnd_hnd")
    assert own.converted_bytes_per_s(sender, receiver) is None
    assert own.path(sender, receiver).conversion_bytes_per_s is None


def test_what_nobody_measured_is_not_priced(problem: ServeProblem) -> None:
    own = problem.kv_transfers
    sender = option(problem, Role.PREFILL, tensor=1)
    receiver = option(problem, Role.DECODE, tensor=2, kind="nhd_nhd")
    assert own.path(sender, receiver).conversion_bytes_per_s is None
