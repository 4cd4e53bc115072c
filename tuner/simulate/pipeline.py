"""Simulates one step of a pipeline: the forward and backward passes of its micro-batches.

Each device works off a fixed list of passes; a pass starts when the device is free and what it
needs has arrived from the neighbouring stage. Sending takes `send_s` and occupies no device.
Stage s runs on device s mod p.

    1F1B         device d runs p - 1 - d forward passes, then one forward and one backward pass in
                 turn, then the remaining backward passes (Narayanan et al., arXiv:2104.04473)
    interleaved  the same over model chunks: micro-batches in groups of p, each group through every
                 chunk of a device before the next; 2 (p - 1 - d) + (v - 1) p passes of warm-up
                 (Megatron-Core, `get_schedule_table` in pipeline_parallel/schedules.py)
    zero bubble  1F1B whose backward passes leave weight gradients for later: that of micro-batch j
                 runs after the backward pass of micro-batch j + d, and one behind every backward
                 pass of the end (ZB-H1 of Qi et al., arXiv:2401.10241)

`bound_s` is what no such schedule beats: device d starts when the first micro-batch has passed the
stages before it, works m D_d seconds, and what it did last still travels back through those stages.
It equals the simulated time where all stages are equal.

The closed form of tuner/costs/train/step.py, sum D + (m - 1) max D, lies between: it is never
below a simulated 1F1B where backward passes are in proportion to forward passes, and always within
sum D + (m - 1) (max F + max B), which no 1F1B exceeds. Both are found by trial over random stages
(the tests repeat it), not proven.

A step of up to `FEW_PASSES` passes is simulated whole. Of a longer one as many micro-batches are
simulated as it takes to reach a cycle, and the middle is extrapolated, which is
exact up to rounding. One that reaches none is simulated whole up to `MOST_PASSES`; beyond it is
extrapolated all the same, and `max_error_s` says by how much at most that is off. A turn of the
cycle is one forward and one backward pass on every device, interleaved those of p micro-batches on
all its stages; the passes of weight gradients follow backward passes and wait for nothing else.

A schedule whose passes wait for one another and for their devices is linear over (max, +): each
pass ends at the largest of some earlier ends plus constants. Let row k hold the ends of one turn of
it, and let no pass wait for what is further back than the turn before its own. Then all later turns
follow from row k alone, by a function that is monotone and moves with time
(Baccelli et al., Synchronization and Linearity, 1992, chapter 3), and so with

    least = min (row k - row (k - c)),  most = max (row k - row (k - c))

every later end lies within n least and n most of the end n c turns before it. Where least = most,
the schedule has reached its cycle of c turns, which then lasts for good: nothing is assumed. Else
the width is the most that an extrapolation is off.

Letters: C columns, S stages in execution order, P devices, K turns, E ends of one turn; p devices,
v stages on each, m micro-batches. Not covered: sends that block the sender, devices that differ in
speed over time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import Grid
from tuner.costs.train.fold import per_device

FEW_PASSES: Final = 30_000
"""Forward and backward passes that are simulated whole, in some 40 ms."""
MOST_PASSES: Final = 300_000
"""Passes that are simulated whole, in some 0.4 s, where the schedule reaches no cycle."""
MOST_SHORTENED: Final = 1_000_000
"""Passes after which a pipeline of hundreds of devices may reach a cycle; more is not simulated."""
SETTLED_RATIO: Final = 1e-10
"""Share of a cycle's seconds: ends whose differences agree to this differ by rounding alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """A number of turns, and how far they move every end."""

    turns: int
    least_s: float
    most_s: float

    @property
    def mean_s(self) -> float:
        """Seconds from a cycle to the next."""
        return 0.5 * (self.least_s + self.most_s)

    @property
    def is_settled(self) -> bool:
        """Return whether every end moves by the same time, up to rounding."""
        return self.most_s - self.least_s <= SETTLED_RATIO * self.most_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One step of one candidate."""

    forward_s_S: tuple[float, ...]
    """Seconds of one micro-batch's forward pass on each stage."""
    backward_s_S: tuple[float, ...]
    """Seconds of one micro-batch's backward pass on each stage, weight gradients included."""
    weight_s_S: tuple[float, ...] = ()
    """Seconds of each stage's backward pass that may be put off; empty: none are, the schedule is
    1F1B."""
    num_devices: int
    num_microbatches: int
    send_s: float = 0.0
    sends_s: tuple[float, ...] = ()
    """Seconds of a send from every stage to the next, where they differ; empty: `send_s` each."""

    def __post_init__(self) -> None:
        stages, devices = len(self.forward_s_S), self.num_devices
        if len(self.backward_s_S) != stages or len(self.weight_s_S) not in (0, stages):
            raise ValueError(f"{stages} stages need as many backward passes and weight gradients")
        if len(self.sends_s) not in (0, stages - 1):
            raise ValueError(f"{stages} stages need {stages - 1} sends, not {len(self.sends_s)}")
        if devices < 1 or not stages or stages % devices:
            raise ValueError(f"{stages} stages do not spread evenly over {devices} devices")
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches {self.num_microbatches} must be at least 1")
        if self.weight_s_S and stages != devices:
            raise ValueError("a zero-bubble schedule has one stage per device")

    @property
    def stages_per_device(self) -> int:
        """The v of the schedule."""
        return len(self.forward_s_S) // self.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """Outcome of a simulated step."""

    step_s: float
    """Seconds until the last device is done."""
    max_error_s: float = 0.0
    """Largest error of `step_s` in seconds, rounding aside; 0 where all was simulated or
    repeats."""


