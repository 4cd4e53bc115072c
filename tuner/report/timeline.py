"""One training step, pass by pass: the schedule of tuner/simulate/pipeline.py as a Gantt chart.

A plan stores the seconds of a micro-batch's forward and backward pass for every stage; of the
step's causes (recomputation, exposed communication) it stores the seconds of the slowest rank, not
of each pass. Passes are drawn as scheduled, and inside a pass the causes have their share of the
slowest rank's work: with W its seconds in passes,

    communication of a pass   (its seconds) x (exposed communication) / W
    recomputation             (a backward pass's seconds) x (recomputation) / (W's backward part)

The remaining time of a device is drawn as waiting. Sends between stages are in the plan's step time
and not in the chart; work once per step (gradient reduction, optimizer) is drawn last, as the rest
of the step time after the passes.

Letters: P pipeline ranks, S stages.

Not drawn: zero-bubble schedules, because a plan does not separate weight gradients; the middle of a
long step.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

from tuner.config.train import TrainDecision
from tuner.plans.train import Plan, TrainPrediction
from tuner.report.axes import axis, layout, time_axis
from tuner.report.content import Figure, Table, seconds, word
from tuner.report.palette import BLUE, GREY, ORANGE, PURPLE, VERMILLION, hatched
from tuner.simulate.pipeline import (
    FORWARD,
    Pipeline,
    SimulatedStep,
    TimedPass,
    passes,
    simulate_step,
)
from tuner.units import format_s

MAX_SIMULATED_PASSES: Final = 300_000
"""Passes of all ranks; simulating more takes too long for a report."""
MAX_PASSES_PER_RANK: Final = 72
"""Most passes of one rank that are drawn side by side; more are too thin to see."""
WINDOW: Final = 28
"""Passes of one rank drawn at each end of a longer step."""
MAX_PASSES_PER_WINDOW: Final = 1_800
"""Passes of all ranks in one window; a page with more opens slowly."""

MIN_GAP_RATIO: Final = 1e-4
"""Of a step's time; a shorter wait is not drawn."""

_EXPOSED: Final = ("tensor", "context", "expert", "sharding", "collectives")
_EXPOSED_REFERENCE: Final = ("tensor_communication", "expert_communication")
"""Causes inside passes: of plans on the analytic model, and of the reference engine."""

_KINDS: Final = {
    "forward": (BLUE, ""),
    "backward": (ORANGE, ""),
    "recompute": (PURPLE, ""),
    "communication": (VERMILLION, ""),
    "waiting (bubble)": ("rgba(140,149,159,0.22)", ""),
    "once per step": (GREY, "."),
}


class _Bar(NamedTuple):
    device: int
    kind: str
    start_s: float
    length_s: float
    text: str


class _Window(NamedTuple):
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """Shares of communication and recomputation in a pass."""

    communication: float
    recompute: float


