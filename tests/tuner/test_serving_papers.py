"""Figures that papers on serving print, from the functions that plans are made of.

Others stand beside the code that they are about: crossovers of DistServe in costs/serve/
test_queueing.py, shares and rates of Prefill-as-a-Service in test_offload.py, operating points of
instance programs in solvers/instances/test_published.py.
"""

from pathlib import Path

import pytest

from profilers.kv_transfer.shards import CacheDegrees
from profilers.steps.config import LayerKind
from solvers.instances.problem import (
    Column,
    ColumnGroup,
    DevicePool,
    InstanceObjective,
    InstancePlan,
    InstanceRole,
    InstancesProblem,
    Route,
    TransferLink,
)
from solvers.registry import INSTANCES
from solvers.result import Status
from tests.expect import present
from tests.rows import each_row
from tests.tuner.formulas import crossover_load, prefill_ttft_s
from tuner.costs.serve.kv_transfer import rank_kv_bytes
from tuner.costs.serve.queueing import mean_wait_s
from tuner.spec.huggingface.read import read_model
from tuner.spec.model import ModelSpec

MODELS = Path(__file__).parents[2] / "examples" / "models"


def opt_66b() -> ModelSpec:
    """64 layers of 72 heads of 128; what else it has does not touch the cache."""
    plain = read_model(MODELS / "llama-3.1-8b")
    heads = {"num_heads": 72, "num_kv_heads": 72, "head_dim": 128}
    return plain.model_copy(
        update={
            "num_layers": 64,
            "layers": (LayerKind.DENSE,) * 64,
            "windowed": (False,) * 64,
            "attention": plain.attention.model_copy(update=heads),
        }
    )


def test_a_request_of_512_tokens_keeps_1_13_gib_of_opt_66b() -> None:
    # DistServe (arXiv:2401.09670), section 3.3: 1.13 GB, and about 90 Gbit/s at 10 requests/s.
    one = CacheDegrees()
    moved = rank_kv_bytes(opt_66b(), prefill=one, decode=one, tokens=512, bytes_per_element=2.0)
    found = moved.whole
    assert found == 2 * 64 * 9216 * 512 * 2
    assert found == pytest.approx(1.208e9, rel=1e-3)
    assert found / 2**30 == pytest.approx(1.125)
    assert 10.0 * found * 8 == pytest.approx(90e9, rel=0.08)


FITS_MS = {1: (18.10, 0.1019, 7.12e-6), 2: (14.74, 0.0686, 2.45e-6)}
"""OPT-13B on A100, prefill over tokens by tensor degree, from the simulator of DistServe's authors
(LLMServe/DistServe, simdistserve)."""


def test_two_devices_speed_up_a_prompt_of_opt_13b_by_1_43() -> None:
    alone_s, both_s = (
        1e-3 * (base + 512 * linear + 512**2 * square) for base, linear, square in FITS_MS.values()
    )
    assert alone_s == pytest.approx(0.0721, rel=1e-3)
    assert both_s == pytest.approx(0.0505, rel=2e-3)
    speed_up = alone_s / both_s
    assert speed_up == pytest.approx(1.43, abs=0.005)
    idle_s = prefill_ttft_s(rate_per_s=0.0, prefill_s=alone_s, speed_up=speed_up)
    assert idle_s == pytest.approx(both_s)
    # Both ways to use them answer equally soon at the crossing, by the paper's own equations.
    load = crossover_load(speed_up)
    tensor = 1.0 / speed_up + load / (2.0 * speed_up * (speed_up - load))
    assert tensor == pytest.approx(1.0 + load / (4.0 * (2.0 - load)), rel=1e-9)
    assert crossover_load(1.2) < load < crossover_load(1.5)


@each_row("share_percent", [20.0, 40.0, 70.0, 100.0])
def test_time_to_the_first_token_falls_as_semi_pd_writes_it(share_percent: float) -> None:
    # arXiv:2504.19867: TTFT = a / (x - 100 r l100), service 100 l100 / x, one M/M/1 queue.
    whole_s, rate = 0.03, 5.0
    service_s = 100.0 * whole_s / share_percent
    found = service_s + mean_wait_s(rate_per_s=rate, service_s=service_s)
    assert found == pytest.approx(100.0 * whole_s / (share_percent - 100.0 * rate * whole_s))
    stalled_s = 100.0 * whole_s / (100.0 * rate * whole_s)
    assert mean_wait_s(rate_per_s=rate, service_s=stalled_s) == float("inf")


LONG_SHARE = 0.496
DECODE_PER_S = 0.782
"""Prefill-as-a-Service (arXiv:2604.15039): requests above its threshold; decode by instance."""


