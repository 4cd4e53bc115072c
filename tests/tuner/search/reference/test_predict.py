from collections.abc import Callable
from typing import Any

import pytest

from profilers.records import Case
from profilers.steps.config import Recompute
from tests.rows import each_row
from tuner.costs.reference.memory import layer_activations
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.plans.train import TrainPrediction
from tuner.search.reference.decisions import RecomputeOption, decision
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine
from tuner.search.reference.predict import band_around, predict

Make = Callable[..., Workload]
Cut = Callable[..., StepDegrees]
MakeMachine = Callable[..., PricedMachine]

NONE = RecomputeOption(recompute=Recompute.NONE, chunks=1)
FULL = RecomputeOption(recompute=Recompute.FULL, chunks=2)
SELECTIVE = RecomputeOption(recompute=Recompute.SELECTIVE, chunks=2)


def _predict(
    work: Workload,
    degrees: StepDegrees,
    machine: PricedMachine,
    *,
    layers: tuple[int, ...],
    option: RecomputeOption = NONE,
) -> TrainPrediction:
    costs = CandidateCosts(work=work, degrees=degrees, machine=machine)
    return predict(costs, decision(degrees, layers=layers, options=[option] * len(layers)))


def _one_second(operation: str, kind: str = "") -> Callable[[Case], float]:
    return lambda case: float(case.operation == operation and (not kind or case.kind == kind))


def test_bands_hold_the_errors_they_are_named_after() -> None:
    low, high = band_around(100.0, ratio=0.25)
    # |100 - m| / m <= 0.25 from m = 80 to m = 133.3.
    assert (low, high) == pytest.approx((80.0, 400.0 / 3.0))
    assert band_around(1.0, ratio=1.0) == (0.5, 1e6)


