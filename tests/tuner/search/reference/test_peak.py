"""The peak of a rank by hand where it can be, and its moments against one another."""

from collections.abc import Callable
from typing import Any

import pytest

from profilers.steps.config import Recompute
from tests.rows import each_row
from tuner.costs.reference.temporaries import UNCOUNTED_RATIO, head_workspace, reduction_workspace
from tuner.costs.reference.update import Unit
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.search.reference.decisions import RecomputeOption, decision
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine
from tuner.search.reference.peak import peak_bytes

Make = Callable[..., Workload]
Cut = Callable[..., StepDegrees]
MakeMachine = Callable[..., PricedMachine]


@pytest.fixture
def peak(tiny_work: Make, cut: Cut, formula_machine: MakeMachine) -> Callable[..., int]:
    """The peak of the first rank: peak(option, work={...}, **degrees)."""

    def bytes_of(option: RecomputeOption, *, work: dict[str, Any], **degrees: int) -> int:
        cut_up = cut(**degrees)
        costs = CandidateCosts(work=tiny_work(**work), degrees=cut_up, machine=formula_machine())
        layers = (len(work.get("layers", "mmmm")) // cut_up.num_stages,) * cut_up.num_stages
        requested = decision(cut_up, layers=layers, options=(option,) * cut_up.num_stages)
        return peak_bytes(costs, requested, rank=0)

    return bytes_of


NONE = RecomputeOption(recompute=Recompute.NONE, chunks=1)


def test_the_loss_holds_two_fp32_gradients_beside_its_log_probabilities(
    tiny_work: Make, cut: Cut
) -> None:
    # 128 tokens of a micro-batch, 256 words: 8 bytes each.
    assert head_workspace(tiny_work(), cut()) >= 8 * 128 * 256


@each_row(
    ("zero_stage", "ranks", "has_gradients", "copies"),
    [
        # In fp32: what goes in, the same scaled, what comes out, less the gathered weights.
        (0, 1, False, 3 - 1),
        (0, 1, True, 2 - 1),
        # A scatter over two: out is half, and another half is exchanged.
        (1, 2, False, 3 - 1),
        (1, 2, True, 2 - 1),
        (3, 2, True, 3 - 1),
    ],
)
def test_a_sum_of_gradients_by_hand(
    tiny_work: Make, cut: Cut, zero_stage: int, ranks: int, has_gradients: bool, copies: int
) -> None:
    work = tiny_work(batch={"precision": "fp32"})
    unit = Unit(parameters=1000, ranks=ranks, stride=1)
    degrees = cut(data=ranks, zero_stage=zero_stage)
    assert reduction_workspace(unit, work, degrees, has_gradients=has_gradients) == copies * 4000


def test_more_tokens_need_more_and_recomputation_needs_less(peak: Callable[..., int]) -> None:
    full = RecomputeOption(recompute=Recompute.FULL, chunks=4)
    long = {"batch": {"sequence_length": 256}}
    assert peak(NONE, work=long) > peak(NONE, work={})
    assert peak(full, work=long) < peak(NONE, work=long)


def test_no_rank_holds_less_than_its_optimizer_needs(peak: Callable[..., int]) -> None:
    one = peak(NONE, work={"layers": "m", "batch": {"sequence_length": 8}})
    # Embedding, head and norm; qkv, output, two norms, router, experts, at 20 bytes each.
    parameters = 2 * 256 * 64 + 64 + (128 + 64) * 64 + 2 * 64 + 8 * 64 + 8 * 3 * 64 * 128
    assert one >= 20 * parameters * (1.0 + UNCOUNTED_RATIO)


@each_row("zero_stage", [1, 3])
def test_sharding_lowers_the_peak(peak: Callable[..., int], zero_stage: int) -> None:
    assert peak(NONE, work={}, data=2, zero_stage=zero_stage) < peak(NONE, work={}, data=2)
