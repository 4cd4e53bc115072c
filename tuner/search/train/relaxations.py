"""Relaxations where nothing is legal or nothing fits, and features that the targets lack.

Each result is a search of its own with one thing given up: a rule, a limit of the user's, memory,
or a gap in the targets' manifests. Nothing is extrapolated from the first search. A feature that
changes no decisions but their prices has the best ones priced again, so its gain is a lower bound.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from profilers.steps.config import Recompute
from tuner.arrays import Ints
from tuner.catalog.manifest import Capabilities, anything
from tuner.catalog.programs import WRAPPERS
from tuner.config.knobs import KNOBS, OFFLOADS
from tuner.plans.train import Relaxation, Unlaunchable
from tuner.search.forked import Task, Worded
from tuner.search.progress import ignore_progress
from tuner.search.reasons import (
    nearest_batch,
    nearest_value,
)
from tuner.search.settings import WORTH_NAMING_RATIO, SearchSettings
from tuner.search.train.candidate_prices import price
from tuner.search.train.candidates import Candidates
from tuner.search.train.degrees import Degrees, legal_degrees
from tuner.search.train.options import (
    Choice,
    Facts,
    OptionRule,
    OptionSpace,
    RecomputeChoice,
    option_space,
)
from tuner.search.train.problem import TrainProblem
from tuner.search.train.refused_choices import refused_choices
from tuner.search.train.rules import (
    BATCH_RULES,
    COLUMN_OF_LIMIT,
    DENSE_NAMES,
    EXPERT_NAMES,
    SCHEDULE_NAMES,
    UNDIVIDED_RULE,
    dense_rules,
    expert_rules,
)
from tuner.search.train.search import search
from tuner.search.train.search_result import SearchOutcome
from tuner.search.train.space_size import SearchedSpace, by_facts, only_adds, space

PARTIALS_AT_ONCE: Final = 256
"""Partial rows whose memory is priced together, to bound the memory of the search itself."""

MOST_MIN_MEMORY_OPTIONS: Final = 12
"""Options per degrees that are tried to find the least memory."""

MOST_REPRICED: Final = 16
"""Best decisions that are priced again where a feature changes prices alone."""

NOT_SEARCHED: Final = math.inf
"""Seconds of a step with a feature that there was no time to search for."""

MOST_RULES: Final = 3

EVERYTHING: Final = anything("nothing in particular")
"""A manifest without limits."""

ONE_OF_SCHEDULES: Final[Mapping[str, str]] = {
    "interleaved schedule": "interleaved",
    "zero-bubble schedule": "zero_bubble",
}
"""Features that are one member of the manifest's `schedules`."""

FEATURES: Final[Mapping[str, tuple[str, ...]]] = {
    "context parallelism": ("context_parallel",),
    "interleaved schedule": ("virtual_pipeline",),
    "zero-bubble schedule": ("zero_bubble_needs_virtual_pipeline",),
    **{knob.words: (knob.field,) for knob in KNOBS if knob.is_feature},
    "dispatchers deepep and hybridep": ("dispatchers", "dispatchers_with_pipeline"),
    "dispatch in fp8 with block scales, combine in bf16 (DeepSeek-V3)": ("fp8_dispatch",),
    "expert tensor parallelism": ("expert_tensor_parallel",),
    "parallel folding": ("expert_folding",),
    "ZeRO sharding": ("zero_stages", "zero_stages_with_pipeline"),
    "sharding over part of the ranks (HSDP)": ("shard_ranks_zero_stages",),
    "chunked experts": ("largest_chunks", "chunks_need", "chunks_need_modules"),
    "recomputation": ("recompute", "recompute_modules", "recompute_num_layers"),
    "CUDA graphs": (
        "cuda_graphs",
        "cuda_graphs_with_pipeline",
        "full_graph_dispatchers",
        "partial_graph_recompute",
        "partial_graph_excludes",
    ),
    "offloading": (
        "optimizer_offload_zero_stages",
        "activation_offload",
    ),
    "uneven stages": ("uneven_layout", "empty_stages"),
    "overlapped gradient reduction and parameter all-gather": (
        "overlap_grad_reduce",
        "overlap_param_gather",
        "param_gather_needs_grad_reduce",
    ),
}
"""Features that a target may lack, in words, and the fields of its manifest that say so."""

