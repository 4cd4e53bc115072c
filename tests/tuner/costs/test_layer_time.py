from collections.abc import Callable

import pytest

from profilers.records import Case
from profilers.steps.config import Recompute
from tuner.costs.kernel_table import KernelTable
from tuner.costs.layer_time import added, call_time, layer_time, scaled
from tuner.costs.operations import Part, layer_calls
from tuner.costs.workload import Degrees, Workload

Make = Callable[..., Workload]
Cut = Callable[..., Degrees]
TableOf = Callable[[Callable[[Case], float]], KernelTable]


@pytest.fixture
def table(table_of: TableOf, formula_s: Callable[[Case], float]) -> KernelTable:
    return table_of(formula_s)


@pytest.mark.parametrize("chunks", [1, 2, 8])
@pytest.mark.parametrize("degrees", [{}, {"tensor": 2}, {"data": 2, "expert": 2}])
def test_recomputation_adds_the_forward_passes_it_repeats(
    tiny_work: Make, cut: Cut, table: KernelTable, degrees: dict[str, int], chunks: int
) -> None:
    work, cuts = tiny_work(layers="m"), cut(**degrees)
    outside, inside = (
        call_time(calls, table) for calls in layer_calls(work, cuts, layer=0, chunks=chunks)
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
    tiny_work: Make, cut: Cut, table: KernelTable
) -> None:
    none, selective, full = (
        layer_time(tiny_work(layers="dm"), cut(), table, layer=0, recompute=level, chunks=4)
        for level in Recompute
    )
    assert selective == none
    assert full.recompute_s == full.forward_s


def test_one_product_by_hand(tiny_work: Make, cut: Cut, table_of: TableOf) -> None:
    # Only dense products cost anything, one second each: qkv, output, router; 3 forward, 3 back.
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


def test_more_chunks_never_take_less_time(tiny_work: Make, cut: Cut, table: KernelTable) -> None:
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


def test_parts_add_up_and_scale() -> None:
    one, other = {Part.HEAD: 1.0}, {Part.HEAD: 2.0, Part.FFN: 4.0}
    assert added((one, other)) == {Part.HEAD: 3.0, Part.FFN: 4.0}
    assert scaled(other, 0.5) == {Part.HEAD: 1.0, Part.FFN: 2.0}
    assert added(()) == {}
