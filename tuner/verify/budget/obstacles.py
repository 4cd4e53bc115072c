"""Why candidates have no trial on few devices: identical reasons once, with a count."""

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.config.train import TrainDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why nothing can be launched for one candidate."""

    rule: str
    """The same text for all candidates that it excludes."""
    detail: str = ""
    """Details of this candidate."""
    least: TrainDecision | None = None
    """The candidate's smallest job, if that needs more devices than are allowed."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}" if self.detail else self.rule


def too_large(least: TrainDecision, *, max_devices: int) -> Obstacle:
    """Return the obstacle of a candidate whose smallest job needs too many devices."""
    return Obstacle(rule=f"more than the {max_devices} allowed", least=least)


def describe_obstacles(obstacles: Sequence[Obstacle]) -> tuple[str, ...]:
    """List every reason once; for several candidates the range of devices they need."""
    rules: dict[str, list[Obstacle]] = {}
    for one in obstacles:
        rules.setdefault(one.rule, []).append(one)
    return tuple(_describe(rule, same_rule) for rule, same_rule in rules.items())


def describe_with_choice(own: Obstacle, others: Sequence[Obstacle]) -> str:
    """Say why the plan's own choice has no trial, and why the other candidates have none."""
    same_rule = [one for one in others if one.rule == own.rule]
    other_rules = [one for one in others if one.rule != own.rule]
    if own.least is None and not other_rules:
        return describe_obstacles([own, *others])[0]
    parts = [f"the plan's own choice: {describe_obstacles([own])[0]}"]
    leasts = [one.least.num_devices for one in same_rule if one.least is not None]
    if leasts:
        parts.append(f"{_candidates(len(same_rule))}: {_range(min(leasts), max(leasts))}")
    elif same_rule:
        parts.append(f"{_candidates(len(same_rule))}: likewise")
    if other_rules:
        parts.append(
            f"{_candidates(len(other_rules))}: {', '.join(describe_obstacles(other_rules))}"
        )
    return "; ".join(parts)


def _candidates(count: int) -> str:
    return f"{count} other candidate{'s' if count > 1 else ''}"


def _describe(rule: str, same_rule: Sequence[Obstacle]) -> str:
    leasts = [one.least for one in same_rule if one.least is not None]
    if leasts:
        whose = "its smallest job needs" if len(same_rule) == 1 else "their smallest jobs need"
        return f"{whose} {_devices(leasts)}, {rule}"
    details = list(dict.fromkeys(one.detail for one in same_rule if one.detail))
    if not details:
        return rule
    more = f" (and {len(details) - 1} more like it)" if len(details) > 1 else ""
    return f"{rule}: {details[0]}{more}"


def _devices(jobs: Sequence[TrainDecision]) -> str:
    """Say how many devices jobs need, and the parallel degrees of the smallest one."""
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
