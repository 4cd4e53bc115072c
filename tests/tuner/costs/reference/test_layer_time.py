from collections.abc import Callable

import pytest

from profilers.records import Case
from profilers.steps.config import Recompute
from tests.rows import each_row
from tuner.costs.reference.layer_time import (
    PartSeconds,
    layer_time,
    pass_time,
    scale_parts,
    sum_parts,
)
from tuner.costs.reference.operations import COMMUNICATION, Part, boundary_ops, layer_ops
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.prices.profile import ProfilePrices

Make = Callable[..., Workload]
Cut = Callable[..., StepDegrees]
TableOf = Callable[[Callable[[Case], float]], ProfilePrices]


@pytest.fixture
def table(table_of: TableOf, formula_s: Callable[[Case], float]) -> ProfilePrices:
    return table_of(formula_s)


@each_row("chunks", [1, 2, 8])
@each_row("degrees", [{}, {"tensor": 2}, {"data": 2, "expert": 2}])
def test_recomputation_adds_the_forward_passes_it_repeats(
    tiny_work: Make, cut: Cut, table: ProfilePrices, degrees: dict[str, int], chunks: int
) -> None:
    work, cuts = tiny_work(layers="m"), cut(**degrees)
    outside, inside = (
        pass_time(ops, table) for ops in layer_ops(work, cuts, layer=0, chunks=chunks)
    )
    out_f, in_f = sum(outside.forward_s.values()), sum(inside.forward_s.values())
    time = {
        level: layer_time(work, cuts, table, layer=0, recompute=level, chunks=chunks)
        for level in Recompute
    }
    kept = time[Recompute.NONE].total_s
    assert kept == pytest.approx(outside.total_s + inside.total_s)
    assert time[Recompute.SELECTIVE].total_s == pytest.approx(kept + in_f)
    assert time[Recompute.FULL].total_s == pytest.approx(kept + out_f + in_f)
    for one in time.values():
        assert one.forward_s == time[Recompute.NONE].forward_s
        assert one.backward_s == time[Recompute.NONE].backward_s


def test_a_dense_layer_repeats_all_or_nothing(
    tiny_work: Make, cut: Cut, table: ProfilePrices
) -> None:
    none, selective, full = (
        layer_time(tiny_work(layers="dm"), cut(), table, layer=0, recompute=level, chunks=4)
        for level in Recompute
    )
    assert selective == none
    assert full.recompute_s == full.forward_s


def test_one_product_by_hand(tiny_work: Make, cut: Cut, table_of: TableOf) -> None:
    # Only dense GEMMs cost anything, one second each: qkv, output, router; 3 forward, 3 back.
    table = table_of(lambda case: 1.0 if case.operation == "gemm" else 0.0)
    time = layer_time(
        tiny_work(layers="m"), cut(), table, layer=0, recompute=Recompute.FULL, chunks=2
    )
    assert time.forward_s[Part.ATTENTION] == 2.0
    assert time.forward_s[Part.ROUTER] == 1.0
    assert (sum(time.backward_s.values()), sum(time.recompute_s.values())) == (3.0, 3.0)


def test_a_call_of_many_times_costs_as_many(tiny_work: Make, cut: Cut, table_of: TableOf) -> None:
    table = table_of(lambda case: 1.0 if case.operation == "grouped_gemm" else 0.0)
    for chunks in (1, 2, 8):
        time = layer_time(
            tiny_work(layers="m"), cut(), table, layer=0, recompute=Recompute.NONE, chunks=chunks
        )
        assert time.total_s == 2.0 * chunks


def test_more_chunks_never_take_less_time(tiny_work: Make, cut: Cut, table: ProfilePrices) -> None:
    for degrees in (cut(), cut(data=2, expert=2), cut(tensor=2)):
        seconds = [
            layer_time(
                tiny_work(layers="m"),
                degrees,
                table,
                layer=0,
                recompute=Recompute.SELECTIVE,
                chunks=chunks,
            ).total_s
            for chunks in (1, 2, 4, 8)
        ]
        assert seconds == sorted(seconds)


def test_every_collective_pays_the_arrival_skew_of_the_compute_before_it(
    tiny_work: Make, cut: Cut, table_of: TableOf
) -> None:
    # Two ranks of experts. Forward, 30 s of GEMMs, and skew at the counts, dispatch and combine:
    # 10 s of work before each. Backward, dispatch and combine only: 15 s.
    waited: list[Case] = []

    def seconds(case: Case) -> float:
        if case.operation == "rendezvous":
            waited.append(case)
            return case.axes["work_us"] * 1e-7
        return 30.0 if case.operation == "grouped_gemm" else 0.0

    work, degrees = tiny_work(layers="m"), cut(data=2, expert=2)
    time = pass_time(layer_ops(work, degrees, layer=0, chunks=1)[1], table_of(seconds))
    assert time.forward_s[Part.EXPERT_COMMUNICATION] == pytest.approx(3 * 1.0)
    assert time.backward_s[Part.EXPERT_COMMUNICATION] == pytest.approx(2 * 1.5)
    assert {case.axes["work_us"] for case in waited} == {10_000_000, 15_000_000}
    groups = {tuple(case.axes[axis] for axis in ("ranks", "stride", "world")) for case in waited}
    assert groups == {(2, 1, 2)}


@each_row("chunks", [1, 2, 8])
def test_a_share_lost_of_the_work_is_lost_however_often_ranks_meet(
    tiny_work: Make, cut: Cut, table_of: TableOf, chunks: int
) -> None:
    def seconds(case: Case) -> float:
        if case.operation == "rendezvous":
            return case.axes["work_us"] * 1e-7
        return 30.0 / chunks if case.operation == "grouped_gemm" else 0.0

    time = layer_time(
        tiny_work(layers="m"),
        cut(data=2, expert=2),
        table_of(seconds),
        layer=0,
        recompute=Recompute.NONE,
        chunks=chunks,
    )
    assert time.by_part()[Part.EXPERT_COMMUNICATION] == pytest.approx(0.1 * 2 * 30.0)


def test_no_arrival_skew_without_collectives_or_compute(
    tiny_work: Make, cut: Cut, table_of: TableOf
) -> None:
    def only(operation: str) -> ProfilePrices:
        known = {"rendezvous": 1e9, operation: 1.0}
        return table_of(lambda case: known.get(case.operation, 0.0))

    for ops in layer_ops(tiny_work(layers="m"), cut(), layer=0, chunks=1):
        assert not set(pass_time(ops, only("gemm")).by_part()) & COMMUNICATION
    # Sends between stages are no meetings: a pipeline's slack absorbs them.
    assert pass_time(boundary_ops(tiny_work(), cut(pipeline=2)), only("collective")).total_s == 2.0
    # Where only the all-to-all takes time, there is no skew: three there, two back.
    _, inside = layer_ops(tiny_work(layers="m"), cut(data=2, expert=2), layer=0, chunks=1)
    assert pass_time(inside, only("collective")).total_s == 5.0


def test_parts_add_up_and_scale() -> None:
    one: PartSeconds = {Part.HEAD: 1.0}
    other: PartSeconds = {Part.HEAD: 2.0, Part.FFN: 4.0}
    assert sum_parts((one, other)) == {Part.HEAD: 3.0, Part.FFN: 4.0}
    assert scale_parts(other, 0.5) == {Part.HEAD: 1.0, Part.FFN: 2.0}
    assert sum_parts(()) == {}
