"""A candidate's layout problem: what it says of a layout must be what the plan predicts of it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import Recompute
from solvers.layout import check
from solvers.layout.patterns import least_objective_s
from solvers.layout.problem import Layout, LayoutProblem
from tests.solvers.layout import brute_force
from tuner.costs.reference.operations import Part
from tuner.costs.reference.temporaries import UNCOUNTED_RATIO
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.engines.targets import programs
from tuner.search.reference.decisions import RecomputeOption, decode
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine, layout_problem
from tuner.search.reference.predict import predict
from tuner.spec.tune import Adapters

Make = Callable[..., Workload]
Cut = Callable[..., StepDegrees]
MakeMachine = Callable[..., PricedMachine]

OPTIONS = (
    RecomputeOption(recompute=Recompute.NONE, chunks=1),
    RecomputeOption(recompute=Recompute.SELECTIVE, chunks=4),
    RecomputeOption(recompute=Recompute.FULL, chunks=1),
)
REFERENCE = programs(["reference"]).capabilities()
SKEWED = (0.4, *(0.6 / 7,) * 7)
EVEN = (0.125,) * 8


def _problem(costs: CandidateCosts, *, uniform_chunks: bool = True) -> LayoutProblem:
    return layout_problem(
        costs, options=OPTIONS, capabilities=REFERENCE, uniform_chunks=uniform_chunks
    )


@st.composite
def candidates(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, int]]:
    """Model and batch, and degrees that suit them."""
    layers = draw(st.sampled_from(["mmmm", "dmmm", "ddmm", "mmm"]))
    pipeline, virtual = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 1)]))
    if len(layers) == 4 and draw(st.booleans()):
        pipeline, virtual = 2, 2
    tensor = draw(st.sampled_from([1, 2]))
    data = draw(st.sampled_from([1, 2]))
    expert = draw(st.sampled_from([e for e in (1, 2, 4) if tensor * data % e == 0]))
    loads = draw(st.sampled_from([(), (EVEN, SKEWED), (SKEWED,)]))
    per_layer = tuple(loads[index % len(loads)] for index in range(layers.count("m")) if loads)
    model: dict[str, Any] = {
        "layers": layers,
        "moe": {"shared_ffn_size": draw(st.sampled_from([0, 64]))},
        "batch": {
            "precision": draw(st.sampled_from(["bf16", "fp32"])),
            "global_batch_size": draw(st.sampled_from([4, 8, 12])),
            "load_ratio": per_layer,
        },
    }
    degrees = {
        "tensor": tensor,
        "pipeline": pipeline,
        "virtual_pipeline": virtual,
        "data": data,
        "expert": expert,
        "micro_batch_size": draw(st.sampled_from([1, 2])),
        "zero_stage": draw(st.sampled_from([0, 1] if pipeline > 1 else [0, 1, 3])),
    }
    return model, degrees


def _random_layout(problem: LayoutProblem, draws: st.DataObject) -> Layout:
    allowed = [
        layout
        for layout in brute_force.layouts(problem)
        if not set(check.violations(problem, layout))
    ]
    return draws.draw(st.sampled_from(allowed))


@given(candidate=candidates(), factors=st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)), d=st.data())
@settings(deadline=None, max_examples=30)
def test_any_layout_is_worth_to_the_solver_what_the_plan_predicts(
    tiny_work: Make,
    cut: Cut,
    formula_machine: MakeMachine,
    candidate: tuple[dict[str, Any], dict[str, int]],
    factors: tuple[float, float],
    d: st.DataObject,
) -> None:
    model, degrees = candidate
    machine = formula_machine(computation=factors[0], communication=factors[1])
    costs = CandidateCosts(work=tiny_work(**model), degrees=cut(**degrees), machine=machine)
    problem = _problem(costs)
    layout = _random_layout(problem, d)
    predicted = predict(costs, decode(costs.degrees, layout, OPTIONS))
    objective = check.objective(problem, layout)
    assert predicted.step_time_s == pytest.approx(objective, rel=1e-9)
    assert sum(predicted.breakdown_s.values()) == pytest.approx(objective, rel=1e-9)
    assert 0.0 <= predicted.communication_s <= predicted.step_time_s
    assert least_objective_s(problem) <= objective * (1 + 1e-12)
    bound_D = check.memory_bytes_D(_problem(costs, uniform_chunks=False), layout)
    assert all(
        needed <= bound * (1.0 + UNCOUNTED_RATIO) + 1
        for needed, bound in zip(predicted.peak_memory_bytes, bound_D, strict=True)
    )


def test_one_stage_s_objective_by_hand(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    # One device, four micro-batches, one second for every dense product and nothing else: 4 layers
    # of 3 GEMMs forward and 6 backward cases (counted as 3), and the head's 1 + 1.
    machine = formula_machine(seconds=lambda case: 1.0 if case.operation == "gemm" else 0.0)
    problem = _problem(CandidateCosts(work=tiny_work(), degrees=cut(), machine=machine))
    assert problem.num_microbatches == 4
    assert check.objective(problem, Layout(layers_SR=((4,),), option_S=(0,))) == 4 * (4 * 6 + 2)
    assert check.objective(problem, Layout(layers_SR=((4,),), option_S=(2,))) == 4 * (4 * 9 + 2)


def test_costs_paid_once_a_step_are_spread_over_its_micro_batches(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    machine = formula_machine(seconds=lambda case: 1.0 if case.kind == "adamw" else 0.0)
    for micro_batch in (1, 2, 8):
        costs = CandidateCosts(
            work=tiny_work(), degrees=cut(micro_batch_size=micro_batch), machine=machine
        )
        problem = _problem(costs)
        # Each layer has a dense unit and an expert unit; embedding and head are one each.
        layout = Layout(layers_SR=((4,),), option_S=(0,))
        assert check.objective(problem, layout) == pytest.approx(4 * 2 + 2)


def test_layers_that_cost_the_same_are_one_run(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    work = tiny_work(layers="ddmmm", batch={"load_ratio": (EVEN, EVEN, SKEWED)})
    costs = CandidateCosts(work=work, degrees=cut(), machine=formula_machine())
    assert costs.runs == ((0, 2), (2, 2), (4, 1))
    assert _problem(costs).run_lengths == (2, 2, 1)


def test_a_stage_s_device_is_its_place_in_the_pipeline(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    degrees = cut(pipeline=2, virtual_pipeline=2)
    costs = CandidateCosts(
        work=tiny_work(), degrees=degrees, machine=formula_machine(memory_limit_bytes=1015)
    )
    problem = _problem(costs)
    assert problem.device_of_stage == (0, 1, 0, 1)
    # 1.5 % is the margin of what is not counted.
    assert problem.memory_limit_bytes_D.tolist() == [1000, 1000]
    assert problem.fixed_time_s_S[1] < problem.fixed_time_s_S[3]  # the head


def test_a_target_of_one_setting_for_all_stages_gets_one_option(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    costs = CandidateCosts(work=tiny_work(), degrees=cut(pipeline=2), machine=formula_machine())
    megatron = programs(["megatron-lm"]).capabilities()
    assert layout_problem(costs, options=OPTIONS, capabilities=megatron).uniform_option
    assert not _problem(costs).uniform_option


def test_waiting_losses_are_held_where_micro_batches_are_few(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    # 4 ranks and 2 micro-batches: both are forward before the first goes backward.
    work = tiny_work(batch={"global_batch_size": 4})
    few = CandidateCosts(work=work, degrees=cut(pipeline=4), machine=formula_machine())
    many = CandidateCosts(work=tiny_work(), degrees=cut(pipeline=4), machine=formula_machine())
    head = 2 * 16384 + 512 + 4 * 128 * 256
    assert few.non_layer_resident_bytes(3) == head + 4 * 64 * 8
    assert few.non_layer_transient_bytes(3) == head
    assert many.non_layer_resident_bytes(3) == 0
    assert many.non_layer_transient_bytes(3) == head + 8 * 64 * 8
    assert np.all(np.array([few.non_layer_transient_bytes(stage) for stage in range(3)]) == 0)


def test_ranks_that_wait_in_a_pipeline_leave_their_cores_to_the_others(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    def ratio(cores_per_rank: float, **degrees: int) -> float:
        machine = formula_machine(cores_per_rank=cores_per_rank)
        return CandidateCosts(
            work=tiny_work(), degrees=cut(**degrees), machine=machine
        ).core_sharing_ratio

    # 8 sequences in micro-batches of 2: with 2 stages 4 of 5 turns are work, with 4 chunks 8 of 9.
    assert ratio(0.5, pipeline=2) == pytest.approx(4 / 5)
    assert ratio(0.5, pipeline=2, virtual_pipeline=2) == pytest.approx(8 / 9)
    # Nobody is faster than with a core of its own, and nothing changes where everybody has one.
    assert ratio(0.9, pipeline=2) == 0.9
    assert ratio(1.0, pipeline=2) == 1.0
    assert ratio(0.5, data=2) == 1.0


def test_only_computing_is_faster_while_others_wait(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    isolated, shared = (
        CandidateCosts(
            work=tiny_work(),
            degrees=cut(pipeline=2, data=2, expert=2),
            machine=formula_machine(cores_per_rank=cores, ranks_per_node=2),
        ).time(0, OPTIONS[0])
        for cores in (1.0, 0.5)
    )
    # 8 / (2 * 2) = 2 micro-batches: 2 of 3 turns.
    for part, seconds in isolated.by_part().items():
        expected = seconds * (1.0 if part is Part.EXPERT_COMMUNICATION else 2 / 3)
        assert shared.by_part()[part] == pytest.approx(expected)


def test_a_layer_before_the_first_adapter_gathers_its_weights_once(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    tune = Adapters(method="lora", rank=4, targets=("experts",))
    costs = CandidateCosts(
        work=tiny_work(layers="dmd", batch={"tune": tune}),
        degrees=cut(data=2, zero_stage=3),
        machine=formula_machine(num_devices=2),
    )
    before, _, after = (sum(costs.update(layer).every_microbatch_s.values()) for layer in range(3))
    assert after == pytest.approx(2.0 * before)
