"""Micro-batches in flight on a pipeline rank under 1F1B, interleaved 1F1B and GPipe.

The order of operations is that of PyTorch's Schedule1F1B and ScheduleInterleaved1F1B (Narayanan et
al., SC 2021, section 2.2), which profilers/steps runs. Of P ranks with v model chunks each, rank r
runs ahead by

    v = 1     min(m, P - r) forwards, all m where there are fewer micro-batches than ranks (GPipe)
    v > 1     (v - 1) P + 2 (P - 1 - r) forwards, and one more with every backward

and then backward and forward in turn. The i-th forward is of chunk (i // P) % v, backwards take the
chunks in reverse.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tuner.costs.reference.workload import StepDegrees


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The moment before a backward, when a rank has the most in flight."""

    resident: tuple[int, ...]
    """Micro-batches in flight of each of the rank's chunks."""
    chunk: int
    """The chunk whose backward comes."""


def moments(degrees: StepDegrees, *, num_microbatches: int, rank: int) -> Iterator[Moment]:
    """Yield the micro-batches in flight on a pipeline rank before each of its backwards."""
    ranks, chunks = degrees.pipeline, degrees.virtual_pipeline
    total = num_microbatches * chunks
    ahead = _ahead(degrees, num_microbatches=num_microbatches, rank=rank)
    resident = [0] * chunks
    forwards = 0
    for backwards in range(total):
        while forwards < min(total, ahead + backwards):
            resident[forwards // ranks % chunks] += 1
            forwards += 1
        chunk = chunks - 1 - backwards // ranks % chunks
        yield Moment(resident=tuple(resident), chunk=chunk)
        resident[chunk] -= 1


def in_flight(degrees: StepDegrees, *, num_microbatches: int) -> tuple[int, ...]:
    """Count the micro-batches in flight of each stage at the rank's peak, chunks weighted equally.

    Where the chunks of a rank save different bytes the peak can be at another moment;
    `most_in_flight` bounds every moment.
    """
    resident = [0] * degrees.num_stages
    for rank in range(degrees.pipeline):
        seen = moments(degrees, num_microbatches=num_microbatches, rank=rank)
        resident[rank :: degrees.pipeline] = max((moment.resident for moment in seen), key=sum)
    return tuple(resident)


def most_in_flight(degrees: StepDegrees, *, num_microbatches: int) -> tuple[int, ...]:
    """Count the most micro-batches of each stage; the stages of a rank need not peak together."""
    resident = [0] * degrees.num_stages
    for rank in range(degrees.pipeline):
        seen = [
            moment.resident
            for moment in moments(degrees, num_microbatches=num_microbatches, rank=rank)
        ]
        resident[rank :: degrees.pipeline] = [max(counts) for counts in zip(*seen, strict=True)]
    return tuple(resident)


def _ahead(degrees: StepDegrees, *, num_microbatches: int, rank: int) -> int:
    """Forwards before the first backward."""
    ranks, chunks = degrees.pipeline, degrees.virtual_pipeline
    if chunks > 1:
        return min(num_microbatches * chunks, (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1)
    if num_microbatches < ranks:
        return num_microbatches
    return ranks - rank
