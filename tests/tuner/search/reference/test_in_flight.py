"""Micro-batches in flight against the order of operations that PyTorch's schedules run.

Schedule1F1B: stage s of P runs min(m, P - s) forwards, then backward and forward in turn.
ScheduleInterleaved1F1B, v chunks on each rank: rank r runs (v - 1) P + 2 (P - 1 - r) forwards, then
forward and backward in turn. The i-th forward of a rank is of chunk (i // P) % v, backwards take
the chunks in reverse.
"""

import itertools
from collections.abc import Callable, Iterator

from tuner.costs.reference.workload import StepDegrees
from tuner.search.reference.schedule import in_flight

Cut = Callable[..., StepDegrees]


def _plain(ranks: int, rank: int, batches: int) -> Iterator[tuple[int, ...]]:
    """What the stage holds after each operation."""
    warm_up = batches if batches < ranks else min(batches, ranks - rank)
    forwards = backwards = 0
    while backwards < batches:
        if forwards < batches and forwards - backwards < warm_up:
            forwards += 1
        else:
            backwards += 1
        yield (forwards - backwards,)


def _interleaved(ranks: int, chunks: int, rank: int, batches: int) -> Iterator[tuple[int, ...]]:
    """What each chunk of the rank holds after each operation."""
    total = batches * chunks
    warm_up = min((chunks - 1) * ranks + 2 * (ranks - 1 - rank), total)
    resident = [0] * chunks
    forwards = backwards = 0
    while backwards < total:
        if forwards < total and forwards <= warm_up + backwards:
            resident[forwards // ranks % chunks] += 1
            forwards += 1
        else:
            resident[chunks - 1 - backwards // ranks % chunks] -= 1
            backwards += 1
        yield tuple(resident)


def test_plain_stages_hold_what_the_schedule_runs_ahead(cut: Cut) -> None:
    for ranks, batches in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 32)):
        resident = in_flight(cut(pipeline=ranks), num_microbatches=batches)
        assert resident == tuple(max(_plain(ranks, rank, batches))[0] for rank in range(ranks)), (
            ranks,
            batches,
            resident,
        )


def test_interleaved_ranks_hold_what_the_schedule_runs_ahead(cut: Cut) -> None:
    for ranks, chunks, rounds in itertools.product((2, 3, 4), (2, 3, 4), (1, 2, 3, 5)):
        batches = rounds * ranks
        resident = in_flight(cut(pipeline=ranks, virtual_pipeline=chunks), num_microbatches=batches)
        for rank in range(ranks):
            states = list(_interleaved(ranks, chunks, rank, batches))
            assert not any(states[-1])
            # A state that really occurs, and none holds more in all. Where the chunks of a rank
            # keep different bytes, another state can weigh more.
            mine = resident[rank::ranks]
            assert mine in states, (
                ranks,
                chunks,
                rounds,
                rank,
                mine,
            )
            assert sum(mine) == max(map(sum, states)), (
                ranks,
                chunks,
                rounds,
                rank,
                mine,
            )