def timeline_figure(plan: Plan, predicted: TrainPrediction) -> Figure | None:
    """Draw one step; None if the plan lacks what its schedule needs."""
    decision = plan.decision
    if decision is None or decision.schedule == "zero_bubble":
        return None
    count = decision.num_microbatches(plan.goal.global_batch_size)
    ranks = decision.pipeline_model_parallel_size
    is_uneven = decision.virtual_pipeline_model_parallel_size > 1 and count % ranks
    if count < 1 or is_uneven or 2 * len(predicted.stages) * count > MAX_SIMULATED_PASSES:
        return None
    pipeline = Pipeline(
        forward_s_S=tuple(stage.forward_s for stage in predicted.stages),
        backward_s_S=tuple(stage.backward_s for stage in predicted.stages),
        num_devices=ranks,
        num_microbatches=count,
    )
    simulated = simulate_step(pipeline)
    passes_P = [list(own) for _, own in groupby(passes(pipeline), lambda one: one.device)]
    windows = _windows(passes_P, end_s=max(predicted.step_time_s, simulated.step_s))
    rest_s = predicted.step_time_s - simulated.step_s
    shares = _shares(predicted, pipeline)
    bars = [
        *(
            bar
            for own in passes_P
            for one in own
            if _is_drawn(one, windows)
            for bar in _parts(one, shares)
        ),
        *_waiting(passes_P, until_s=simulated.step_s),
    ]
    if rest_s > 0.0:
        said = f"once per step, and sends: {format_s(rest_s)}"
        bars += [
            _Bar(rank, "once per step", simulated.step_s, rest_s, said) for rank in range(ranks)
        ]
    return Figure(
        name="timeline",
        title="One step of the pipeline",
        reading=_reading(decision, count=count, is_whole=len(windows) == 1),
        traces=tuple(
            trace
            for place, window in enumerate(windows)
            for trace in _traces(bars, window, place=place)
        ),
        layout=_layout(windows, num_ranks=ranks),
        table=_table(passes_P, simulated, rest_s=rest_s),
        height=150 + max(130, min(34 * ranks, 900)),
    )


