"""What handovers and cells would gain that the release refuses: solved as if it did not.

Pairs of two vendors are solved each way round, prefill on the one and decode on the other, so that
every rule between vendors is listed with what it costs, or with what the pair would lose.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Final

from tuner.planner.serve.kv_transfers import kept_by
from tuner.planner.serve.most_rate import answer_goal
from tuner.planner.serve.options import PoolSite
from tuner.planner.serve.preference import counted, gain_ratio, lost_by, worth_of
from tuner.planner.serve.solve_mode import Found, Question, narrowed
from tuner.planner.serve.to_plan import refusals_of, told_of
from tuner.serve_plan import Role, ServeUnlaunchable

LEAST_GAIN_RATIO: Final = 1e-6
"""Less is the solver's tolerance."""
SAVED: Final = {"cost": "money", "rate": "time a request"}
"""What there is less of, by objective; else devices."""


def refused_handovers(question: Question, best: Found) -> Iterator[ServeUnlaunchable]:
    """Name a refused pair of prefill and decode instances whose plan would beat the best one."""
    if "disaggregated" not in question.spec.goal.modes or not _refuses(question):
        return
    free = answer_goal(question, "disaggregated", may_refuse=False)
    if free is None or free.missed:
        return
    broken = _broken(question, free)
    if broken and ": rule " in broken[0]:
        return  # Between vendors: refused_vendors names it.
    goal = question.spec.goal
    gained = gain_ratio(worth_of(free, goal), best, goal)
    if broken and gained > LEAST_GAIN_RATIO:
        less = SAVED.get(goal.objective, "devices")
        yield ServeUnlaunchable(
            feature=(
                f"disaggregated on {free.devices} devices, {gained:.0%} less {less}: {broken[0]}"
            ),
            gain_ratio=gained,
        )


def refused_cells(
    question: Question, best: Found, own: Found | None
) -> Iterator[ServeUnlaunchable]:
    """Name a refused cell of attention and experts that would take less than those launched.

    Args:
        question: with its cells.
        best: what was chosen.
        own: the mode's answer with cells that the release launches.
    """
    cells, goal = question.cells, question.spec.goal
    if own is None or not cells.options or not cells.refused:
        return
    free = answer_goal(narrowed(question, _with_refused_cells), "attention_expert")
    if free is None or free.missed:
        return
    broken = refusals_of(free, question)
    if broken and gain_ratio(worth_of(free, goal), own, goal) > LEAST_GAIN_RATIO:
        yield ServeUnlaunchable(
            feature=(
                f"{told_of(free)}: {counted(free.devices)}, cells that are launched take"
                f" {own.devices}; {broken[0]}"
            ),
            gain_ratio=max(gain_ratio(worth_of(free, goal), best, goal), 0.0),
        )


def refused_vendors(question: Question, best: Found | None) -> Iterator[ServeUnlaunchable]:
    """Name every pair of pools of two vendors that no connector joins, with its gain or loss.

    Args:
        question: that was answered.
        best: the chosen answer; None where nothing meets the targets.
    """
    if "disaggregated" not in question.spec.goal.modes:
        return
    goal = question.spec.goal
    for sender, receiver in product(question.sites, question.sites):
        vendors = [one.machine.sheet.generation.vendor for one in (sender, receiver)]
        if vendors[0] is vendors[1] or not question.hand_overs.reach(sender, receiver):
            continue
        alone = narrowed(question, partial(_between, sender=sender, receiver=receiver))
        rules = _rules(alone)
        if not rules:
            continue
        found = answer_goal(alone, "disaggregated", may_refuse=False)
        where = f"prefill on {sender.pool.name} and decode on {receiver.pool.name}"
        if found is None or found.missed:
            missed = "serve the traffic" if found is None else f"hold {found.missed[0]}"
            yield ServeUnlaunchable(
                feature=f"{where}: would not {missed} either; {rules[0]}",
                gain_ratio=0.0,
                rule=_rule(rules[0]),
            )
            continue
        takes = f"would serve the traffic on {counted(found.devices)}"
        if best is not None:
            takes = lost_by(found, best, goal)
        elif found.price_per_hour:
            takes += f" for {found.price_per_hour:.4g} an hour"
        gained = 0.0 if best is None else gain_ratio(worth_of(found, goal), best, goal)
        yield ServeUnlaunchable(
            feature=f"{where}: {takes}; {rules[0]}",
            gain_ratio=max(gained, 0.0),
            rule=_rule(rules[0]),
        )


def _with_refused_cells(question: Question) -> Question:
    """Return the question with refused cells among those that are launched."""
    cells = question.cells
    every = replace(cells, options=(*cells.options, *cells.refused), refused=())
    return replace(question, cells=every)


def _rule(line: str) -> str:
    """Return the name of the rule that a refusal states; that of layouts where it names none."""
    _, found, after = line.partition("rule ")
    return after.partition(":")[0] if found else "layout"


def _between(question: Question, sender: PoolSite, receiver: PoolSite) -> Question:
    """Return the question with prefill on one pool and decode on another."""
    kept = tuple(
        option
        for option in question.options.options
        if (option.role is Role.PREFILL and option.site.pool.name == sender.pool.name)
        or (option.role is Role.DECODE and option.site.pool.name == receiver.pool.name)
    )
    return replace(question, options=replace(question.options, options=kept))


def _rules(question: Question) -> tuple[str, ...]:
    """Return why every pair of options is refused; empty: one is not, or there is none."""
    lines = [
        question.hand_overs.refusals(one, other)
        for one, other in product(question.options.options, question.options.options)
        if one.role is Role.PREFILL and other.role is Role.DECODE
    ]
    return lines[0] if lines and all(lines) else ()


def _refuses(question: Question) -> bool:
    """Whether any two options that can reach each other are refused."""
    kinds = {
        (option.role, option.site.pool.name, kept_by(option)): option
        for option in question.options.options
    }.values()
    return any(
        question.hand_overs.reach(one.site, other.site) and question.hand_overs.refusals(one, other)
        for one, other in product(kinds, kinds)
        if one.role is Role.PREFILL and other.role is Role.DECODE
    )


def _broken(question: Question, free: Found) -> tuple[str, ...]:
    return tuple(
        f"{one.option.site.pool.name} to {other.option.site.pool.name}: {line}"
        for one, other in product(free.groups, free.groups)
        if one.option.role is Role.PREFILL and other.option.role is Role.DECODE
        for line in question.hand_overs.refusals(one.option, other.option)
    )
