"""Report section on the training and spare nodes of a plan, in words."""

from collections.abc import Iterator
from typing import Final

from tuner.faults.forecast import SECONDS_PER_HOUR, RunForecast
from tuner.faults.spare_choice import NodeRatio, SpareChoice
from tuner.units import format_count, format_counted, format_ratio

SHOWN: Final = 4
"""Other pairs of numbers."""


def spares_sentence(run: RunForecast) -> str:
    """Say what was chosen for what; empty where the spec states it."""
    choice = run.spares
    if choice is None:
        return ""
    best, left = choice.chosen, choice.pool_nodes - choice.chosen.nodes - choice.chosen.spare_nodes
    unused = f", {left} are not needed" if left else ""
    return (
        f"{format_counted(best.spare_nodes, 'spare node')}, {best.nodes} of {choice.pool_nodes}"
        f" train{unused}: {_value(best, choice)}"
    )


def spares_notes(run: RunForecast) -> Iterator[str]:
    """Compare the chosen numbers with others."""
    choice = run.spares
    if choice is None:
        return
    others = [one for one in choice.compared if one != choice.chosen][:SHOWN]
    best = (
        "the fewest device hours"
        if choice.objective == "cost"
        else "most tokens per second of the run"
    )
    listed = "; ".join(f"{one.nodes} + {one.spare_nodes} {_value(one, choice)}" for one in others)
    against = f"; others, training + spare: {listed}" if listed else ""
    yield (
        f"{choice.chosen.nodes} training and {choice.chosen.spare_nodes} spare nodes are chosen for"
        f" {best}, the best of {format_counted(choice.num_priced, 'pair')} of numbers, each priced"
        f" at its fastest layout{against}"
    )
    if not choice.is_complete:
        yield (
            "--time-limit left no time to search fewer than"
            f" {choice.fewest_searched} training nodes"
        )


def _value(one: NodeRatio, choice: SpareChoice) -> str:
    trains = f"{format_ratio(one.effective_time_ratio, digits=2)} of the time trains"
    if choice.objective == "cost":
        hours = one.device_s_per_token * 1e9 / SECONDS_PER_HOUR
        return f"{hours:,.1f} device hours per billion tokens, {trains}"
    return f"{format_count(one.goodput_tokens_per_s)} tokens/s, {trains}"
