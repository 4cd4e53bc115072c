from collections.abc import Callable
from itertools import chain

from profilers.records import Case
from tests.rows import each_row
from tuner.costs.reference.operations import Part
from tuner.costs.reference.update import (
    Unit,
    embedding_units,
    head_units,
    layer_units,
    update_time,
)
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.prices.profile import ProfilePrices
from tuner.spec.accounting import num_parameters
from tuner.spec.tune import Adapters

Make = Callable[..., Workload]
Cut = Callable[..., StepDegrees]
TableOf = Callable[[Callable[[Case], float]], ProfilePrices]

UNIT = Unit(parameters=1000, ranks=4, stride=2)
# Attention 64 * (8 + 4) * 16, norms 2 * 64, router 64 * 8; 8 experts of 3 * 64 * 128.
ATTENTION, NORMS, ROUTER, EXPERT = 12288, 128, 512, 24576


def _bytes_moved(case: Case) -> float:
    """A table whose seconds are the bytes of collectives, and nothing else."""
    return float(case.axes["bytes"]) if case.operation == "collective" else 0.0


def test_one_device_has_one_unit_of_dense_weights_and_one_of_experts(
    tiny_work: Make, cut: Cut
) -> None:
    assert layer_units(tiny_work(layers="m"), cut(), layer=0) == (
        Unit(parameters=ATTENTION + NORMS + ROUTER, ranks=1, stride=1),
        Unit(parameters=8 * EXPERT, ranks=1, stride=1),
    )


def test_experts_are_summed_among_the_ranks_that_hold_the_same(tiny_work: Make, cut: Cut) -> None:
    *_, experts = layer_units(tiny_work(layers="m"), cut(data=4, expert=2), layer=0)
    assert experts == Unit(parameters=4 * EXPERT, ranks=2, stride=2)