_FORMS: Final[Mapping[str, Callable[[Capabilities], bool]]] = {
    "interleaved schedule": lambda able: able.virtual_pipeline and "interleaved" in able.schedules,
    "zero-bubble schedule": lambda able: "zero_bubble" in able.schedules,
    "dispatchers deepep and hybridep": lambda able: bool(able.dispatchers & {"deepep", "hybridep"}),
    "ZeRO sharding": lambda able: bool(able.zero_stages - {0}),
    "chunked experts": lambda able: able.largest_chunks > 1,
    "recomputation": lambda able: bool(able.recompute - {Recompute.NONE}),
    "CUDA graphs": lambda able: bool(able.cuda_graphs - {"none"}),
    "uneven stages": lambda able: able.uneven_layout,
}
"""Whether a target has a feature in any form, where not every value of its fields says so."""


def blocking_rules(problem: TrainProblem) -> tuple[Relaxation, ...]:
    """Name the limits and rules that alone leave nothing legal, nearest value first.

    Where no single one does, those that most combinations break come first.
    """
    options, degrees = option_space(problem), legal_degrees(problem)
    blocking = [*_legal_without(options, degrees)]
    reasons = "; ".join(rule.text for rule, _ in blocking if not rule.is_limit)
    named = (
        *_blocking_limits(problem, options, reasons),
        *(
            _blocking_choice(rule, free, degrees, reasons)
            for rule, free in blocking
            if rule.is_limit
        ),
    )
    if named:
        return named
    single = [
        (rule, relaxed)
        for rule in degrees.illegal
        if (relaxed := legal_degrees(problem, without=frozenset({rule}))).num_legal
    ]
    if single:
        single.sort(key=lambda item: (-item[1].num_legal, item[0]))
        return tuple(_single_rule(problem, rule, relaxed) for rule, relaxed in single[:MOST_RULES])
    counts = space(options, degrees)[1]
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        Relaxation(
            limit=rule, change=f"it is broken by {count} of {sum(counts.values())} decisions"
        )
        for rule, count in ordered[:MOST_RULES]
    )


def _blocking_choice(
    limit: OptionRule, free: OptionSpace, degrees: Degrees, reasons: str
) -> Relaxation:
    """Name the user's limit of one axis, which leaves nothing, with the values that would do."""
    (axis,) = limit.axes
    able = [
        _value(choice)
        for choice in free.choices[axis]
        if space(replace(free, choices={**free.choices, axis: (choice,)}), degrees)[0]
    ]
    return Relaxation(
        limit=f"search.{axis}",
        change=f"it leaves nothing: {reasons or 'the other limits leave it out'}; legal:"
        f" {', '.join(dict.fromkeys(able))}",
    )


def _value(choice: Choice) -> str:
    """Return a choice as a spec states it."""
    return str(choice.level.value if isinstance(choice, RecomputeChoice) else choice)


def _legal_without(
    options: OptionSpace, degrees: Degrees
) -> Iterator[tuple[OptionRule, OptionSpace]]:
    """Yield each rule without which something is legal, and the options without it."""
    for rule in options.rules:
        free = replace(options, rules=tuple(kept for kept in options.rules if kept is not rule))
        if space(free, degrees)[0]:
            yield rule, free


def _blocking_limits(
    problem: TrainProblem, options: OptionSpace, reasons: str
) -> Iterator[Relaxation]:
    """Name each limit of degrees that leaves nothing, with the nearest legal value.

    Args:
        problem: in which nothing is legal.
        options: of the problem.
        reasons: rules between options that leave nothing; empty: degrees do.
    """
    for name, column in COLUMN_OF_LIMIT.items():
        requested = getattr(problem.limits, name)
        if requested is None:
            continue
        free = replace(problem, limits=problem.limits.model_copy(update={name: None}))
        degrees = legal_degrees(free)
        if not space(options, degrees)[0]:
            continue
        rule = reasons or _broken_rule(problem, name, column)
        near = nearest_value(set(_values(degrees, column)) - set(requested), requested)
        yield Relaxation(
            limit=f"search.{name}",
            change=f"{', '.join(map(str, requested))} leaves nothing: {rule}; "
            f"the nearest legal value is {near}",
        )


def _broken_rule(problem: TrainProblem, name: str, column: str) -> str:
    """Why no value of a limit is legal: the related rule that most combinations break."""
    requested = getattr(problem.limits, name)
    shares_devices = column not in SCHEDULE_NAMES
    if shares_devices and all(problem.num_devices % value for value in requested):
        reasons = _rules_broken_by_one_degree(problem, name, column)
        return "; ".join((f"none divides the {problem.num_devices} devices", *reasons))
    if column == "micro_batch" and all(problem.global_batch_size % value for value in requested):
        return UNDIVIDED_RULE
    if column in ("pipeline", "virtual_pipeline") and _asks_chunks_of_one_stage(problem):
        return "more than one model chunk per rank needs a pipeline"
    counts = {
        rule: n for rule, n in legal_degrees(problem).illegal.items() if "search." not in rule
    }
    word = "interleav" if column == "virtual_pipeline" else name
    related = {rule: n for rule, n in counts.items() if word in rule} or counts
    if not related:
        return "the other limits leave it out"
    rule = max(related, key=lambda text: (related[text], text))
    if rule in BATCH_RULES and column == "data":
        relaxed = legal_degrees(problem, without=BATCH_RULES)
        if relaxed.num_legal:
            rule += f" (global_batch_size {_nearest_batch(problem, relaxed)} would do)"
    return rule


