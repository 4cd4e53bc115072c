"""Why candidates have no trial on few devices: alike reasons are said once, with a count."""

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.plan import TrainDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why nothing can be launched for one candidate."""

    rule: str
    """In words, alike for all candidates that it keeps out."""
    detail: str = ""
    """What is this candidate's own about it."""
    least: TrainDecision | None = None
    """The candidate's smallest job, where that asks for more devices than are allowed."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}" if self.detail else self.rule


def too_large(least: TrainDecision, *, max_devices: int) -> Obstacle:
    """Return the obstacle of a candidate whose smallest job asks for too many devices."""
    return Obstacle(rule=f"more than the {max_devices} allowed", least=least)


def in_words(obstacles: Sequence[Obstacle]) -> tuple[str, ...]:
    """Say every reason once; of several candidates the range of what they need."""
    rules: dict[str, list[Obstacle]] = {}
    for one in obstacles:
        rules.setdefault(one.rule, []).append(one)
    return tuple(_in_words(rule, alike) for rule, alike in rules.items())


def with_the_own_choice(own: Obstacle, others: Sequence[Obstacle]) -> str:
    """Say what keeps the plan's own choice from a trial, and what the other candidates."""
    alike = [one for one in others if one.rule == own.rule]
    unlike = [one for one in others if one.rule != own.rule]
    if own.least is None and not unlike:
        return in_words([own, *others])[0]
    parts = [f"the plan's own choice: {in_words([own])[0]}"]
    leasts = [one.least.num_devices for one in alike if one.least is not None]
    if leasts:
        parts.append(f"{_candidates(len(alike))}: {_range(min(leasts), max(leasts))}")
    elif alike:
        parts.append(f"{_candidates(len(alike))}: likewise")
    if unlike:
        parts.append(f"{_candidates(len(unlike))}: {', '.join(in_words(unlike))}")
    return "; ".join(parts)


def _candidates(count: int) -> str:
    return f"{count} other candidate{'s' if count > 1 else ''}"


def _in_words(rule: str, alike: Sequence[Obstacle]) -> str:
    leasts = [one.least for one in alike if one.least is not None]
    if leasts:
        whose = "its smallest job needs" if len(alike) == 1 else "their smallest jobs need"
        return f"{whose} {_devices(leasts)}, {rule}"
    details = list(dict.fromkeys(one.detail for one in alike if one.detail))
    if not details:
        return rule
    more = f" (and {len(details) - 1} more like it)" if len(details) > 1 else ""
    return f"{rule}: {details[0]}{more}"


def _devices(jobs: Sequence[TrainDecision]) -> str:
    """Say how many devices jobs ask for, and which groups make the smallest one that large."""
    least = min(jobs, key=lambda one: one.num_devices)
    most = max(one.num_devices for one in jobs)
    groups = (
        f"TP {least.tensor_model_parallel_size}, CP {least.context_parallel_size}, "
        f"EP {least.expert_model_parallel_size}, DP {least.data_parallel_size}, "
        f"PP {least.pipeline_model_parallel_size}"
    )
    which = groups if len(jobs) == 1 else f"the smallest with {groups}"
    return f"{_range(least.num_devices, most)} ({which})"


def _range(fewest: int, most: int) -> str:
    return f"{fewest} devices" if fewest == most else f"{fewest} to {most} devices"
