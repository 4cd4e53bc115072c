"""One training step, pass by pass: the schedule of tuner/simulate/pipeline.py as a Gantt chart.

Passes take the plan's seconds of a micro-batch on each stage, as scheduled; a gap is waiting. Sends
between stages are in the plan's step time and not in the chart; with work once per step (gradient
reduction, optimizer) they are drawn last, as the rest of the step time. Not drawn: zero-bubble
schedules, because a plan does not separate weight gradients; of a long step all but its start.
"""

from itertools import groupby
from typing import Final

from tuner.plans.train import Plan, TrainPrediction
from tuner.report.content import Figure, Table, number, seconds, word
from tuner.report.plot_style import BLUE, GREY, ORANGE, axis, hatched, layout, time_axis
from tuner.simulate.pipeline import FORWARD, Pipeline, passes
from tuner.units import format_s

MOST_PASSES: Final = 300_000
"""Passes of all ranks; simulating more takes too long for a report."""
MOST_DRAWN: Final = 72
"""Passes of one rank side by side; more are too thin to see, so only the start is drawn."""
START: Final = 36
"""Passes of a rank in the start of a longer step."""


def timeline_figure(plan: Plan, predicted: TrainPrediction) -> Figure | None:
    """Draw one step; None if the plan lacks what its schedule needs."""
    decision, stages = plan.decision, predicted.stages
    if decision is None or decision.schedule == "zero_bubble":
        return None
    count = decision.num_microbatches(plan.goal.global_batch_size)
    ranks = decision.pipeline_model_parallel_size
    is_uneven = decision.virtual_pipeline_model_parallel_size > 1 and count % ranks
    if count < 1 or is_uneven or 2 * len(stages) * count > MOST_PASSES:
        return None
    pipeline = Pipeline(
        forward_s_S=tuple(stage.forward_s for stage in stages),
        backward_s_S=tuple(stage.backward_s for stage in stages),
        num_devices=ranks,
        num_microbatches=count,
    )
    by_rank = [
        list(rank_passes)
        for _, rank_passes in groupby(passes(pipeline), lambda timed: timed.device)
    ]
    names = [f"rank {rank}" for rank in range(ranks)]
    passes_end_s = max(rank_passes[-1].end_s for rank_passes in by_rank)
    is_whole = max(map(len, by_rank)) <= MOST_DRAWN
    end_s = min(rank_passes[:START][-1].end_s for rank_passes in by_rank)
    end_s = max(predicted.step_time_s, passes_end_s) if is_whole else end_s
    bars: dict[str, list[tuple[str, float, float, str]]] = {"forward": [], "backward": []}
    drawn = (timed for rank_passes in by_rank for timed in rank_passes if timed.start_s < end_s)
    for timed in drawn:
        kind = "forward" if timed.kind == FORWARD else "backward"
        length_s = timed.end_s - timed.start_s
        text = f"micro-batch {timed.microbatch}, stage {timed.stage}, {kind}: {format_s(length_s)}"
        bars[kind].append((names[timed.device], timed.start_s, length_s, text))
    rest_s = max(0.0, predicted.step_time_s - passes_end_s)
    if is_whole and rest_s:
        text = f"once per step, and sends: {format_s(rest_s)}"
        bars["once per step"] = [(name, passes_end_s, rest_s, text) for name in names]
    styles = zip(bars.items(), ((BLUE, ""), (ORANGE, ""), (GREY, ".")), strict=False)
    worked_s = [
        [
            sum(
                timed.end_s - timed.start_s
                for timed in rank_passes
                if (timed.kind == FORWARD) == side
            )
            for rank_passes in by_rank
        ]
        for side in (True, False)
    ]
    return Figure(
        name="timeline",
        title="One step of the pipeline",
        reading=f"{count:,} micro-batches through {len(stages):,} stages on {ranks:,} pipeline "
        "ranks, simulated with the schedule from the plan's stage times. A gap is waiting."
        + " The start of the step is drawn."
        * (not is_whole),
        traces=tuple(
            {
                "type": "bar",
                "orientation": "h",
                "name": kind,
                "y": [bar[0] for bar in kind_bars],
                "base": [float(f"{bar[1]:.6g}") for bar in kind_bars],
                "x": [float(f"{bar[2]:.6g}") for bar in kind_bars],
                "marker": hatched(colour, shape),
                "hovertext": [bar[3] for bar in kind_bars],
                "hoverinfo": "text",
            }
            for (kind, kind_bars), (colour, shape) in styles
        ),
        layout=layout(
            x=time_axis("time", range=[0.0, end_s]),
            y=axis("", type="category", range=[ranks - 0.5, -0.5], categoryarray=names),
            barmode="overlay",
            bargap=0.25,
        ),
        table=Table(
            caption="Seconds of a step by pipeline rank",
            header=("pipeline rank", "passes", "forward", "backward", "waiting", "once per step"),
            rows=tuple(
                (
                    word(name),
                    number(len(rank_passes)),
                    seconds(forward_s),
                    seconds(backward_s),
                    seconds(max(0.0, passes_end_s - forward_s - backward_s)),
                    seconds(rest_s),
                )
                for name, rank_passes, forward_s, backward_s in zip(
                    names, by_rank, *worked_s, strict=True
                )
            ),
        ),
        height=150 + max(130, min(34 * ranks, 900)),
    )