def _asks_chunks_of_one_stage(problem: TrainProblem) -> bool:
    limits = problem.limits
    chunks = limits.virtual_pipeline_model_parallel_size or (1,)
    return limits.pipeline_model_parallel_size == (1,) and min(chunks) > 1


def _rules_broken_by_one_degree(problem: TrainProblem, name: str, column: str) -> list[str]:
    """Rules about one degree that all requested values break, on any number of devices."""
    requested = np.array(getattr(problem.limits, name), dtype=np.int64)
    rules = (*dense_rules(problem), *expert_rules(problem))
    chosen = {degree: np.ones_like(requested) for degree in (*DENSE_NAMES, *EXPERT_NAMES)} | {
        column: requested
    }
    about = [rule for rule in rules if rule.text.startswith(f"{name} does not divide")]
    return [rule.text for rule in about if rule.broken(chosen).all()]


def _values(degrees: Degrees, column: str) -> list[int]:
    if column in DENSE_NAMES:
        values = degrees.dense_D[column][degrees.partials_N["dense"]]
    else:
        values = (degrees.pairs_E if column in EXPERT_NAMES else degrees.partials_N)[column]
    return [int(value) for value in np.unique(values)]


def _single_rule(problem: TrainProblem, rule: str, relaxed: Degrees) -> Relaxation:
    change = f"this rule alone excludes {relaxed.num_legal} combinations of degrees"
    if rule in BATCH_RULES:
        nearest = _nearest_batch(problem, relaxed)
        change += f"; global_batch_size {nearest} instead of {problem.global_batch_size} would do"
    return Relaxation(limit=rule, change=change)


def _nearest_batch(problem: TrainProblem, relaxed: Degrees) -> int:
    """Return the batch next to the problem's that gives equal replicas some legal degrees."""
    partials = relaxed.partials_N
    sequences = relaxed.dense_D["data"][partials["dense"]] * partials["micro_batch"]
    legal = relaxed.num_pairs_N > 0
    return nearest_batch(problem.global_batch_size, [int(count) for count in set(sequences[legal])])


