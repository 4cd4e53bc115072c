"""AFD where no release launches it: sizes over rates, limits of pools, and its line in the plan."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.config.serve import Role
from tuner.costs.serve.decoder import Formats, decoder_of
from tuner.costs.serve.machine import ServingMachine
from tuner.devices.catalogue import find_device
from tuner.goals.serve_plan import deploy
from tuner.plans.serve import ServePlan
from tuner.search.serve.afd_units import cell_groups
from tuner.search.serve.afd_unlaunched import AfdDeployment, choose_sizes
from tuner.search.serve.demand import Demand
from tuner.search.serve.options import ServingPool, price_options
from tuner.spec.cluster import Cluster, Link, Pool
from tuner.spec.huggingface.read import read_model

MODELS = Path(__file__).parents[4] / "examples" / "models"
BF16 = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16")
DECODER = decoder_of(read_model(MODELS / "deepseek-v2"))
DEMAND = Demand(
    rate_per_s=1.0,
    input_tokens=1000.0,
    output_tokens=256.0,
    computed_tokens=1000.0,
    longest_input=1000,
    longest_output=256,
    ttft_s=2.0,
    tpot_s=0.06,
    concurrency=None,
    most_tokens=4096,
    held_tokens=1256.0,
    past_tokens=1128.0,
    reserved_N=1256.0 * np.arange(1.0, 1025.0),
    grown_N=1128.0 * np.arange(1.0, 1025.0),
)
FAST = Pool(name="fast", device="h100-sxm", nodes=8, devices_per_node=8, price_per_device_hour=3.0)
CHEAP = Pool(name="cheap", device="h20", nodes=8, devices_per_node=8, price_per_device_hour=0.8)


def price_serving_pool(pool: Pool) -> ServingPool:
    sheet = find_device(pool.device or "")
    return ServingPool(
        pool=pool,
        machine=ServingMachine(sheet=sheet, tables=None),
        memory_bytes=float(sheet.memory_bytes),
        source="datasheet",
    )


class Priced:
    """Cells and prefill instances of some pools, ready to be counted."""

    def __init__(self, *pools: Pool, bandwidth: float | None = None) -> None:
        serving_pools = tuple(price_serving_pool(pool) for pool in pools)
        self.cluster = Cluster(pools=pools, links=self._links(pools, bandwidth))
        self.afd_units = tuple(
            cell_groups(
                serving_pools,
                decoder=DECODER,
                formats=BF16,
                engine="sglang",
                demand=DEMAND,
                cluster=self.cluster,
            )
        )
        self.prefills = price_options(
            serving_pools,
            decoder=DECODER,
            formats=BF16,
            engine="sglang",
            demand=DEMAND,
            roles=(Role.PREFILL,),
        ).options

    @staticmethod
    def _links(pools: tuple[Pool, ...], bandwidth: float | None) -> tuple[Link, ...]:
        if bandwidth is None:
            return ()
        between = tuple(pool.name for pool in pools)
        stated = {"between": between, "bandwidth": bandwidth, "latency": 1e-5}
        return (Link.model_validate(stated),)

    def choose_sizes(
        self, rate: float, *, spare: float = 0.0, by_price: bool = False
    ) -> AfdDeployment | None:
        return choose_sizes(
            self.afd_units,
            self.prefills,
            demand=replace(DEMAND, rate_per_s=rate),
            cluster=self.cluster,
            spare_ratio=spare,
            by_price=by_price,
        )


ONE_POOL = Priced(FAST)


@settings(deadline=None, max_examples=25)
@given(st.floats(0.1, 60.0), st.floats(1.0, 3.0))
def test_more_traffic_never_takes_fewer_devices(rate: float, factor: float) -> None:
    some, more = ONE_POOL.choose_sizes(rate), ONE_POOL.choose_sizes(rate * factor)
    assert some is not None
    assert more is None or more.devices >= some.devices


@settings(deadline=None, max_examples=25)
@given(st.floats(0.1, 60.0))
def test_what_is_chosen_serves_the_traffic_within_target_and_pool(rate: float) -> None:
    found = ONE_POOL.choose_sizes(rate)
    assert found is not None
    assert found.num_units * found.unit.rate_per_s >= rate
    assert found.prefills * found.prefill.rate_per_s >= rate
    assert found.tpot_s <= DEMAND.tpot_s * (1.0 + 1e-6)
    assert found.devices <= FAST.num_devices
    assert found.price_per_hour == pytest.approx(3.0 * found.devices)


def test_no_other_pair_of_sizes_takes_fewer_devices() -> None:
    found = ONE_POOL.choose_sizes(40.0)
    assert found is not None
    decode = found.devices - found.prefills * found.prefill.devices
    for cell in ONE_POOL.afd_units:
        assert -(-40.0 // cell.rate_per_s) * cell.devices >= decode


def test_spare_capacity_takes_as_many_devices_as_that_much_traffic() -> None:
    spare, plain = ONE_POOL.choose_sizes(20.0, spare=0.5), ONE_POOL.choose_sizes(30.0)
    assert spare is not None
    assert plain is not None
    assert spare.devices == plain.devices
    assert spare.tpot_s < plain.tpot_s


def test_traffic_beyond_the_pool_has_no_solution() -> None:
    assert ONE_POOL.choose_sizes(1e4) is None


def test_the_cheaper_solution_may_take_more_devices() -> None:
    both = Priced(FAST, CHEAP, bandwidth=4e11)
    cheap, few = both.choose_sizes(20.0, by_price=True), both.choose_sizes(20.0)
    assert cheap is not None
    assert few is not None
    assert cheap.price_per_hour < few.price_per_hour
    assert few.devices <= cheap.devices


def test_caches_cross_pools_only_where_the_link_carries_them() -> None:
    # A prompt of 1000 tokens caches 69 MB, ten a second 0.7 GB/s; units of one pool only.
    for bandwidth, crosses in ((4e11, True), (1e8, False), (None, False)):
        both = Priced(FAST, CHEAP, bandwidth=bandwidth)
        on_cheap = tuple(cell for cell in both.afd_units if cell.attention.pool is CHEAP)
        from_fast = tuple(one for one in both.prefills if one.serving_pool.pool is FAST)
        found = choose_sizes(
            on_cheap,
            from_fast,
            demand=replace(DEMAND, rate_per_s=10.0),
            cluster=both.cluster,
            spare_ratio=0.0,
            by_price=False,
        )
        assert (found is not None) is crosses


def planned(
    folder: Path,
    *,
    rate: float,
    nodes: int = 8,
    extra: str = "",
    price: float = 2.5,
    objective: str = "devices",
) -> ServePlan:
    path = folder / "spec.yaml"
    pool = (
        f"{{name: h100, device: h100-sxm, nodes: {nodes}, devices_per_node: 8,"
        f" price_per_device_hour: {price}}}"
    )
    path.write_text(
        "schema_version: 1\n"
        f"model: {MODELS / 'deepseek-v2'}\n"
        f"cluster: {{pools: [{pool}]}}\n"
        "goal:\n"
        "  kind: serve\n"
        "  engine: {name: sglang}\n"
        f"  traffic: {{rate: {rate}/s, input_tokens: 1000, output_tokens: 256}}\n"
        "  slo: {ttft: {p90: 2s}, tpot: {p90: 60ms}}\n"
        f"  objective: {objective}\n"
        f"  {extra}\n"
    )
    return deploy(path, time_limit_s=20.0).plan


def test_the_plan_says_what_the_mode_would_save_and_is_another(tmp_path: Path) -> None:
    plan = planned(tmp_path, rate=50.0, extra="modes: [disaggregated, attention_expert]")
    assert plan.decision is not None
    assert plan.decision.mode == "disaggregated"
    text = [one for one in plan.unlaunchable if "AFD (attention-FFN" in one.feature]
    assert len(text) == 1
    devices = int(text[0].feature.split("traffic: ")[1].split()[0])
    assert f"the chosen plan takes {plan.decision.num_devices}" in text[0].feature
    assert text[0].gain_ratio == pytest.approx(1.0 - devices / plan.decision.num_devices)
    assert text[0].gain_ratio > 0.0


def test_where_cost_counts_the_gain_is_of_the_price(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        rate=50.0,
        extra="modes: [disaggregated, attention_expert]",
        price=1.25,
        objective="cost",
    )
    assert plan.predicted is not None
    assert plan.predicted.cost_per_hour is not None
    text = [one for one in plan.unlaunchable if "AFD (attention-FFN" in one.feature]
    price = float(text[0].feature.split("; ")[-1].split()[0])
    assert text[0].gain_ratio == pytest.approx(1.0 - price / plan.predicted.cost_per_hour)
    assert text[0].gain_ratio > 0.0


def test_a_mode_that_serves_nothing_is_not_listed_as_a_gain(tmp_path: Path) -> None:
    plan = planned(tmp_path, rate=1.0, nodes=1, extra="modes: [aggregated, attention_expert]")
    text = [one for one in plan.unlaunchable if "AFD (attention-FFN" in one.feature]
    (own,) = (one for one in plan.modes if one.mode == "attention_expert")
    # What serves nothing is told in the table alone.
    assert not text
    assert own.status == "none"
    assert "lack the devices" in own.told


def test_a_mode_that_was_not_requested_is_not_listed(tmp_path: Path) -> None:
    plan = planned(tmp_path, rate=1.0, nodes=1, extra="modes: [aggregated]")
    assert not any("AFD (attention-FFN" in one.feature for one in plan.unlaunchable)
