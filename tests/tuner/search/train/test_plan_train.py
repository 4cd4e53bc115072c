"""Plans of the worked examples on smaller machines, from datasheets and shipped residuals."""

import time
from pathlib import Path

import pytest

from tests.expect import present
from tests.printed import flat
from tests.tuner.search.train.testing import NOTHING, planned
from tuner.cli.plan_text import plan_text
from tuner.costs.train.calibration import shipped
from tuner.goals.train_spec import read_spec
from tuner.plans.train import Plan
from tuner.search.settings import Deadline, SearchSettings
from tuner.search.train.build_problem import build_problem, price_pool
from tuner.search.train.larger_pool import OFFLOADED, more_nodes
from tuner.search.train.memory_risk import LIKELY, SMALL, USUAL_RUN_S
from tuner.search.train.plan_train import make_analytic_plan
from tuner.search.train.preference import TOLERANCE_RATIO, less_chance_words
from tuner.search.train.search import search
from tuner.spec.goal import Checkpoint, Reliability
from tuner.spec.spec import Spec
from tuner.units import format_ratio, format_s

WORKED = Path(__file__).parents[4] / "examples" / "worked"


FEW = {
    "context_parallel_size": (1,),
    "micro_batch_size": (1, 2),
    "tensor_model_parallel_size": (1, 2),
    "activation_offload": (False,),
}
"""Limits that halve the time of a search."""


