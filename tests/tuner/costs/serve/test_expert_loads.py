"""Recorded loads: by hand, against draws, and against the balanced kernel."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tests.tuner.kernel_tables import arrays_of, kernel_tables
from tuner.costs.serve.expert_loads import ExpertLoads, loaded_experts_s
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.ops import Op
from tuner.prices.serve.machine import BALANCED, LOAD, ServingMachine

SHEET = find_device("h200-sxm")
TOKENS = np.array([1.0, 8.0, 64.0, 512.0, 8192.0, 65536.0])
AXES = {"hidden": 4096, "ffn": 1536, "top_k": 8, "experts": 128, "tensor": 1, "expert": 8}
ROUTED = Op(
    operation="moe",
    kind=LOAD,
    dtype="fp8_block",
    software="sglang",
    axes={"tokens": TOKENS, **AXES},
)
EVEN = ExpertLoads(share_LE=np.full((2, 128), 1.0 / 128), top_k=8)


def skewed(seed: int = 0, *, layers: int = 3, experts: int = 128) -> ExpertLoads:
    share_LE = np.random.default_rng(seed).dirichlet(np.full(experts, 0.5), size=layers)
    return ExpertLoads(share_LE=share_LE, top_k=8)


def balanced(loads: ExpertLoads, *, ranks: int) -> ExpertLoads:
    """The most-loaded expert first, always to the emptiest rank with a free slot."""
    rows = []
    for share_E in loads.share_LE:
        held: list[list[int]] = [[] for _ in range(ranks)]
        for expert in np.argsort(-share_E):
            free = [rank for rank in held if len(rank) < len(share_E) // ranks]
            min(free, key=lambda rank: sum(share_E[rank])).append(int(expert))
        rows.append([expert for rank in held for expert in rank])
    return loads.placed(np.array(rows))


def seconds(loads: ExpertLoads, machine: ServingMachine) -> np.ndarray:
    return loaded_experts_s(machine, ROUTED, loads=loads)


def test_even_loads_give_the_balanced_kernel_back() -> None:
    times = {1: 20e-6, 100: 60e-6, 10_000: 900e-6}
    tables = [
        arrays_of(
            "moe",
            [({**AXES, "tokens": tokens}, factor * time_s) for tokens, time_s in times.items()],
            software="sglang",
            kind=kind,
            dtype="fp8_block",
        )
        for kind, factor in ((BALANCED, 1.0), (LOAD, 1.4))
    ]
    machine = ServingMachine(
        engines=ENGINE_TRAITS, sheet=SHEET, tables=kernel_tables("h200_sxm", tables)
    )
    kernel = machine.seconds(replace(ROUTED, kind=BALANCED))
    assert seconds(EVEN, machine) == pytest.approx(kernel, rel=2e-3)


def test_one_rank_with_all_the_load_is_as_many_times_the_mean() -> None:
    share_LE = np.zeros((1, 8))
    share_LE[0, :2] = 0.5
    loads = ExpertLoads(share_LE=share_LE, top_k=2)
    assert loads.expert_imbalance(4) == pytest.approx(4.0)
    # Both experts are read whatever the tokens, and no other.
    assert loads.activated(np.array([1.0, 100.0]), 4) == pytest.approx([2.0, 2.0])


def test_replicas_share_the_tokens_of_their_expert() -> None:
    loads = ExpertLoads(
        share_LE=np.array([[0.6, 0.2, 0.2]]), top_k=1, expert_LS=np.array([[0, 1, 0, 2]])
    )
    # Ranks (0, 1) and (0, 2): 0.3 + 0.2 each.
    assert loads.expert_imbalance(2) == pytest.approx(1.0)
    assert loads.num_slots == 4


def test_ranks_may_hold_unlike_numbers_of_slots() -> None:
    loads = ExpertLoads(
        share_LE=np.array([[0.5, 0.25, 0.25]]),
        top_k=1,
        expert_LS=np.array([[0, 1, 2]]),
        slots_R=(1, 2),
    )
    assert loads.expert_imbalance(2) == pytest.approx(1.0)
    assert loads.fits(2)
    assert not loads.fits(3)
    with pytest.raises(ValueError, match="3 slots cannot be dealt out to 3 ranks"):
        loads.expert_imbalance(3)


def test_activated_experts_are_those_of_drawn_tokens() -> None:
    # Choices of k without repetition tie experts slightly to each other; one choice each does not.
    share_E = np.random.default_rng(3).dirichlet(np.full(16, 0.6))
    loads = ExpertLoads(share_LE=share_E[None], top_k=1)
    drawn = np.random.default_rng(4).choice(16, size=(20_000, 12), p=share_E)
    read = np.stack([(drawn == expert).any(axis=1) for expert in range(16)], axis=1)
    by_rank = read.reshape(-1, 4, 4).sum(axis=2).mean(axis=0)
    assert float(loads.activated(np.array([12.0]), 4)[0]) == pytest.approx(by_rank.max(), rel=0.01)


def test_a_placement_that_balances_beats_the_linear_one() -> None:
    machine = ServingMachine(engines=ENGINE_TRAITS, sheet=SHEET, tables=None)
    loads = skewed()
    placed = balanced(loads, ranks=8)
    assert placed.expert_imbalance(8) < loads.expert_imbalance(8)
    linear_s, placed_s, even_s = (seconds(one, machine) for one in (loads, placed, EVEN))
    assert (placed_s <= linear_s * (1.0 + 1e-9)).all()
    assert (placed_s[-2:] < 0.9 * linear_s[-2:]).all()
    # With many tokens nothing is faster than even shares.
    assert (even_s[-2:] <= placed_s[-2:] * (1.0 + 1e-9)).all()


def test_skew_spares_weights_where_few_tokens_come_and_costs_time_where_many_do() -> None:
    machine = ServingMachine(engines=ENGINE_TRAITS, sheet=SHEET, tables=None)
    placed_s, even_s = (seconds(one, machine) for one in (balanced(skewed(), ranks=8), EVEN))
    assert placed_s[2] < even_s[2]
    assert placed_s[-1] > even_s[-1]


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), ranks=st.sampled_from([1, 2, 8, 32]))
def test_more_tokens_never_reach_fewer_experts_nor_more_than_there_are(
    seed: int, ranks: int
) -> None:
    read = skewed(seed).activated(TOKENS, ranks)
    assert (np.diff(read) >= -1e-9).all()
    assert (read <= 128 / ranks + 1e-9).all()


@each_row(
    ("named", "message"),
    [
        ({"share_LE": np.array([[0.5, 0.6]])}, "sum to 1"),
        ({"share_LE": np.array([[1.5, -0.5]])}, "negative"),
        ({"top_k": 3}, "top_k 3"),
        ({"expert_LS": np.array([[0, 0]])}, "each of 2 experts"),
        ({"expert_LS": np.array([[0, 1], [0, 1]])}, "slots of 2 layers"),
        ({"expert_LS": np.array([[0, 1]]), "slots_R": (3,)}, "3 slots of ranks"),
    ],
)
def test_impossible_loads_are_refused(named: dict[str, object], message: str) -> None:
    given_: dict[str, object] = {"share_LE": np.array([[0.5, 0.5]]), "top_k": 1, **named}
    with pytest.raises(ValueError, match=message):
        ExpertLoads(**given_)  # type: ignore[arg-type]  # values of every kind are tried