class _Pass(NamedTuple):
    kind: int
    stage: int
    microbatch: int


FORWARD, BACKWARD, WEIGHT = 0, 1, 2


class TimedPass(NamedTuple):
    """One pass of one micro-batch, and when it ran."""

    device: int
    kind: int
    """FORWARD, BACKWARD or WEIGHT."""
    stage: int
    microbatch: int
    start_s: float
    end_s: float


def can_simulate(pipeline: Pipeline) -> bool:
    """Return whether simulation takes seconds and some 300 MB at most.

    It takes more with hundreds of devices.
    """
    stages, m = len(pipeline.forward_s_S), pipeline.num_microbatches
    turn, turns = _first_turns(pipeline)
    return 2 * stages * min(m, 2 * turns * turn) <= max(MOST_SHORTENED, MOST_PASSES)


def simulate_step(pipeline: Pipeline) -> SimulatedStep:
    """Run the schedule that fits: zero bubble with `weight_s_S`, else 1F1B or interleaved."""
    short, cycles, cycle = _shortened(pipeline)
    finish_s, _ = _simulate_orders(short, _orders(short))
    return SimulatedStep(
        step_s=max(finish_s) + cycles * cycle.mean_s,
        max_error_s=0.0 if cycle.is_settled else 0.5 * cycles * (cycle.most_s - cycle.least_s),
    )


def passes(pipeline: Pipeline) -> tuple[TimedPass, ...]:
    """Return every pass of the schedule, however long, device by device in order of time."""
    orders = _orders(pipeline)
    _, done_s = _simulate_orders(pipeline, orders)
    seconds = _seconds(pipeline)
    return tuple(
        TimedPass(device, kind, stage, j, done_s[kind][stage][j] - seconds[kind][stage], end_s)
        for device, order in enumerate(orders)
        for kind, stage, j in order
        for end_s in (done_s[kind][stage][j],)
    )


