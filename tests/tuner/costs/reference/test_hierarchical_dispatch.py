"""Rows and bytes of hierarchical dispatch, by hand and against the reference step's own count.

hidden 64, 8 experts of width 128, top-2, sequences of 64 tokens in bf16, micro-batches of 2.
"""

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import (
    Dispatcher,
    Parallelism,
    Recompute,
    Stage,
    StepConfig,
    TokenRouting,
)
from tests.profilers.steps.crossing import inter_node_bytes
from tuner.costs.reference.hierarchical_dispatch import (
    DispatchRows,
    far_rows,
    kept_bytes,
    row_bytes,
    rows_by_node,
)
from tuner.costs.reference.operations import Part, expert_ops
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.engines.reference.step_config import model_shape
from tuner.search.reference.decisions import RecomputeOption, decision
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine
from tuner.search.reference.predict import predict

Make = Callable[..., Workload]
Cut = Callable[..., StepDegrees]

ON_TWO_NODES = {"data": 4, "expert": 4, "ranks_per_node": 2}
SLOPE = (0.3, 0.25, 0.15, 0.1, 0.1, 0.05, 0.05, 0.0)


def test_rows_of_even_loads_by_hand(tiny_work: Make, cut: Cut) -> None:
    actual = rows_by_node(tiny_work(layers="m"), cut(**ON_TWO_NODES), moe_layer=0, chunks=1)
    # 64 tokens choose 2 of 8 experts: 64 copies for each node, so all 64 tokens need both nodes.
    # A rank holds 2 sequences: 2 * (64 + 64) rows go across, 2 * 2 * 64 come, each for one copy.
    assert actual == (DispatchRows(sent=256, received=256, copies=256),) * 2


def test_a_node_with_most_of_the_load_gets_a_token_once(tiny_work: Make, cut: Cut) -> None:
    work = tiny_work(layers="m", batch={"load_ratio": (SLOPE,)})
    # 128 copies of a sequence: 102 for the first node, 26 for the second; 64 tokens at most.
    assert sum(work.copies_LE[0][:4]) == 102
    near, far = rows_by_node(work, cut(**ON_TWO_NODES), moe_layer=0, chunks=1)
    assert near == DispatchRows(sent=2 * (64 + 26), received=2 * 2 * 64, copies=2 * 2 * 102)
    assert far == DispatchRows(sent=2 * (64 + 26), received=2 * 2 * 26, copies=2 * 2 * 26)


def test_flat_dispatch_has_no_hops(tiny_work: Make, cut: Cut) -> None:
    with pytest.raises(ValueError, match="flat dispatch"):
        rows_by_node(tiny_work(layers="m"), cut(data=4, expert=4), moe_layer=0, chunks=1)


def test_what_is_kept_by_hand(tiny_work: Make, cut: Cut) -> None:
    kept = kept_bytes(
        tiny_work(layers="m"), cut(**ON_TWO_NODES), moe_layer=0, chunks=1, expert_rank=0
    )
    order, places = 256 * 2 * 8, 256 * 16
    results = 256 * (64 * 2 + 2 + 8)
    # 256 rows arrive and are sorted by the rank's two experts.
    computed = 256 * ((64 + 3 * 128) * 2 + 16)
    assert kept == order + places + results + computed


def test_hops_are_priced_by_the_groups_that_meet(tiny_work: Make, cut: Cut) -> None:
    work = tiny_work(layers="m")
    ops = expert_ops(work, cut(**ON_TWO_NODES), moe_layer=0, chunks=1)
    a2a = [op for op in ops if op.part is Part.EXPERT_COMMUNICATION]

    def across(size: int) -> str:
        return f"collective/all_to_all/bytes{size}-ranks2-stride2-world4"

    def within(size: int) -> str:
        return f"collective/all_to_all/bytes{size}-ranks2-stride1-world4"

    # Two counts; 256 rows with two expert numbers, and with 64 columns and two gates; inside the
    # node counts of four experts and 256 copies there and back; 256 sums back across.
    assert [op.case().id for op in a2a if not op.in_backward] == [
        across(16),
        across(256 * 2 * 4),
        across(256 * 66 * 2),
        within(32),
        within(256 * 128),
        within(256 * 128),
        across(256 * 128),
    ]
    assert [op.case().id for op in a2a if op.in_backward] == [
        across(256 * 128),
        within(256 * 128),
        within(256 * 128),
        across(256 * 66 * 2),
    ]
    flat = expert_ops(work, cut(data=4, expert=4), moe_layer=0, chunks=1)
    (gemms,), (same,) = (
        [op.case() for op in one if op.operation == "grouped_gemm" and not op.in_backward]
        for one in (ops, flat)
    )
    assert gemms == same


