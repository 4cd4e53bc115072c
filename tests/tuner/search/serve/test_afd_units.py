"""Sizes of attention and expert devices, for Janus' DeepSeek-V2 on H100."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.tuner.formulas import most_activated
from tuner.costs.serve.afd_step import Activated, uniform_activated
from tuner.costs.serve.curves import Floats
from tuner.costs.serve.decoder import Experts, Formats, decoder_of
from tuner.costs.serve.machine import ServingMachine
from tuner.devices.catalogue import find_device
from tuner.search.serve.afd_units import AfdUnit, cell_groups
from tuner.search.serve.demand import Demand
from tuner.search.serve.options import ServingPool
from tuner.spec.cluster import Cluster, Link, Pool
from tuner.spec.huggingface.read import read_model

MODELS = Path(__file__).parents[4] / "examples" / "models"
BF16 = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16")
DECODER = decoder_of(read_model(MODELS / "deepseek-v2"))
H100 = Pool(name="h100", device="h100-sxm", nodes=4, devices_per_node=8)
H20 = Pool(name="h20", device="h20", nodes=2, devices_per_node=8)
LINK = Link.model_validate({"between": ("h100", "h20"), "bandwidth": 4e11, "latency": 2e-5})


def demand(*, tpot_s: float = 0.2, rate_per_s: float = 1.0, longest: int = 4000) -> Demand:
    # ShareGPT as Janus uses it: 16 tokens in, 256 out.
    return Demand(
        rate_per_s=rate_per_s,
        input_tokens=16.0,
        output_tokens=256.0,
        computed_tokens=16.0,
        longest_input=longest,
        longest_output=256,
        ttft_s=10.0,
        tpot_s=tpot_s,
        concurrency=None,
        most_tokens=longest + 256,
        held_tokens=272.0,
        past_tokens=144.0,
        reserved_N=272.0 * np.arange(1.0, 1025.0),
        grown_N=144.0 * np.arange(1.0, 1025.0),
    )


def price_serving_pool(pool: Pool, *, memory_bytes: float | None = None) -> ServingPool:
    sheet = find_device(pool.device or "")
    return ServingPool(
        pool=pool,
        machine=ServingMachine(sheet=sheet, tables=None),
        memory_bytes=memory_bytes or float(sheet.memory_bytes),
        source="datasheet",
    )


def priced(
    *pools: Pool,
    links: tuple[Link, ...] = (),
    memory_bytes: float | None = None,
    wanted: Demand | None = None,
    activated: Activated = uniform_activated,
) -> tuple[AfdUnit, ...]:
    return tuple(
        cell_groups(
            [price_serving_pool(pool, memory_bytes=memory_bytes) for pool in pools],
            decoder=DECODER,
            formats=BF16,
            engine="sglang",
            demand=wanted or demand(),
            cluster=Cluster(pools=pools, links=links),
            activated=lambda serving_pool: activated,
        )
    )


def smallest(afd_units: Sequence[AfdUnit], tokens_per_s: float) -> AfdUnit:
    enough = [cell for cell in afd_units if cell.rate_per_s * 256.0 >= tokens_per_s]
    return min(enough, key=lambda cell: (cell.devices, -cell.rate_per_s))


def test_deepseek_v2_takes_few_attention_and_at_least_six_expert_devices() -> None:
    # Published: 1A6E at 64 requests in flight and 99 tokens/s a device, 2A6E at 256 and 240,
    # 4A6E at 512 with a tight target.
    afd_units = priced(H100)
    small = smallest(afd_units, 7 * 99.0)
    assert (small.attention_devices, small.expert_devices) == (1, 6)
    chosen = [smallest(afd_units, rate) for rate in (7 * 99.0, 8 * 240.0, 5e3, 1e4, 2e4)]
    assert all(cell.expert_devices >= 6 for cell in chosen)
    assert all(cell.attention_devices <= cell.expert_devices for cell in chosen)
    devices = [cell.devices for cell in chosen]
    assert devices == sorted(devices)


def test_a_tighter_target_lowers_what_every_size_serves() -> None:
    slow = {(c.attention_devices, c.expert_devices): c.rate_per_s for c in priced(H100)}
    tight = priced(H100, wanted=demand(tpot_s=0.05))
    assert tight
    assert all(
        cell.rate_per_s <= slow[cell.attention_devices, cell.expert_devices] * (1 + 1e-9)
        for cell in tight
    )
    assert max(cell.rate_per_s for cell in tight) < max(slow.values())
    assert priced(H100, wanted=demand(tpot_s=1e-4)) == ()


def test_within_the_target_one_more_expert_device_never_reads_more() -> None:
    of_one = [c for c in priced(H100, wanted=demand(tpot_s=0.04)) if c.attention_devices == 1]
    inside = [cell.rate_per_s for cell in of_one if cell.expert_devices <= 7]
    assert inside == sorted(inside)


def test_parts_that_fit_nowhere_give_no_afd_units() -> None:
    assert priced(H100, memory_bytes=6e9) == ()
    assert priced(H100, wanted=demand(longest=10**8)) == ()
    too_small = Pool(name="few", device="h100-sxm", nodes=1, devices_per_node=6)
    assert priced(too_small) == ()


def test_pools_share_an_afd_unit_only_over_a_link() -> None:
    alone = priced(H100, H20)
    assert {(c.attention.pool.name, c.experts.pool.name) for c in alone} == {
        ("h100", "h100"),
        ("h20", "h20"),
    }
    linked = priced(H100, H20, links=(LINK,))
    assert ("h20", "h100") in {(c.attention.pool.name, c.experts.pool.name) for c in linked}
    assert all(cell.devices <= H100.num_devices for cell in alone if cell.attention.pool is H100)


def bound(experts: Experts, tokens_Q: Floats, devices: int) -> Floats:
    of_one = [
        most_activated(
            slots=-(-experts.num // devices),
            experts=experts.num,
            top_k=experts.top_k,
            batch_tokens=float(tokens),
            devices=devices,
        )
        for tokens in tokens_Q
    ]
    return np.array(of_one)


def drawn(experts: Experts, tokens_Q: Floats, devices: int) -> Floats:
    """Read experts of the most-loaded device, drawn; all of them where few stay unread."""
    rng = np.random.default_rng(3)
    slots = -(-experts.num // devices)
    read_Q = np.full_like(tokens_Q, slots)
    host_E = np.arange(experts.num) // slots
    for place in np.flatnonzero(tokens_Q < 300.0):
        most = []
        for _ in range(12):
            scores = rng.random((max(round(float(tokens_Q[place])), 1), experts.num))
            chosen = scores.argpartition(experts.top_k, axis=1)[:, : experts.top_k]
            most.append(np.bincount(host_E[np.unique(chosen)]).max())
        read_Q[place] = np.mean(most)
    return read_Q


def test_what_the_bound_serves_lies_below_drawn_routing_and_the_estimate_near_it() -> None:
    pool = Pool(name="h100", device="h100-sxm", nodes=1, devices_per_node=9)
    wanted = demand(tpot_s=0.03)
    by_bound, by_draw, by_estimate = (
        priced(pool, wanted=wanted, activated=activated)
        for activated in (bound, drawn, uniform_activated)
    )
    assert by_draw
    for low, simulated, near in zip(by_bound, by_draw, by_estimate, strict=True):
        assert low.rate_per_s <= simulated.rate_per_s * (1.0 + 1e-9)
        assert near.rate_per_s == pytest.approx(simulated.rate_per_s, rel=0.05)