def spec_of(name: str, *, nodes: int, batch: int) -> Spec:
    spec = read_spec(WORKED / name / "spec.yaml")
    (pool,) = spec.cluster.pools
    cluster = spec.cluster.model_copy(
        update={"pools": (pool.model_copy(update={"nodes": nodes, "price_per_device_hour": 2.0}),)}
    )
    goal = spec.goal.model_copy(update={"global_batch_size": batch, "tokens": 1e11})
    limited = spec.search.model_copy(update=FEW)
    return spec.model_copy(update={"cluster": cluster, "goal": goal, "search": limited})


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Mixtral 8x7B on two A100 servers."""
    return planned(spec_of("mixtral-8x7b-64-a100", nodes=2, batch=64))


def test_the_plan_uses_all_devices_and_fits(plan: Plan) -> None:
    assert present(plan.decision).num_devices == 16
    assert sum(present(plan.decision).pipeline_layout) == plan.model.num_layers
    assert max(present(plan.predicted).peak_memory_bytes) <= 0.95 * 80 * 2**30
    assert 0.2 < (present(plan.predicted).mfu_ratio or 0.0) < 0.8
    causes_s = present(plan.predicted).breakdown_s.values()
    assert sum(causes_s) == pytest.approx(present(plan.predicted).step_time_s)


def test_runner_ups_are_slower_and_say_why(plan: Plan) -> None:
    assert plan.alternatives
    fastest_s = present(plan.certificate.objective)
    for other in plan.alternatives:
        assert other.predicted.step_time_s >= fastest_s * (1 - 1e-9)
        assert other.lost_by


def test_a_plan_that_is_preferred_is_near_the_fastest_and_has_a_gap_of_its_own(plan: Plan) -> None:
    slower = present(plan.predicted).step_time_s / present(plan.preferred).fastest_step_s - 1.0
    assert plan.certificate.objective == pytest.approx(present(plan.preferred).fastest_step_s)
    assert present(plan.certificate.bound) <= present(plan.certificate.objective)
    assert plan.certificate.gap_ratio < 0.05
    assert slower == pytest.approx(present(plan.preferred).slower_ratio)
    assert slower <= TOLERANCE_RATIO
    assert present(plan.preferred).reasons
    assert present(plan.certificate.decision_gap_ratio) >= plan.certificate.gap_ratio
    (fastest,) = (o for o in plan.runners_up if o.decision == present(plan.preferred).fastest)
    assert "preference" in fastest.lost_by


def test_one_chance_is_said_everywhere_and_what_an_excluded_fastest_would_come_to() -> None:
    """Qwen3-30B on seven larger H100: the fastest probably runs out, and nothing is safe."""
    spec = read_spec(WORKED / "qwen3-30b-a3b-16-h100" / "spec.yaml")
    (pool,) = spec.cluster.pools
    changes = {"nodes": 1, "devices_per_node": 7, "usable_memory_ratio": 1.0}
    changes |= {"memory_per_device": 94_600_000_000}
    small = spec.cluster.model_copy(update={"pools": (pool.model_copy(update=changes),)})
    goal = spec.goal.model_copy(update={"global_batch_size": 420, "routing": None, "tokens": None})
    limits = spec.search.model_copy(update={"optimizer_offload": (False,)})
    plan = planned(spec.model_copy(update={"cluster": small, "goal": goal, "search": limits}))
    one, own_s = present(plan.preferred), present(plan.predicted).step_time_s
    chance = present(plan.predicted).out_of_memory_probability or 0.0
    other = one.fastest_out_of_memory_probability or 0.0
    assert SMALL < chance <= LIKELY < other
    assert one.reasons[0] == less_chance_words(chance, instead_of=other)
    text = flat(plan_text(plan, folder=Path()))
    assert text.startswith(f"WARNING {format_ratio(chance)} chance of running out of memory")
    (fastest,) = (o.predicted for o in plan.runners_up if o.decision == one.fastest)
    assert fastest.out_of_memory_probability == pytest.approx(other)
    # Failed starts and restarts of both are a share of a run of a week.
    lost_s = sum(o.out_of_memory_loss_s or 0.0 for o in (fastest, present(plan.predicted)))
    tried_first_s = (1.0 - other) * fastest.step_time_s + other * own_s
    tried_first_s += lost_s * fastest.step_time_s / USUAL_RUN_S
    assert one.fastest_tried_first_step_s == pytest.approx(tried_first_s)
    assert (
        f" trade the fastest is excluded: {format_ratio(other)} chance of running out of "
        "memory; tried first, with this plan as fallback, a step is expected to take "
        f"{format_s(tried_first_s)}"
    ) in text


def test_the_pareto_front_trades_time_for_memory(plan: Plan) -> None:
    times = [point.step_time_s for point in plan.pareto]
    peaks = [point.peak_memory_bytes for point in plan.pareto]
    assert times == sorted(times)
    assert peaks == sorted(peaks, reverse=True)
    assert all(point.cost_per_step for point in plan.pareto)


def test_failures_lengthen_the_run_and_its_bill(plan: Plan) -> None:
    spec = spec_of("mixtral-8x7b-64-a100", nodes=2, batch=64)
    assert spec.goal.reliability is None
    failing = Reliability(device_mtbf=1e6, restart=600.0, checkpoint=Checkpoint())
    goal = spec.goal.model_copy(update={"reliability": failing})

    def run(made: Plan) -> tuple[float, float]:
        return present(present(present(made.predicted).run).wall_clock_s), present(
            present(present(made.predicted).run).cost
        )

    never, often = run(plan), run(planned(spec.model_copy(update={"goal": goal})))
    assert often[0] > never[0]
    assert often[1] > never[1]


def test_too_little_memory_is_said_with_an_amount_that_would_do() -> None:
    spec = spec_of("mixtral-8x7b-64-a100", nodes=1, batch=8)
    (pool,) = spec.cluster.pools
    small = pool.model_copy(update={"memory_per_device": 8 * 2**30})
    cluster = spec.cluster.model_copy(update={"pools": (small,)})
    made = planned(spec.model_copy(update={"cluster": cluster}))
    assert made.decision is None
    assert made.certificate.status == "infeasible"
    assert made.binding_constraint == "memory_per_device"
    way_out = made.relaxations[-1]
    assert way_out.limit == "memory_per_device"
    assert way_out.decision is not None
    size, unit = way_out.change.split(" per device instead of ")[0].split()
    assert unit == "GiB"
    # The size that is printed is what a device must have: with it something fits.
    large = pool.model_copy(update={"memory_per_device": float(size) * 2**30})
    problem = build_problem(spec, price_pool(large, residuals=shipped()))
    assert search(problem, SearchSettings(top=1)).solutions is not None


def test_no_more_nodes_are_searched_for_once_the_shared_time_limit_has_passed() -> None:
    spec = spec_of("mixtral-8x7b-64-a100", nodes=1, batch=8)
    (pool,) = spec.cluster.pools
    small = pool.model_copy(update={"memory_per_device": 8 * 2**30})
    spec = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"pools": (small,)})})
    settings = SearchSettings(top=1, time_limit_s=100.0, clock=lambda: 40.0)
    over = Deadline(begun_s=-100.0, limit_s=100.0, clock=settings.clock)
    assert (
        settings.until(Deadline(begun_s=0.0, limit_s=100.0, clock=settings.clock)).time_limit_s
        == 60.0
    )
    assert settings.until(over).time_limit_s == 0.0
    priced_pool = price_pool(spec.cluster.pools[0], residuals=shipped())
    assert more_nodes(spec, priced_pool, settings=settings.until(over), band=(0.9, 1.1)) == ()


def test_an_offer_of_nodes_says_that_it_needs_offloading() -> None:
    """Mixtral 8x22B on one A100 server fits on two with its optimizer on the hosts."""
    spec = read_spec(WORKED.parent / "checks" / "train-infeasible" / "spec.yaml")
    priced_pool = price_pool(spec.cluster.pools[0], residuals=shipped())
    settings = SearchSettings(top=1, time_limit_s=60.0, clock=time.perf_counter)
    offered, plain = more_nodes(spec, priced_pool, settings=settings, band=(0.9, 1.1))
    assert present(offered.decision).optimizer_offload
    assert offered.change.startswith(f"2 nodes instead of 1: 16 devices{OFFLOADED}; host memory: ")
    # Beside it the nearest that asks nothing of the hosts.
    assert not present(plain.decision).optimizer_offload
    assert not present(plain.decision).activation_offload
    nodes = present(plain.decision).num_devices // 8
    assert nodes > 2
    assert plain.change == f"{nodes} nodes instead of 1: {8 * nodes} devices"


@pytest.mark.slow
def test_overlaps_that_want_opposite_queues_are_named() -> None:
    spec = spec_of("mixtral-8x7b-64-a100", nodes=2, batch=64)

    def notes(**limits: tuple[int | bool, ...]) -> str:
        limited = spec.search.model_copy(update=limits)
        return " ".join(planned(spec.model_copy(update={"search": limited})).provenance.notes)

    both = {"tensor_model_parallel_size": (2,), "a2a_overlap": (True,)}
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in notes(**both)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in notes(**{**both, "a2a_overlap": (False,)})


def test_a_search_that_ended_early_says_what_is_not_known_and_how_to_know_it() -> None:
    spec = spec_of("mixtral-8x7b-64-a100", nodes=1, batch=64)
    (pool,) = spec.cluster.pools
    small = pool.model_copy(update={"memory_per_device": 12 * 2**30})
    cluster = spec.cluster.model_copy(update={"pools": (small,)})
    priced_pool = price_pool(small, residuals=shipped())
    settings = SearchSettings(top=3, time_limit_s=1e-6, clock=time.perf_counter)
    made = make_analytic_plan(
        spec.model_copy(update={"cluster": cluster}),
        priced_pool,
        settings=settings,
        provenance=NOTHING,
    )
    space = made.certificate.space
    assert made.decision is None
    assert made.certificate.status == "unknown"
    assert made.binding_constraint.startswith(
        f"whether anything fits is not known: {space.open} combinations were neither solved nor "
        "ruled out (method bounds, time limit "
    )
    assert "plan again with a longer --time-limit" in made.binding_constraint
