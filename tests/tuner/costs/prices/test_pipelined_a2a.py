"""FSMoE's cases (arXiv 2501.10714): by hand, against a replay of the three streams, best r."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tuner.costs.prices.pipelined_a2a import (
    MOST_PIECES,
    PipelinedLayer,
    PipelinedPart,
    best_degree,
    case_times_s,
    overlapped_moe_s,
)


def _layer(
    *, all_to_all: float, inside: float, experts: float, start: float = 0.0
) -> PipelinedLayer:
    return PipelinedLayer(
        all_to_all=PipelinedPart(start_s=start, work_s=all_to_all),
        gather=PipelinedPart(start_s=start, work_s=inside),
        scatter=PipelinedPart(start_s=start, work_s=inside),
        experts=PipelinedPart(start_s=start, work_s=experts),
    )


# Worked by hand with two pieces and no start-up, each part halved, so that A, G = S, X are:
BY_HAND = {
    # A 1, G 2, X 10: 2*1 + 4 + 2*10 = 26 against 4+4 = 8, 2+2*4 = 10.
    2: (_layer(all_to_all=2.0, inside=4.0, experts=20.0), 26.0),
    # A 8, G 2, X 3: 2*2*8 + 4 = 36 against 16+4+6 = 26, 16+2*4 = 24.
    3: (_layer(all_to_all=16.0, inside=4.0, experts=6.0), 36.0),
    # A 1, G 8, X 2: 2*1 + 2*16 = 34 against 2+16+4 = 22, 4+16 = 20.
    4: (_layer(all_to_all=2.0, inside=16.0, experts=4.0), 34.0),
}


@each_row("case", BY_HAND)
def test_each_case_by_hand(case: int) -> None:
    layer, expected = BY_HAND[case]
    times = case_times_s(layer, pieces=2.0)[:, 0]
    assert int(times.argmax()) + 2 == case
    assert float(overlapped_moe_s(layer, pieces=2.0)[0]) == pytest.approx(expected)


@each_row("case", BY_HAND)
def test_the_hand_worked_layers_replay_to_the_same_time(case: int) -> None:
    layer, expected = BY_HAND[case]
    replayed = _replayed_s(layer, pieces=2)
    if case == 3:
        # The gap that the formula leaves, G + S = 4, is half filled by the second dispatch.
        assert expected - 4.0 <= replayed <= expected
    else:
        assert replayed == pytest.approx(expected)


@each_row(
    ("layer", "pieces"),
    [
        # Experts: 2 A + G + S + r X = ... + r start + (2*8 + 2*4)/r: sqrt(24 / 0.5) = 6.9.
        (
            PipelinedLayer(
                all_to_all=PipelinedPart(start_s=0.0, work_s=8.0),
                gather=PipelinedPart(start_s=0.0, work_s=4.0),
                scatter=PipelinedPart(start_s=0.0, work_s=4.0),
                experts=PipelinedPart(start_s=0.5, work_s=100.0),
            ),
            7,
        ),
        # Node links: 2 A + r (G + S): sqrt(2*9 / (0.25 + 0.25)) = 6.
        (
            PipelinedLayer(
                all_to_all=PipelinedPart(start_s=0.0, work_s=9.0),
                gather=PipelinedPart(start_s=0.25, work_s=50.0),
                scatter=PipelinedPart(start_s=0.25, work_s=50.0),
                experts=PipelinedPart(start_s=0.0, work_s=1.0),
            ),
            6,
        ),
        # Network: 2 r A + G + S: sqrt((16 + 16) / (2 * 1)) = 4.
        (
            PipelinedLayer(
                all_to_all=PipelinedPart(start_s=1.0, work_s=90.0),
                gather=PipelinedPart(start_s=0.0, work_s=16.0),
                scatter=PipelinedPart(start_s=0.0, work_s=16.0),
                experts=PipelinedPart(start_s=0.0, work_s=1.0),
            ),
            4,
        ),
    ],
)
def test_the_best_degree_is_where_the_case_says(layer: PipelinedLayer, pieces: int) -> None:
    actual, time_s = best_degree(layer)
    assert actual.tolist() == [pieces]
    assert time_s == overlapped_moe_s(layer, pieces=float(pieces))


nothing_or = st.just(0.0) | st.floats(1e-3, 10.0)
parts = st.builds(PipelinedPart, start_s=nothing_or.map(lambda s: s / 20), work_s=nothing_or)
layers = st.builds(
    PipelinedLayer,
    all_to_all=parts,
    gather=parts,
    scatter=parts,
    experts=parts,
)


@given(layer=layers, most=st.integers(1, MOST_PIECES))
@settings(deadline=None, max_examples=300)
def test_no_degree_beats_the_best(layer: PipelinedLayer, most: int) -> None:
    pieces, time_s = best_degree(layer, most=most)
    every = [float(overlapped_moe_s(layer, pieces=float(r))[0]) for r in range(1, most + 1)]
    assert 1 <= pieces[0] <= most
    assert time_s[0] == pytest.approx(min(every), rel=1e-12, abs=1e-15)


def test_columns_choose_their_own_degrees() -> None:
    rng = np.random.default_rng(5)

    def part() -> PipelinedPart:
        return PipelinedPart(
            start_s=rng.lognormal(-3.0, 1.0, 50), work_s=rng.lognormal(0.0, 1.0, 50)
        )

    layer = PipelinedLayer(all_to_all=part(), gather=part(), scatter=part(), experts=part())
    pieces, time_s = best_degree(layer)
    every = np.stack([overlapped_moe_s(layer, pieces=float(r)) for r in range(1, 65)])
    assert pieces.tolist() == (every.argmin(axis=0) + 1).tolist()
    assert time_s.tolist() == every.min(axis=0).tolist()
    assert len(set(pieces.tolist())) > 3


@given(layer=layers)
@settings(deadline=None, max_examples=100)
def test_one_piece_is_the_plain_sequence(layer: PipelinedLayer) -> None:
    parts_s = [
        float(part.piece_s(1.0))
        for part in (layer.all_to_all, layer.gather, layer.scatter, layer.experts, layer.all_to_all)
    ]
    assert float(overlapped_moe_s(layer, pieces=1.0)[0]) == pytest.approx(sum(parts_s))


@given(layer=layers, pieces=st.integers(1, 16), faster=st.floats(1.0, 10.0))
@settings(deadline=None, max_examples=100)
def test_a_faster_network_never_makes_the_layer_slower(
    layer: PipelinedLayer, pieces: int, faster: float
) -> None:
    quick = PipelinedPart(start_s=layer.all_to_all.start_s, work_s=layer.all_to_all.work_s / faster)
    at = float(pieces)
    before = overlapped_moe_s(layer, pieces=at)
    assert np.all(overlapped_moe_s(replace(layer, all_to_all=quick), pieces=at) <= before)
    best_before, best_after = (
        best_degree(layer)[1],
        best_degree(replace(layer, all_to_all=quick))[1],
    )
    assert np.all(best_after <= best_before * (1 + 1e-12))


@given(
    all_to_all=st.floats(0.01, 10.0),
    inside=st.floats(0.01, 10.0),
    experts=st.floats(0.01, 10.0),
    pieces=st.integers(1, 12),
)
@settings(deadline=None, max_examples=300)
def test_the_streams_take_what_the_largest_case_says(
    all_to_all: float, inside: float, experts: float, pieces: int
) -> None:
    layer = _layer(all_to_all=all_to_all, inside=inside, experts=experts, start=0.01)
    times = case_times_s(layer, pieces=float(pieces))[:, 0]
    replayed = _replayed_s(layer, pieces=pieces)
    gap = 0.0
    if int(times.argmax()) + 2 == 3:
        gap = float(layer.gather.piece_s(pieces) + layer.scatter.piece_s(pieces))
    assert times.max() - gap - 1e-9 <= replayed <= times.max() + 1e-9


def _replayed_s(layer: PipelinedLayer, *, pieces: int) -> float:
    """Simulate three streams event by event: network, node links, GEMMs.

    The network sends every dispatch, then combines as pieces are ready; the node links prefer the
    next gather to a scatter, which keeps the GEMMs busy.
    """
    all_to_all_s, gather_s, scatter_s, experts_s = (
        float(part.piece_s(float(pieces)))
        for part in (layer.all_to_all, layer.gather, layer.scatter, layer.experts)
    )
    arrived = [(piece + 1) * all_to_all_s for piece in range(pieces)]
    computed: list[float] = []
    links_s = grouped_gemms_s = 0.0
    scattered: list[float] = []
    while len(scattered) < pieces:
        gathers, waiting = len(computed), len(scattered)
        next_gather = arrived[gathers] if gathers < pieces else np.inf
        next_scatter = computed[waiting] if waiting < gathers else np.inf
        if max(links_s, next_gather) <= max(links_s, next_scatter):
            links_s = max(links_s, next_gather) + gather_s
            grouped_gemms_s = max(grouped_gemms_s, links_s) + experts_s
            computed.append(grouped_gemms_s)
        else:
            links_s = max(links_s, next_scatter) + scatter_s
            scattered.append(links_s)
    network_s = arrived[-1]
    for ready_s in scattered:
        network_s = max(network_s, ready_s) + all_to_all_s
    return network_s