def least_sufficient_memory(problem: TrainProblem) -> float:
    """Bytes per device of the decision of least memory among those tried.

    Degrees with their smallest micro-batch, in the legal options of least memory, in balanced
    layouts. Less may be sufficient, but rarely is. Hosts are taken to have what these offload.
    """
    problem = replace(problem, host_limit_bytes=None)
    options, degrees = option_space(problem), legal_degrees(problem)
    partials = _smallest_micro_batches(degrees)
    least = np.inf
    for part in np.array_split(partials, max(1, len(partials) // PARTIALS_AT_ONCE)):
        rows = degrees.rows(part)
        for facts, chosen in by_facts(rows):
            min_memory = _min_memory_options(options, facts)
            if not len(min_memory) or not len(chosen):
                continue
            candidates = Candidates(
                rows={n: np.repeat(c[chosen], len(min_memory)) for n, c in rows.items()},
                options={
                    axis: np.tile(min_memory[:, at], len(chosen))
                    for at, axis in enumerate(options.choices)
                },
            )
            least = min(least, float(price(problem, options, candidates).peak_bytes.min()))
    return float(np.ceil(least))


def _smallest_micro_batches(degrees: Degrees) -> Ints:
    """The smallest micro-batch of each dense degrees and number of virtual stages."""
    partials = degrees.partials_N
    key = (
        partials["dense"] * (int(partials["virtual_pipeline"].max()) + 1)
        + partials["virtual_pipeline"]
    )
    order = np.lexsort((partials["micro_batch"], key))
    _, first = np.unique(key[order], return_index=True)
    return order[first]


def _min_memory_options(options: OptionSpace, facts: Facts) -> Ints:
    """A few legal options of little memory: sharded, offloaded, recomputed, in chunks."""
    legal = options.legal(facts)
    axes = tuple(options.choices)
    by_axis = {axis: legal[:, at] for at, axis in enumerate(axes)}
    first = (
        by_axis["zero_stage"],
        *(by_axis[name] for name in OFFLOADS),
        -by_axis["sharding"],
    )
    order = np.lexsort((by_axis["chunks"], by_axis["recompute"], *reversed(first)))[::-1]
    _, one_each = np.unique(by_axis["recompute"][order], return_index=True)
    return legal[order[np.sort(one_each)]][:MOST_MIN_MEMORY_OPTIONS]


def feature_tasks(outcome: SearchOutcome, settings: SearchSettings) -> dict[str, Task]:
    """Searches for what the targets lack, by feature: seconds of the fastest step with it.

    The seconds carry in words what of that decision the targets do not allow (`Worded`).
    `NOT_SEARCHED` where the time was used up before; None where a step with the feature is hardly
    faster, or there is no solution.
    """
    problem = outcome.problem
    if outcome.solutions is None:
        return {}
    able_of = {
        feature: able
        for feature, able in with_features(problem.capabilities).items()
        if _may_gain(problem, able)
    }
    better = replace(
        settings,
        top=1,
        band_ratio=0.0,
        below_s=float(outcome.solutions.step_s[0]) * (1.0 - WORTH_NAMING_RATIO),
        watch=ignore_progress,
    )
    best = outcome.solutions.candidates
    best = best.taken(np.arange(min(MOST_REPRICED, len(best))))
    known = SearchedSpace(problem=problem, options=outcome.options)
    deadline = settings.begin()
    # All features together take no longer than the search itself may. Half of that is split into
    # equal shares; each feature also gets what those before it left.
    share_s = settings.time_limit_s / 2.0 / max(1, len(able_of))

    def step_s(able: Capabilities, *, later: int) -> float | None:
        left_s = deadline.left_s
        if not left_s:
            return NOT_SEARCHED
        left_s -= share_s * later
        more = replace(problem, capabilities=able)
        if more.dispatch_bytes != problem.dispatch_bytes:
            # No new decisions, and all are faster: the best ones are priced again.
            repriced = price(more, outcome.options, best, is_moved_to_fit=True)
            return float(repriced.step_s.min())
        left_out = known if only_adds(more, problem) else None
        limited = replace(better, time_limit_s=max(share_s, left_s))
        rerun = search(more, limited, known=left_out)
        if rerun.solutions is None:
            return None
        refused = refused_choices(rerun, problem)
        # A decision that the target allows has nothing to do with the feature.
        if left_out is not None and not refused:
            return None
        return Worded(float(rerun.solutions.step_s[0]), ", ".join(refused))

    return {
        feature: partial(step_s, able, later=len(able_of) - 1 - index)
        for index, (feature, able) in enumerate(able_of.items())
    }


def _may_gain(problem: TrainProblem, able: Capabilities) -> bool:
    """Return whether a feature can change a step: fp8 dispatch cannot without experts in fp8."""
    is_same = able.fp8_dispatch == problem.capabilities.fp8_dispatch
    more = replace(problem, capabilities=able)
    return is_same or more.dispatch_bytes != problem.dispatch_bytes


def unlaunchable(
    able: Capabilities, best_s: float, step_s_of: Mapping[str, float | None]
) -> tuple[Unlaunchable, ...]:
    """Return the features that the targets lack and that would gain, most first.

    Args:
        able: of the targets.
        best_s: of a step that can be launched.
        step_s_of: of one with each feature, as `feature_tasks` find it.
    """
    names = ", ".join(name for name in able.names if name not in WRAPPERS)
    missing = []
    for feature, step_s in step_s_of.items():
        gain = 0.0 if step_s is None else 1.0 - step_s / best_s
        if gain > WORTH_NAMING_RATIO:
            condition = _condition(feature, step_s, able)
            missing.append(
                Unlaunchable(target=names, feature=feature, gain_ratio=gain, condition=condition)
            )
    return tuple(sorted(missing, key=lambda refusal: -refusal.gain_ratio))


def _condition(feature: str, step_s: float | None, able: Capabilities) -> str:
    """Return the condition of a target's refusal; empty where it has the feature in no form."""
    fields = (getattr(able, name) for name in FEATURES.get(feature, ()))
    has_it = _FORMS[feature](able) if feature in _FORMS else any(fields)
    if not has_it:
        return ""
    words = step_s.words if isinstance(step_s, Worded) else ""
    return words or "stages without layers"


def with_features(capabilities: Capabilities) -> dict[str, Capabilities]:
    """Return the manifest with one feature more, for each that it lacks."""
    manifests = {}
    for feature, names in FEATURES.items():
        more: dict[str, Any] = {name: getattr(EVERYTHING, name) for name in names}
        if feature in ONE_OF_SCHEDULES:
            more["schedules"] = capabilities.schedules | {ONE_OF_SCHEDULES[feature]}
        if any(getattr(capabilities, name) != value for name, value in more.items()):
            manifests[feature] = replace(capabilities, parts=(), **more)
    return manifests