def test_tensor_ranks_replicate_norms_and_share_matrices(tiny_work: Make, cut: Cut) -> None:
    units = layer_units(tiny_work(layers="m"), cut(tensor=2, data=2, expert=2), layer=0)
    assert units == (
        Unit(parameters=NORMS + ROUTER, ranks=4, stride=1),
        Unit(parameters=ATTENTION // 2, ranks=2, stride=2),
        Unit(parameters=4 * EXPERT, ranks=2, stride=2),
    )


def test_the_units_of_one_device_hold_the_whole_model(tiny_work: Make, cut: Cut) -> None:
    work = tiny_work(layers="ddmm", moe={"shared_ffn_size": 32})
    layers = chain.from_iterable(layer_units(work, cut(), layer=layer) for layer in range(4))
    ends = (*embedding_units(work, cut()), *head_units(work, cut()))
    assert sum(unit.parameters for unit in (*layers, *ends)) == num_parameters(work.model)


@each_row(
    ("zero_stage", "once", "every"),
    # 0: all-reduce 4 P. 1: reduce-scatter 4 P, gather 2 P. 2: the same, the first every time.
    # 3: gather 2 P twice, scatter 4 P.
    [(0, 4000, 0), (1, 6000, 0), (2, 2000, 4000), (3, 0, 8000)],
)
def test_the_stage_says_what_is_communicated_and_how_often(
    tiny_work: Make, cut: Cut, table_of: TableOf, zero_stage: int, once: int, every: int
) -> None:
    degrees = cut(data=8, expert=2, zero_stage=zero_stage)
    time = update_time((UNIT,), tiny_work(), degrees, table_of(_bytes_moved))
    assert sum(time.once_s.values()) == once
    assert sum(time.every_microbatch_s.values()) == every
    assert set(time.every_microbatch_s) <= {Part.DATA_COMMUNICATION}


def test_a_group_of_one_rank_communicates_nothing(
    tiny_work: Make, cut: Cut, table_of: TableOf
) -> None:
    isolated = Unit(parameters=1000, ranks=1, stride=1)
    for zero_stage in (0, 1, 3):
        time = update_time(
            (isolated,), tiny_work(), cut(zero_stage=zero_stage), table_of(_bytes_moved)
        )
        assert sum(time.once_s.values()) == sum(time.every_microbatch_s.values()) == 0.0


@each_row(("zero_stage", "updated"), [(0, 1000), (1, 250), (3, 250)])
def test_the_optimizer_updates_what_the_rank_owns(
    tiny_work: Make, cut: Cut, table_of: TableOf, zero_stage: int, updated: int
) -> None:
    table = table_of(lambda case: float(case.axes["parameters"]) if case.kind == "adamw" else 0.0)
    time = update_time((UNIT,), tiny_work(), cut(data=8, expert=2, zero_stage=zero_stage), table)
    assert time.once_s[Part.OPTIMIZER] == updated


def test_gradients_are_added_up_every_micro_batch_unless_they_are_reduced_then(
    tiny_work: Make, cut: Cut, table_of: TableOf
) -> None:
    def additions(case: Case) -> float:
        return 1.0 if case.kind == "accumulate" else 0.0

    for zero_stage, every in ((0, 1.0), (1, 1.0), (2, 1.0), (3, 0.0)):
        degrees = cut(data=8, expert=2, zero_stage=zero_stage)
        time = update_time((UNIT,), tiny_work(), degrees, table_of(additions))
        assert sum(time.every_microbatch_s.values()) == every


@each_row(
    ("zero_stage", "ranks", "every"),
    # Bytes of collectives: all-reduce 4 P; or gather 2 P, twice with 3, and reduce-scatter 4 P.
    [(0, 4, 4000), (2, 4, 6000), (3, 4, 8000), (0, 1, 0), (2, 1, 0), (3, 1, 0)],
)
def test_an_engine_that_synchronizes_in_every_micro_batch_communicates_nothing_after_them(
    tiny_work: Make, cut: Cut, table_of: TableOf, zero_stage: int, ranks: int, every: int
) -> None:
    work = tiny_work(batch={"synchronizes_every_microbatch": True})
    unit = Unit(parameters=1000, ranks=ranks, stride=2)
    degrees = cut(data=8, expert=2, zero_stage=zero_stage)
    time = update_time((unit,), work, degrees, table_of(_bytes_moved))
    assert sum(time.once_s.values()) == 0.0
    assert sum(time.every_microbatch_s.values()) == every


def test_fsdp2_copies_the_gradients_of_a_group_of_one_three_times(
    tiny_work: Make, cut: Cut, table_of: TableOf
) -> None:
    def copied(case: Case) -> float:
        return float(case.axes["bytes"]) if case.operation == "copy" else 0.0

    work = tiny_work(batch={"synchronizes_every_microbatch": True})
    for zero_stage, ranks, every in ((0, 1, 3 * 4000), (0, 4, 3 * 4000), (2, 4, 2000 + 4000)):
        unit = Unit(parameters=1000, ranks=ranks, stride=2)
        degrees = cut(data=8, expert=2, zero_stage=zero_stage)
        time = update_time((unit,), work, degrees, table_of(copied))
        assert time.every_microbatch_s[Part.DATA_COMMUNICATION] == every
        # The gradients are scaled before the update.
        assert time.once_s[Part.OPTIMIZER] == 4000 / (ranks if zero_stage else 1)


def test_frozen_weights_are_gathered_again_where_there_is_a_backward_pass(
    tiny_work: Make, cut: Cut, table_of: TableOf
) -> None:
    # The dense layers lie before the first adapter; embedding and head are not resharded.
    tune = Adapters(method="lora", rank=4, targets=("experts",))
    work = tiny_work(layers="ddmm", batch={"tune": tune})
    degrees = cut(data=2, zero_stage=3)
    groups = [
        *(layer_units(work, degrees, layer=layer) for layer in range(4)),
        embedding_units(work, degrees),
        head_units(work, degrees),
    ]
    for units, times in zip(groups, (1, 1, 2, 2, 1, 1), strict=True):
        # 2 bytes of a frozen weight; adapters are gathered twice and reduced in 4 bytes.
        expected = sum(2 * times * one.frozen + 8 * one.parameters for one in units)
        time = update_time(units, work, degrees, table_of(_bytes_moved))
        assert sum(time.every_microbatch_s.values()) == expected
        assert sum(time.once_s.values()) == 0.0