def _windows(passes_P: Sequence[Sequence[TimedPass]], *, end_s: float) -> tuple[_Window, ...]:
    """Return the time windows to draw: all of a short step, both ends of a long one."""
    most = max(map(len, passes_P))
    each = min(WINDOW, max(1, MAX_PASSES_PER_WINDOW // (2 * len(passes_P))))
    if most <= MAX_PASSES_PER_RANK and most * len(passes_P) <= MAX_PASSES_PER_WINDOW:
        return (_Window(0.0, end_s),)
    first_s = min(own[min(each, len(own)) - 1].end_s for own in passes_P)
    last_s = max(own[-min(each, len(own))].start_s for own in passes_P)
    if last_s <= first_s:
        return (_Window(0.0, end_s),)
    return (_Window(0.0, first_s), _Window(last_s, end_s))


def _is_drawn(one: TimedPass, windows: Sequence[_Window]) -> bool:
    return any(one.start_s < window.end_s and one.end_s > window.start_s for window in windows)


def _layout(windows: Sequence[_Window], *, num_ranks: int) -> dict[str, object]:
    ranks = axis(
        "",
        type="category",
        range=[num_ranks - 0.5, -0.5],
        categoryorder="array",
        categoryarray=[f"rank {rank}" for rank in range(num_ranks)],
    )
    if len(windows) == 1:
        (whole,) = windows
        times = time_axis("time", range=list(whole))
        return layout(x=times, y=ranks, barmode="overlay", bargap=0.25)
    start, end = windows
    return layout(
        x=time_axis("start of the step", range=list(start), domain=[0.0, 0.485]),
        y=ranks,
        xaxis2=time_axis("end of the step", range=list(end), domain=[0.515, 1.0], anchor="y2"),
        yaxis2={**ranks, "anchor": "x2", "showticklabels": False},
        barmode="overlay",
        bargap=0.25,
    )


def _reading(decision: TrainDecision, *, count: int, is_whole: bool) -> str:
    ranks, stages = decision.pipeline_model_parallel_size, decision.num_stages
    micro = "micro-batch" if count == 1 else "micro-batches"
    text = f"{count} {micro} through {stages} stage{'s' * (stages > 1)} on {ranks} pipeline "
    text += f"rank{'s' * (ranks > 1)}, simulated with the schedule from the plan's stage times. "
    text += "Inside a pass, recomputation and communication have the step's shares."
    if not is_whole:
        text += (
            " The step's start and end are drawn; the passes between them repeat the same pattern."
        )
    return text


def _shares(predicted: TrainPrediction, pipeline: Pipeline) -> _Shares:
    """Return the shares of the slowest rank."""
    ranks, count = pipeline.num_devices, pipeline.num_microbatches
    works = [
        (sum(pipeline.forward_s_S[rank::ranks]), sum(pipeline.backward_s_S[rank::ranks]))
        for rank in range(ranks)
    ]
    forward_s, backward_s = (count * part for part in max(works, key=sum))
    causes = predicted.breakdown_s
    exposed_s = sum(causes.get(name, 0.0) for name in (*_EXPOSED, *_EXPOSED_REFERENCE))
    work_s, recompute_s = forward_s + backward_s, causes.get("recompute", 0.0)
    return _Shares(
        communication=min(1.0, exposed_s / work_s) if work_s else 0.0,
        recompute=min(1.0, recompute_s / backward_s) if backward_s else 0.0,
    )


def _parts(one: TimedPass, shares: _Shares) -> Iterator[_Bar]:
    length_s = one.end_s - one.start_s
    is_forward = one.kind == FORWARD
    recompute_s = 0.0 if is_forward else length_s * shares.recompute
    communication_s = length_s * min(
        shares.communication, 1.0 - recompute_s / length_s if length_s else 0.0
    )
    name = "forward" if is_forward else "backward"
    said = f"micro-batch {one.microbatch}, stage {one.stage}, {name}: {format_s(length_s)}"
    now_s = one.start_s
    for kind, part_s in (
        ("recompute", recompute_s),
        (name, length_s - recompute_s - communication_s),
        ("communication", communication_s),
    ):
        if part_s > 0.0:
            yield _Bar(one.device, kind, now_s, part_s, said)
            now_s += part_s


def _waiting(passes_P: Sequence[Sequence[TimedPass]], *, until_s: float) -> Iterator[_Bar]:
    """Yield the gaps of every rank."""
    for rank, own in enumerate(passes_P):
        now_s = 0.0
        spans = [(one.start_s, one.end_s) for one in own]
        for start_s, end_s in (*spans, (until_s, until_s)):
            gap_s = start_s - now_s
            if gap_s > MIN_GAP_RATIO * until_s:
                yield _Bar(rank, "waiting (bubble)", now_s, gap_s, f"waits {format_s(gap_s)}")
            now_s = end_s


def _traces(bars: Sequence[_Bar], window: _Window, *, place: int) -> Iterator[dict[str, object]]:
    by_kind: dict[str, list[_Bar]] = defaultdict(list)
    for bar in bars:
        if bar.start_s < window.end_s and bar.start_s + bar.length_s > window.start_s:
            by_kind[bar.kind].append(bar)
    for kind, (colour, shape) in _KINDS.items():
        own = by_kind.get(kind)
        if not own:
            continue
        yield {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "legendgroup": kind,
            "showlegend": place == 0 or kind == "once per step",
            "y": [f"rank {bar.device}" for bar in own],
            "base": [float(f"{bar.start_s:.6g}") for bar in own],
            "x": [float(f"{bar.length_s:.6g}") for bar in own],
            "marker": hatched(colour, shape),
            "hovertext": [bar.text for bar in own],
            "hoverinfo": "text",
            **({"xaxis": "x2", "yaxis": "y2"} if place else {}),
        }


def _table(
    passes_P: Sequence[Sequence[TimedPass]], simulated: SimulatedStep, *, rest_s: float
) -> Table:
    return Table(
        caption="Seconds of a step by pipeline rank",
        header=(
            "pipeline rank",
            "passes",
            "forward",
            "backward",
            "waiting",
            "once per step, sends",
        ),
        rows=tuple(
            (
                word(f"rank {rank}"),
                word(len(own)),
                seconds(_compute_s(own, is_forward=True)),
                seconds(_compute_s(own, is_forward=False)),
                seconds(max(0.0, simulated.idle_s_P[rank])),
                seconds(max(0.0, rest_s)),
            )
            for rank, own in enumerate(passes_P)
        ),
    )


def _compute_s(own: Sequence[TimedPass], *, is_forward: bool) -> float:
    return sum(one.end_s - one.start_s for one in own if (one.kind == FORWARD) == is_forward)