def test_one_rank_a_node_has_no_second_hop(tiny_work: Make, cut: Cut) -> None:
    degrees = cut(data=4, expert=4, ranks_per_node=1)
    ops = expert_ops(tiny_work(layers="m"), degrees, moe_layer=0, chunks=1)
    collectives = [op for op in ops if op.operation == "collective"]
    assert {(op.axes["ranks"], op.axes["stride"]) for op in collectives} == {(4, 1)}


@given(
    tensor=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2]),
    data=st.sampled_from([2, 4]),
    expert=st.sampled_from([1, 2, 4, 8]),
    ranks_per_node=st.sampled_from([1, 2, 4]),
    is_flat=st.booleans(),
    option=st.sampled_from([("none", 1), ("selective", 2), ("full", 4)]),
    weights=st.lists(st.integers(0, 9), min_size=8, max_size=8).filter(any),
)
@settings(deadline=None, max_examples=80)
def test_the_plan_counts_what_the_step_says_that_it_sends_between_nodes(
    tiny_work: Make,
    cut: Cut,
    formula_machine: Callable[..., PricedMachine],
    tensor: int,
    pipeline: int,
    data: int,
    expert: int,
    ranks_per_node: int,
    is_flat: bool,
    option: tuple[str, int],
    weights: list[int],
) -> None:
    if (tensor * data) % expert or (not is_flat and expert % ranks_per_node):
        return
    load = tuple(float(Fraction(weight, sum(weights))) for weight in weights)
    work = tiny_work(batch={"load_ratio": (load,) * 4, "global_batch_size": 16})
    hops = None if is_flat or expert <= ranks_per_node else ranks_per_node
    degrees = cut(tensor=tensor, pipeline=pipeline, data=data, expert=expert, ranks_per_node=hops)
    way = RecomputeOption(recompute=Recompute(option[0]), chunks=option[1])
    layers = (work.model.num_layers // pipeline,) * pipeline
    machine = formula_machine(num_devices=degrees.world, ranks_per_node=ranks_per_node)
    costs = CandidateCosts(work=work, degrees=degrees, machine=machine)
    predicted = predict(costs, decision(degrees, layers=layers, options=[way] * pipeline))
    config = StepConfig(
        model=model_shape(work.model),
        parallelism=Parallelism(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            expert=expert,
            dispatcher=Dispatcher.FLAT if hops is None else Dispatcher.HIERARCHICAL,
            ranks_per_node=hops,
        ),
        stages=tuple(
            Stage(num_layers=count, recompute=way.recompute, chunks=way.chunks) for count in layers
        ),
        sequence_length=work.sequence_length,
        global_batch_size=work.global_batch_size,
        micro_batch_size=degrees.micro_batch_size,
        precision="bf16",
        routing=TokenRouting(mode="forced", load_ratio=work.load_ratio),
    )
    counted = inter_node_bytes(config, ranks_per_node=ranks_per_node)
    assert predicted.inter_node_bytes == pytest.approx(counted, rel=1e-9)


def test_a_row_carries_its_gates_in_both_directions_and_its_experts_forwards(
    tiny_work: Make, cut: Cut
) -> None:
    work = tiny_work(layers="m")
    assert row_bytes(work, cut(data=4, expert=4), forwards=1) == 2 * 2 * 64 * 2
    hops = cut(**ON_TWO_NODES)
    assert row_bytes(work, hops, forwards=2) == 3 * (2 * 64 * 2 + 2 * 2) + 2 * 2 * 4
    # Of two sequences of each of four ranks every token crosses once.
    assert far_rows(work, hops, moe_layer=0, stage_rank=0, ranks_per_node=2) == 4 * 2 * 64