def _shortened(pipeline: Pipeline) -> tuple[Pipeline, int, Cycle]:
    """Return what is to be simulated, and how many cycles of what length it leaves out."""
    passes_each = 2 * len(pipeline.forward_s_S)
    m = pipeline.num_microbatches
    turn, turns = _first_turns(pipeline)
    while passes_each * m > FEW_PASSES and turns * turn < m // 2:
        short = replace(pipeline, num_microbatches=turns * turn + m % turn)
        cycle = find_cycle(_turns(short, turn=turn))
        is_last = 2 * passes_each * turns * turn > MOST_PASSES and passes_each * m > MOST_PASSES
        if cycle.is_settled or is_last:
            cycles, rest = divmod(m // turn - turns, cycle.turns)
            num_simulated = short.num_microbatches + rest * turn
            return replace(pipeline, num_microbatches=num_simulated), cycles, cycle
        turns *= 2
    return pipeline, 0, Cycle(turns=1, least_s=0.0, most_s=0.0)


def _first_turns(pipeline: Pipeline) -> tuple[int, int]:
    """Return the micro-batches of a turn, and the turns among which a cycle is looked for first."""
    p = pipeline.num_devices
    turn = p if pipeline.stages_per_device > 1 else 1
    # Devices warm up for up to p micro-batches and leave as many to the end.
    return turn, 4 * (p // turn + 3)


def _turns(pipeline: Pipeline, *, turn: int) -> npt.NDArray[np.float64]:
    """Return when the passes of every turn ended, without the first half and those of the end."""
    pairs = turn * pipeline.stages_per_device
    turns = (pipeline.num_microbatches // turn * pairs - _warmup(pipeline, 0)) // pairs - 1
    orders = _orders(pipeline)
    _, done_s = _simulate_orders(pipeline, orders)
    finish_s = []
    for device, order in enumerate(orders):
        for kind, first in ((FORWARD, _warmup(pipeline, device)), (BACKWARD, 0)):
            every = [done_s[kind][stage][j] for pass_kind, stage, j in order if pass_kind == kind]
            finish_s.append(np.reshape(every[first : first + turns * pairs], (turns, pairs)))
    return np.hstack(finish_s)[turns // 2 :]


def _orders(pipeline: Pipeline) -> list[list[_Pass]]:
    return [_order(pipeline, device) for device in range(pipeline.num_devices)]


def _warmup(pipeline: Pipeline, device: int) -> int:
    """Forward passes of a device before its passes come in pairs."""
    p, v, m = pipeline.num_devices, pipeline.stages_per_device, pipeline.num_microbatches
    after = p - 1 - device
    return min(m * v, after if v == 1 else 2 * after + (v - 1) * p)


def _order(pipeline: Pipeline, device: int) -> list[_Pass]:
    if pipeline.stages_per_device > 1:
        return _interleaved(pipeline, device)
    if pipeline.weight_s_S:
        return _zero_bubble(pipeline, device)
    return _one_forward_one_backward(pipeline, device)


def _one_forward_one_backward(pipeline: Pipeline, device: int) -> list[_Pass]:
    m = pipeline.num_microbatches
    warm = _warmup(pipeline, device)
    order = [_Pass(FORWARD, device, j) for j in range(warm)]
    for j in range(m - warm):
        order += [_Pass(FORWARD, device, warm + j), _Pass(BACKWARD, device, j)]
    return order + [_Pass(BACKWARD, device, j) for j in range(m - warm, m)]


def _zero_bubble(pipeline: Pipeline, device: int) -> list[_Pass]:
    m = pipeline.num_microbatches
    last_forward = m - 1
    order: list[_Pass] = []
    weights, forwards = 0, 0
    for done in _one_forward_one_backward(pipeline, device):
        order.append(done)
        forwards += done.kind == FORWARD
        if done.kind == BACKWARD:
            is_end = forwards > last_forward
            if weights <= done.microbatch - (0 if is_end else device):
                order.append(_Pass(WEIGHT, device, weights))
                weights += 1
    return order + [_Pass(WEIGHT, device, j) for j in range(weights, m)]


def _interleaved(pipeline: Pipeline, device: int) -> list[_Pass]:
    p, v, m = pipeline.num_devices, pipeline.stages_per_device, pipeline.num_microbatches
    table = [
        (chunk, j)
        for first in range(0, m, p)
        for chunk in range(v)
        for j in range(first, min(first + p, m))
    ]
    total = m * v
    warm = _warmup(pipeline, device)
    forwards = [_Pass(FORWARD, chunk * p + device, j) for chunk, j in table]
    backwards = [_Pass(BACKWARD, (v - 1 - chunk) * p + device, j) for chunk, j in table]
    order = forwards[:warm]
    for index in range(total - warm):
        order += [forwards[warm + index], backwards[index]]
    return order + backwards[total - warm :]


def _simulate_orders(
    pipeline: Pipeline, orders: Sequence[Sequence[_Pass]]
) -> tuple[list[float], list[list[list[float]]]]:
    """Simulate all lists; return when each device is done, and each pass by kind and stage."""
    stages, m, p = len(pipeline.forward_s_S), pipeline.num_microbatches, pipeline.num_devices
    seconds = _seconds(pipeline)
    done_s = [[[-1.0] * m for _ in range(stages)] for _ in range(3)]
    free_s, place = [0.0] * p, [0] * p
    sends_s = pipeline.sends_s or (pipeline.send_s if p > 1 else 0.0,) * (stages - 1)
    waiting = list(range(p))
    while waiting:
        moved = False
        for device in waiting:
            order, now, at = orders[device], free_s[device], place[device]
            while at < len(order):
                kind, stage, j = order[at]
                ready = _ready_s(done_s, kind, stage, j, last=stages - 1, sends_s=sends_s)
                if ready < 0.0:
                    break
                now = (now if now > ready else ready) + seconds[kind][stage]
                done_s[kind][stage][j] = now
                at += 1
            moved = moved or at > place[device]
            free_s[device], place[device] = now, at
        if not moved:
            raise ValueError("the schedule waits for itself; num_microbatches is too uneven")
        waiting = [device for device in waiting if place[device] < len(orders[device])]
    return free_s, done_s


def _ready_s(
    done_s: list[list[list[float]]],
    kind: int,
    stage: int,
    microbatch: int,
    *,
    last: int,
    sends_s: Sequence[float],
) -> float:
    """Return when a pass has what it needs, negative while that is not known."""
    if kind == FORWARD:
        if stage == 0:
            return 0.0
        needed = done_s[FORWARD][stage - 1][microbatch]
        return needed + sends_s[stage - 1] if needed >= 0.0 else -1.0
    if kind == WEIGHT:
        return done_s[BACKWARD][stage][microbatch]
    if stage == last:
        return done_s[FORWARD][stage][microbatch]
    needed = done_s[BACKWARD][stage + 1][microbatch]
    return needed + sends_s[stage] if needed >= 0.0 else -1.0


def _seconds(pipeline: Pipeline) -> tuple[tuple[float, ...], ...]:
    weight = pipeline.weight_s_S or (0.0,) * len(pipeline.forward_s_S)
    backward = tuple(
        both - later for both, later in zip(pipeline.backward_s_S, weight, strict=True)
    )
    return pipeline.forward_s_S, backward, weight


def bound_s(
    forward_s_SC: Grid,
    backward_s_SC: Grid,
    strategies: Strategies,
    *,
    boundary_s: Numbers = 0.0,
    weight_s_SC: Grid | None = None,
) -> Numbers:
    """Return seconds that no schedule of these stages beats, per column.

    For device d, with F and B the passes of the stages 0 to d - 1 that lie before it:

        sum F + m D_d + sum B + 2 d send                                  1F1B, interleaved
        sum F + m (D_d - W_d) + max(m W_d, sum (B - W)) + ...             zero bubble

    as weight gradients may run while the last micro-batch travels back.
    """
    s = strategies
    devices_PC = per_device(forward_s_SC + backward_s_SC, s)
    num_devices = devices_PC.shape[0]
    exists_PC = np.arange(num_devices)[:, None] < np.asarray(s.pipeline)
    sent_PC = np.arange(num_devices)[:, None] * np.asarray(boundary_s)
    forth_PC = _before(forward_s_SC, num_devices) + sent_PC
    back_PC = _before(backward_s_SC, num_devices) + sent_PC
    whole_PC = forth_PC + s.num_microbatches * devices_PC + back_PC
    if weight_s_SC is not None:
        later_PC = s.num_microbatches * per_device(weight_s_SC, s)
        left_PC = back_PC - _before(weight_s_SC, num_devices)
        filled_PC = forth_PC + s.num_microbatches * devices_PC + np.maximum(left_PC - later_PC, 0.0)
        whole_PC = np.where(np.greater(s.zero_bubble, 0.0), filled_PC, whole_PC)
    longest: Numbers = np.where(exists_PC, whole_PC, 0.0).max(axis=0)
    return longest


def _before(stage_SC: Grid, num_devices: int) -> Grid:
    """Sum of the stages 0 to d - 1, for every device d."""
    first = stage_SC[:num_devices]
    return np.cumsum(first, axis=0) - first


def find_cycle(end_s_KE: npt.NDArray[np.float64]) -> Cycle:
    """Return the shortest settled cycle that ends with the last turn, else the narrowest.

    Args:
        end_s_KE: ends of consecutive turns, at least two.
    """
    moved_KE = end_s_KE[-1] - end_s_KE[-2::-1]
    turns_K = np.arange(1, len(end_s_KE))
    least_K, most_K = moved_KE.min(axis=1), moved_KE.max(axis=1)
    width_K = np.divide(most_K - least_K, most_K, out=np.zeros_like(most_K), where=most_K > 0.0)
    settled = np.flatnonzero(width_K <= SETTLED_RATIO)
    best = int(settled[0]) if len(settled) else int(width_K.argmin())
    return Cycle(turns=int(turns_K[best]), least_s=float(least_K[best]), most_s=float(most_K[best]))