def deployment(
    *, remote_per_s: float, local_per_s: float, long_share: float, counts: tuple[int, int]
) -> InstancesProblem:
    """Instances of eight: remote ones for long prompts, local ones for the rest and for decode."""
    remote, local = counts
    is_split = 0.0 < long_share < 1.0
    prefill = [
        Column(name="local", group=0, devices_P=(0, 8), rate_per_s=local_per_s),
        Column(name="remote", group=1, devices_P=(8, 0), rate_per_s=remote_per_s),
    ]
    kept = prefill if is_split else [prefill[1 if long_share == 1.0 else 0]]
    columns = tuple(
        Column(
            name=one.name,
            group=place,
            devices_P=one.devices_P,
            rate_per_s=one.rate_per_s,
        )
        for place, one in enumerate(kept)
    )
    decode = len(columns)
    return InstancesProblem(
        pools=(
            DevicePool(name="remote", devices=8 * remote),
            DevicePool(name="local", devices=8 * local),
        ),
        groups=(
            *(
                ColumnGroup(name=one.name, role=InstanceRole.PREFILL, request_class=place)
                for place, one in enumerate(columns)
            ),
            ColumnGroup(name="decode", role=InstanceRole.DECODE),
        ),
        columns=(
            *columns,
            Column(name="decode", group=decode, devices_P=(0, 8), rate_per_s=DECODE_PER_S),
        ),
        links=(),
        routes=tuple(Route(sender=place, receiver=decode) for place in range(decode)),
        share_C=(1.0 - long_share, long_share) if is_split else (1.0,),
        objective=InstanceObjective.RATE,
    )


def solved(problem: InstancesProblem) -> InstancePlan:
    outcome = INSTANCES.solve(problem, time_limit_s=60.0)
    assert outcome.status is Status.OPTIMAL
    return present(outcome.solution)


@each_row(
    ("remote_per_s", "local_per_s", "long_share", "counts", "served"),
    [
        (1.61 / 4, 1.64 / 3, LONG_SHARE, (4, 8), ((3, 4, 5), 3.24)),
        (1.0, 2.11 / 9, 0.0, (1, 12), ((9, 3), 2.11)),
        (2.45 / 4, 1.0, 1.0, (4, 8), (None, 2.45)),
    ],
)
def test_one_decode_rate_gives_every_row_of_the_published_table(
    remote_per_s: float,
    local_per_s: float,
    long_share: float,
    counts: tuple[int, int],
    served: tuple[tuple[int, ...] | None, float],
) -> None:
    # 3.91 / 5, 2.35 / 3 and 6.25 / 8 requests/s an instance: one rate, as the model has it.
    for total, instances in ((3.91, 5), (2.35, 3), (6.25, 8)):
        assert total / instances == pytest.approx(DECODE_PER_S, rel=2e-3)
    plan = solved(
        deployment(
            remote_per_s=remote_per_s,
            local_per_s=local_per_s,
            long_share=long_share,
            counts=counts,
        )
    )
    expected, rate_per_s = served
    assert plan.rate_per_s == pytest.approx(rate_per_s, rel=4e-3)
    assert expected is None or plan.count_J == expected


@each_row(("carried_bit_per_s", "fits"), [(3.9e12, True), (3.7e12, False)])
def test_512_devices_of_a_dense_cache_send_3_84_tbit_per_s(
    carried_bit_per_s: float, fits: bool
) -> None:
    # 64 instances of eight at 59.93 Gbit/s each, one request a second and instance.
    request_bytes = 59.93e9 / 8
    problem = InstancesProblem(
        pools=(DevicePool(name="p", devices=512), DevicePool(name="d", devices=640)),
        groups=(
            ColumnGroup(name="p", role=InstanceRole.PREFILL),
            ColumnGroup(name="d", role=InstanceRole.DECODE),
        ),
        columns=(
            Column(name="p", group=0, devices_P=(8, 0), rate_per_s=1.0),
            Column(name="d", group=1, devices_P=(0, 8), rate_per_s=1.0),
        ),
        links=(TransferLink(name="egress", bytes_per_s=carried_bit_per_s / 8),),
        routes=(Route(sender=0, receiver=1, request_bytes=request_bytes, links=(0,)),),
        objective=InstanceObjective.RATE,
    )
    plan = solved(problem)
    assert 8 * plan.flow_per_s_E[0] * request_bytes == pytest.approx(
        min(3.84e12, carried_bit_per_s), rel=2e-3
    )
    assert (plan.rate_per_s == pytest.approx(64.0)) is fits
