"""Plots of a deployment: instances on devices, utilisation, breakdown of a decode step."""

from collections.abc import Iterator
from typing import Final

from tuner.config.serve import Instances, Role, ServeDecision
from tuner.config.serve_words import group_degrees
from tuner.plans.serve import ServePlan, ServePrediction
from tuner.report.breakdown import MOST_COMPARED, breakdown_figure
from tuner.report.content import (
    Cell,
    Depth,
    Figure,
    Table,
    maybe,
    number,
    share,
    size,
    word,
)
from tuner.report.plot_style import CYCLE, GREY, ORANGE, SYMBOLS, axis, layout, limit_line
from tuner.units import format_bytes, format_ratio

MOST_ROWS: Final = 48
"""Instances of one group with a row each; more share one row."""
MOST_SQUARES: Final = 64
"""Devices drawn in one row."""


def instances_figure(plan: ServePlan, decision: ServeDecision) -> Figure:
    """Draw every instance as a row of devices, pool by pool."""
    traces = []
    used: dict[str, int] = {}
    for index, group in enumerate(decision.instances):
        used[group.pool] = used.get(group.pool, 0) + group.count * group.devices
        xs, ys, texts = _squares(group)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{group.role.value} on {group.pool}",
                "x": xs,
                "y": ys,
                "marker": {
                    "color": CYCLE[index % len(CYCLE)],
                    "symbol": SYMBOLS[1] if index == 0 else SYMBOLS[(index + 1) % len(SYMBOLS)],
                    "size": 17,
                    "line": {"width": 0},
                },
                "hovertext": texts,
                "hoverinfo": "text",
            }
        )
    free = {
        pool.name: pool.num_devices - used.get(pool.name, 0)
        for pool in plan.cluster.pools
        if pool.num_devices > used.get(pool.name, 0)
    }
    if free:
        shown = [
            (name, at) for name, count in free.items() for at in range(min(count, MOST_SQUARES))
        ]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "not used",
                "x": [at + 1 for _, at in shown],
                "y": [f"{name}: not used" for name, _ in shown],
                "marker": {"color": GREY, "symbol": "square-open", "size": 13},
                "hovertext": [f"{free[name]} devices of {name} are not used" for name, _ in shown],
                "hoverinfo": "text",
            }
        )
    rows = sum(min(group.count, MOST_ROWS) for group in decision.instances) + len(free)
    widest = max((group.devices for group in decision.instances), default=1)
    widest = min(MOST_SQUARES, max(widest, *free.values(), 8) if free else max(widest, 8))
    return Figure(
        name="instances",
        title="The instances",
        reading="Every row is one instance, every mark one device. KV transfers go from prefill to "
        "decode.",
        traces=tuple(traces),
        layout=layout(
            x=axis("device", range=[0.3, widest + 0.7], dtick=max(1, widest // 8), showgrid=False),
            y=axis("", type="category", autorange="reversed", showgrid=False),
        ),
        table=_groups(decision, free),
        height=130 + 34 * min(rows, 60),
    )


def _squares(group: Instances) -> tuple[list[int], list[str], list[str]]:
    xs: list[int] = []
    ys: list[str] = []
    texts: list[str] = []
    rows = group.count if group.count <= MOST_ROWS else 1
    for at in range(rows):
        instance = f"{group.pool} {group.role.value} {at + 1}"
        name = (
            instance if rows == group.count else f"{group.count} x {group.pool} {group.role.value}"
        )
        for device in range(min(group.devices, MOST_SQUARES)):
            xs.append(device + 1)
            ys.append(name)
            texts.append(f"{name}, device {device + 1} of {group.devices}\n{group_degrees(group)}")
    return xs, ys, texts


def _groups(decision: ServeDecision, free: dict[str, int]) -> Table:
    rows = [
        (
            word(f"{group.role.value} on {group.pool}"),
            number(group.count, key=f"decision.instances.{index}.count"),
            number(group.devices, key=f"decision.instances.{index}.devices"),
            word(group_degrees(group)),
            number(group.max_batch, key=f"decision.instances.{index}.max_batch"),
            number(group.kv_tokens, key=f"decision.instances.{index}.kv_tokens"),
        )
        for index, group in enumerate(decision.instances)
    ]
    nothing = word("-")
    rows += [
        (word(f"not used on {pool}"), nothing, number(count), nothing, nothing, nothing)
        for pool, count in free.items()
    ]
    header = ("group", "instances", "devices each", "split", "sequences per rank", "KV tokens")
    return Table(caption="Groups of equal instances", header=header, rows=tuple(rows))


def decode_figure(plan: ServePlan, predicted: ServePrediction) -> Figure:
    """Draw one decode step of the slowest group, with those of the runners-up."""
    prompts = "; a step that also computes a chunk of a prompt takes longer"
    is_mixed = plan.decision is not None and any(
        group.role is Role.AGGREGATED for group in plan.decision.instances
    )
    return breakdown_figure(
        {"the plan": predicted.breakdown_s}
        | {
            f"runner-up {number}": alternative.predicted.breakdown_s
            for number, alternative in enumerate(plan.alternatives[:MOST_COMPARED], start=1)
        },
        name="decode-step",
        title=f"Where the time of a decode step goes, in the slowest group{prompts * is_mixed}",
        reading="Predicted seconds of one decode step of the slowest group, by cause.",
    )


def use_figure(predicted: ServePrediction) -> Figure:
    """Draw the utilisation of each group of instances."""
    names = list(predicted.utilisation_ratio)
    values = [predicted.utilisation_ratio[name] for name in names]
    return Figure(
        name="use",
        depth=Depth.FIRST,
        title="Utilisation of each group",
        reading="Predicted share of time in which a group's instances work; the rest is headroom "
        "for bursts.",
        traces=(
            {
                "type": "bar",
                "orientation": "h",
                "y": names,
                "x": values,
                "marker": {"color": ORANGE},
                "text": [format_ratio(value) for value in values],
                "textposition": "auto",
                "hovertext": [
                    f"{name}: {format_ratio(value)} busy, "
                    f"{format_bytes(predicted.memory_bytes.get(name, 0))} per device"
                    for name, value in zip(names, values, strict=True)
                ],
                "hoverinfo": "text",
            },
        ),
        layout=layout(
            x=axis("busy share", range=[0.0, 1.05], tickformat=".0%"),
            y=axis("", autorange="reversed", type="category"),
            shapes=[limit_line(1.0, is_vertical=True)],
            bargap=0.45,
            showlegend=False,
        ),
        table=Table(
            caption="Utilisation and memory of each group",
            header=("group", "busy", "memory per device"),
            rows=tuple(
                (
                    word(name),
                    _use(predicted, name),
                    maybe(
                        size,
                        predicted.memory_bytes.get(name),
                        key=f"predicted.memory_bytes.{name}",
                    ),
                )
                for name in names
            ),
        ),
        height=130 + 46 * len(names),
    )


def _use(predicted: ServePrediction, name: str) -> Cell:
    return share(predicted.utilisation_ratio[name], key=f"predicted.utilisation_ratio.{name}")


def alternatives_rows(plan: ServePlan) -> Iterator[tuple[str, str, ServeDecision, ServePrediction]]:
    """Yield the plan and its runners-up: name, path in the plan, decision, prediction."""
    if plan.decision is not None and plan.predicted is not None:
        yield "the plan", "predicted", plan.decision, plan.predicted
    for index, alternative in enumerate(plan.alternatives):
        name = "tie" if alternative.within_band else "runner-up"
        yield (
            f"{name} {index + 1}",
            f"alternatives.{index}.predicted",
            alternative.decision,
            alternative.predicted,
        )