def test_a_pipeline_fills_and_drains(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    # Only the attention core costs: 1 + 1 seconds a layer. 3 + 1 layers, four micro-batches:
    # the fuller stage works 4 * 6 s, and waits for the other's 2 s once.
    machine = formula_machine(seconds=_one_second("attention"))
    prediction = _predict(tiny_work(), cut(pipeline=2), machine, layers=(3, 1))
    assert prediction.step_time_s == pytest.approx(4 * 6 + 2)
    assert prediction.breakdown_s == pytest.approx({"attention": 24.0, "bubble": 2.0})
    # Full recomputation runs each core once more forward, which is a cause of its own.
    recomputed = _predict(tiny_work(), cut(pipeline=2), machine, layers=(3, 1), option=FULL)
    assert recomputed.step_time_s == pytest.approx(4 * 9 + 3)
    assert recomputed.breakdown_s["recompute"] == pytest.approx(12.0)
    stage = recomputed.stages[0]
    assert (stage.forward_s, stage.backward_s) == (3.0, 6.0)


def test_interleaving_halves_the_bubble(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    machine = formula_machine(seconds=_one_second("attention"))
    plain = _predict(tiny_work(), cut(pipeline=2), machine, layers=(2, 2))
    folded = _predict(
        tiny_work(), cut(pipeline=2, virtual_pipeline=2), machine, layers=(1, 1, 1, 1)
    )
    assert plain.breakdown_s["bubble"] == pytest.approx(4.0)
    assert folded.breakdown_s["bubble"] == pytest.approx(2.0)


def test_throughput_counts_every_token_once(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    prediction = _predict(
        tiny_work(), cut(data=2, expert=2), formula_machine(band_ratio=0.25), layers=(4,)
    )
    assert prediction.tokens_per_s_per_device * prediction.step_time_s * 2 == pytest.approx(8 * 64)
    low, high = prediction.tokens_per_s_per_device_band
    assert low < prediction.tokens_per_s_per_device < high
    # The bands are of the same measurements: 512 tokens over the step's band.
    assert (512 / 2 / high, 512 / 2 / low) == pytest.approx(prediction.step_time_s_band)


def test_communication_is_what_the_collectives_take(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    machine = formula_machine(seconds=_one_second("collective", "all_to_all"))
    prediction = _predict(tiny_work(), cut(data=2, expert=2), machine, layers=(4,))
    # Two micro-batches of 4 layers: counts, dispatch, combine, and the two backwards.
    assert prediction.communication_s == prediction.step_time_s == pytest.approx(2 * 4 * 5)


def test_memory_of_a_stage_is_state_and_what_is_in_flight(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    work, degrees = tiny_work(), cut(pipeline=2)
    prediction = _predict(work, degrees, formula_machine(), layers=(2, 2))
    one = layer_activations(work, degrees, layer=0, recompute=Recompute.NONE, chunks=1).saved
    # Two micro-batches of two layers on the first rank, and the ids of all 8 sequences.
    assert prediction.activation_bytes[0] == 2 * 2 * one + 8 * 64 * 8
    for rank, stage in enumerate(prediction.stages):
        # State and what is saved, then temporaries (tests/tuner/search/reference/test_peak.py).
        state_bytes = stage.parameter_bytes + stage.gradient_bytes + stage.optimizer_bytes
        total_bytes = state_bytes + stage.activation_bytes + stage.other_bytes
        assert 1.0 < prediction.peak_memory_bytes[rank] / total_bytes < 1.15
        low, high = prediction.peak_memory_bytes_band[rank]
        assert low < prediction.peak_memory_bytes[rank] < high


def test_the_expert_rank_of_the_peak_is_one_rank_of_all_layers(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    # Layer 0 loads the first rank, layer 1 the second: no rank holds both peaks.
    first, second = (0.25, *(0.25 / 4,) * 4, 0.1, 0.2, 0.2), (*(0.05,) * 4, *(0.2,) * 4)
    skewed = tiny_work(layers="mm", batch={"load_ratio": (first, second)})
    degrees = cut(data=2, expert=2)
    prediction = _predict(skewed, degrees, formula_machine(), layers=(2,))
    by_rank = [
        sum(
            layer_activations(
                skewed,
                degrees,
                layer=layer,
                recompute=Recompute.NONE,
                chunks=1,
                expert_rank=rank,
            ).saved
            for layer in (0, 1)
        )
        for rank in (0, 1)
    ]
    ids = 2 * 4 * 64 * 8
    assert prediction.activation_bytes == (max(by_rank) + ids + (2 * 16384 + 512 + 4 * 128 * 256),)


@each_row("option", [SELECTIVE, FULL])
def test_layers_behind_the_recomputed_one_are_released(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine, option: RecomputeOption
) -> None:
    # A heavy last layer: while an earlier one is recomputed, its bytes are released.
    changes: dict[str, Any] = {"layers": "mm", "vocab_size": 16}
    work = tiny_work(**changes)
    prediction = _predict(work, cut(), formula_machine(), layers=(2,), option=option)
    one = layer_activations(work, cut(), layer=1, recompute=option.recompute, chunks=option.chunks)
    # Equal layers: the last one's recomputation is the peak, both layers' saved bytes still held.
    assert prediction.activation_bytes == (2 * one.saved + one.transient + 8 * 64 * 8,)


def test_a_later_layer_is_released_when_an_earlier_one_is_recomputed(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    # Dense layers recompute nothing under `selective`; the MoE layer before does, in their memory.
    work = tiny_work(layers="md", vocab_size=16)
    prediction = _predict(work, cut(), formula_machine(), layers=(2,), option=SELECTIVE)
    moe, dense = (
        layer_activations(work, cut(), layer=layer, recompute=Recompute.SELECTIVE, chunks=2)
        for layer in (0, 1)
    )
    head = 2 * 16384 + 512 + 4 * 128 * 16 + 8 * 64 * 8
    assert dense.transient == 0
    peak = max(head, moe.transient - dense.saved)
    assert prediction.activation_bytes == (moe.saved + dense.saved + peak + 8 * 64 * 8,)
    assert peak < moe.transient


def test_a_chunk_may_receive_what_is_left_once_all_else_is_held(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    work = tiny_work(vocab_size=16)
    peak = _predict(work, cut(), formula_machine(), layers=(4,), option=SELECTIVE)
    # 256 copies in two chunks of 128, of which each keeps 138 sent and 896 received bytes.
    for more, copies in ((0, 128), (1033, 128), (1034, 129), (50 * 1034, 178), (-1034, 127)):
        machine = formula_machine(memory_limit_bytes=peak.peak_memory_bytes[0] + more)
        prediction = _predict(work, cut(), machine, layers=(4,), option=SELECTIVE)
        assert prediction.stages[0].max_chunk_tokens == copies
    machine = formula_machine(memory_limit_bytes=1)
    prediction = _predict(work, cut(), machine, layers=(4,), option=SELECTIVE)
    assert prediction.stages[0].max_chunk_tokens == 0


def test_only_stages_that_recompute_experts_have_a_largest_chunk(
    tiny_work: Make, cut: Cut, formula_machine: MakeMachine
) -> None:
    work, degrees = tiny_work(layers="dmmm"), cut(pipeline=2)
    for option in (NONE, SELECTIVE, FULL):
        prediction = _predict(work, degrees, formula_machine(), layers=(1, 3), option=option)
        dense, experts = (stage.max_chunk_tokens for stage in prediction.stages)
        assert dense is None
        assert (experts is None) == (option is NONE)
