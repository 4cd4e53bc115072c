"""What stands in the way where nothing is legal or nothing fits, and what the targets lack.

Every answer is a search of its own with one thing given up: a rule, a limit of the user's, memory,
or a gap in the targets' manifests. Nothing is guessed from the first search.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from profilers.steps.config import Recompute
from tuner.plan import Relaxation, TrainDecision, TrainPrediction, Unlaunchable
from tuner.planner.analytic.added import Known, only_adds
from tuner.planner.analytic.axes import Facts
from tuner.planner.analytic.candidate_prices import price
from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.degrees import Degrees, legal_degrees
from tuner.planner.analytic.incumbents import Search
from tuner.planner.analytic.options import Ways, ways_of
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.refused_choices import refused_choices
from tuner.planner.analytic.rules import (
    BATCH_RULE,
    DENSE_NAMES,
    EXPERT_NAMES,
    MICRO_RULE,
    SCHEDULE_NAMES,
    Ints,
    dense_rules,
    expert_rules,
)
from tuner.planner.analytic.search import Settings, search
from tuner.planner.analytic.search_result import decision_of
from tuner.planner.analytic.space_size import by_facts, space
from tuner.planner.analytic.unsupported_dispatch import exchange_gains
from tuner.planner.forked import Task, Worded
from tuner.planner.memory_offer import MemoryOffer, memory_words, printed_bytes
from tuner.planner.progress import unwatched
from tuner.spec.capabilities import WRAPPERS
from tuner.spec.manifests.manifest import Capabilities

CELLS_AT_ONCE: Final = 256
"""Cells whose memory is priced together, to bound the search's own."""

MOST_LEAN_WAYS: Final = 12
"""Ways that are tried for each degrees when memory is looked for."""

WORTH_NAMING_RATIO: Final = 5e-3
"""A missing feature that would gain less is not worth a line."""

NOT_ASKED: Final = math.inf
"""Seconds of a step with a feature that there was no time to search for."""

MOST_RULES: Final = 3

MEMORY_LIMIT: Final = "memory_per_device"
"""Name of the limit where everything legal asks for more memory."""

EVERYTHING: Final = Capabilities(names=("nothing in particular",))
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
    "overlapped all-to-all": (
        "a2a_overlap",
        "a2a_overlap_dispatchers",
        "a2a_overlap_needs_virtual_pipeline",
        "a2a_overlap_recompute",
        "a2a_overlap_excludes",
        "a2a_overlap_graphs",
        "a2a_overlap_largest_mtp",
        "a2a_overlap_mtp_needs_pipeline",
    ),
    "dispatchers deepep and hybridep": ("dispatchers", "dispatchers_with_pipeline"),
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
        "activation_offload_recompute",
        "activation_offload_graphs",
    ),
    "uneven stages": ("uneven_layout", "empty_stages"),
    "overlapped gradient sums and parameter gathers": (
        "overlap_grad_reduce",
        "overlap_param_gather",
        "param_gather_needs_grad_reduce",
    ),
}
"""What a target may lack, in words, and the fields of its manifest that say so."""

_HAS: Final[Mapping[str, Callable[[Capabilities], bool]]] = {
    "context parallelism": lambda able: able.context_parallel,
    "interleaved schedule": lambda able: able.virtual_pipeline and "interleaved" in able.schedules,
    "zero-bubble schedule": lambda able: "zero_bubble" in able.schedules,
    "overlapped all-to-all": lambda able: able.a2a_overlap,
    "dispatchers deepep and hybridep": lambda able: bool(able.dispatchers & {"deepep", "hybridep"}),
    "expert tensor parallelism": lambda able: able.expert_tensor_parallel,
    "parallel folding": lambda able: able.expert_folding,
    "ZeRO sharding": lambda able: bool(able.zero_stages - {0}),
    "sharding over part of the ranks (HSDP)": lambda able: bool(able.shard_ranks_zero_stages),
    "chunked experts": lambda able: able.largest_chunks > 1,
    "recomputation": lambda able: bool(able.recompute - {Recompute.NONE}),
    "CUDA graphs": lambda able: bool(able.cuda_graphs - {"none"}),
    "offloading": lambda able: able.activation_offload or bool(able.optimizer_offload_zero_stages),
    "uneven stages": lambda able: able.uneven_layout,
    "overlapped gradient sums and parameter gathers": lambda able: (
        able.overlap_grad_reduce or able.overlap_param_gather
    ),
}
"""Whether a target has a feature in any form."""


def relaxations(
    question: Question,
    settings: Settings,
    *,
    predict: Callable[[Search], TrainPrediction] | None = None,
) -> tuple[Relaxation, ...]:
    """Say what would have to give for a question without an answer; `predict` as in more_memory."""
    legal, _ = space(ways_of(question), legal_degrees(question))
    if not legal:
        return rules_in_the_way(question)
    return (more_memory(question, settings, predict=predict),)


def rules_in_the_way(question: Question) -> tuple[Relaxation, ...]:
    """Name the limits and rules that alone keep everything from being legal, nearest value first.

    Where no single one does, those that most combinations break come first.
    """
    limits = tuple(_limits_in_the_way(question))
    if limits:
        return limits
    degrees = legal_degrees(question)
    alone = [
        (rule, relaxed)
        for rule in degrees.illegal
        if (relaxed := legal_degrees(question, without=frozenset({rule}))).num_legal
    ]
    if alone:
        alone.sort(key=lambda item: (-item[1].num_legal, item[0]))
        return tuple(_rule_alone(question, rule, relaxed) for rule, relaxed in alone[:MOST_RULES])
    counts = space(ways_of(question), degrees)[1]
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        Relaxation(
            limit=rule, change=f"it is broken by {count} of {sum(counts.values())} decisions"
        )
        for rule, count in ordered[:MOST_RULES]
    )


def _limits_in_the_way(question: Question) -> Iterator[Relaxation]:
    """Each limit of the user's that leaves nothing, with the nearest value that would be legal."""
    columns = {name: column for names in _NAMES for column, name in names.items()}
    for name, column in columns.items():
        asked = getattr(question.limits, name)
        if asked is None:
            continue
        free = replace(question, limits=question.limits.model_copy(update={name: None}))
        degrees = legal_degrees(free)
        if not degrees.num_legal:
            continue
        rule = _broken_rule(question, name, column)
        near = _nearest(_values(degrees, column), asked)
        yield Relaxation(
            limit=f"search.{name}",
            change=f"{_listed(asked)} leaves nothing: {rule}; the nearest legal value is {near}",
        )


_NAMES: Final = (DENSE_NAMES, EXPERT_NAMES, SCHEDULE_NAMES)


def _broken_rule(question: Question, name: str, column: str) -> str:
    """Why no value of a limit is legal: the rule about it that most combinations break."""
    asked = getattr(question.limits, name)
    shares_devices = column not in SCHEDULE_NAMES
    if shares_devices and all(question.num_devices % value for value in asked):
        alone = _broken_alone(question, name, column)
        return "; ".join((f"none divides the {question.num_devices} devices", *alone))
    if column in ("pipeline", "virtual_pipeline") and _asks_chunks_of_one_stage(question):
        return "more than one model chunk per rank needs a pipeline"
    own = {rule: n for rule, n in legal_degrees(question).illegal.items() if "search." not in rule}
    word = "interleav" if column == "virtual_pipeline" else name
    related = {rule: n for rule, n in own.items() if word in rule} or own
    if not related:
        return "the other limits leave it out"
    rule = max(related, key=lambda text: (related[text], text))
    if rule in (BATCH_RULE, MICRO_RULE) and column == "data":
        rule += f" ({_nearest_batch(question, list(asked))} would be divisible)"
    return rule


def _asks_chunks_of_one_stage(question: Question) -> bool:
    limits = question.limits
    chunks = limits.virtual_pipeline_model_parallel_size or (1,)
    return limits.pipeline_model_parallel_size == (1,) and min(chunks) > 1


def _broken_alone(question: Question, name: str, column: str) -> list[str]:
    """Rules about one degree that all asked values break, on however many devices."""
    asked = np.array(getattr(question.limits, name), dtype=np.int64)
    rules = (*dense_rules(question), *expert_rules(question))
    chosen = {one: np.ones_like(asked) for one in (*DENSE_NAMES, *EXPERT_NAMES)} | {column: asked}
    about = [rule for rule in rules if rule.text.startswith(f"{name} does not divide")]
    return [rule.text for rule in about if rule.broken(chosen).all()]


def _values(degrees: Degrees, column: str) -> list[int]:
    if column in DENSE_NAMES:
        values = degrees.dense_D[column][degrees.cells_N["dense"]]
    else:
        values = (degrees.pairs_E if column in EXPERT_NAMES else degrees.cells_N)[column]
    return [int(value) for value in np.unique(values)]


def _nearest(legal: list[int], asked: tuple[int, ...]) -> int:
    return min(legal, key=lambda value: (min(abs(value - one) for one in asked), value))


def _rule_alone(question: Question, rule: str, relaxed: Degrees) -> Relaxation:
    change = f"this rule alone excludes {relaxed.num_legal} combinations of degrees"
    if rule in (BATCH_RULE, MICRO_RULE):
        nearest = _nearest_batch(question, _values(relaxed, "data"))
        change += f"; {nearest} instead of {question.global_batch_size} would do"
    return Relaxation(limit=rule, change=change)


def _nearest_batch(question: Question, divisors: list[int]) -> str:
    batch = question.global_batch_size
    near = {n for d in divisors for n in (batch // d * d, -(-batch // d) * d) if n > 0}
    best = min(near, key=lambda value: (abs(value - batch), value))
    return f"global_batch_size {best}"


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in values)


def more_memory(
    question: Question, settings: Settings, *, predict: Callable[[Search], TrainPrediction] | None
) -> Relaxation:
    """Find memory that would do, and solve with it.

    Args:
        question: that nothing fits.
        settings: of the search with that memory.
        predict: what is expected of the best decision of a search; None leaves that out.
    """
    usable = memory_that_would_do(question)
    # The size that is printed, which users state, is asked for.
    capacity = printed_bytes(usable / question.usable_memory_ratio)
    asked = replace(question, memory_limit_bytes=capacity * question.usable_memory_ratio)
    found = search(asked, replace(settings, top=1, band_ratio=0.0))
    decision, predicted = None, None
    if found.found is not None:
        decision = TrainDecision.model_validate(decision_of(found, 0))
        predicted = None if predict is None else predict(found)
    return Relaxation(
        limit=MEMORY_LIMIT,
        change=memory_words([MemoryOffer(capacity, question.capacity_bytes)]),
        decision=decision,
        predicted=predicted,
    )


def memory_that_would_do(question: Question) -> float:
    """Bytes per device of the leanest decision that is found.

    Degrees with their smallest micro-batch, in the legal ways that keep least, in balanced layouts:
    what fits with less is not ruled out, but rare.
    """
    ways, degrees = ways_of(question), legal_degrees(question)
    cells = _smallest_micro_batches(degrees)
    least = np.inf
    for part in np.array_split(cells, max(1, len(cells) // CELLS_AT_ONCE)):
        rows = degrees.rows(part)
        for facts, chosen in by_facts(rows):
            leanest = _leanest_ways(ways, facts)
            if not len(leanest) or not len(chosen):
                continue
            candidates = Candidates(
                rows={n: np.repeat(c[chosen], len(leanest)) for n, c in rows.items()},
                ways={
                    axis: np.tile(leanest[:, at], len(chosen))
                    for at, axis in enumerate(ways.choices)
                },
            )
            least = min(least, float(price(question, ways, candidates).peak_bytes.min()))
    return float(np.ceil(least))


def _smallest_micro_batches(degrees: Degrees) -> Ints:
    """Of each dense degrees and number of virtual stages the cell of the smallest micro-batch."""
    cells = degrees.cells_N
    key = cells["dense"] * (int(cells["virtual_pipeline"].max()) + 1) + cells["virtual_pipeline"]
    order = np.lexsort((cells["micro_batch"], key))
    _, first = np.unique(key[order], return_index=True)
    return order[first]


def _leanest_ways(ways: Ways, facts: Facts) -> Ints:
    """A few legal ways that keep little: sharded, offloaded, computed again, in chunks."""
    legal = ways.legal(facts)
    axes = tuple(ways.choices)
    by_axis = {axis: legal[:, at] for at, axis in enumerate(axes)}
    first = (
        *(by_axis["zero_stage"], by_axis["optimizer_offload"], by_axis["activation_offload"]),
        -by_axis["sharding"],
    )
    order = np.lexsort((by_axis["chunks"], by_axis["recompute"], *reversed(first)))[::-1]
    _, one_each = np.unique(by_axis["recompute"][order], return_index=True)
    return legal[order[np.sort(one_each)]][:MOST_LEAN_WAYS]


def feature_tasks(found: Search, settings: Settings) -> dict[str, Task]:
    """Searches for what the targets lack, by feature: seconds of the fastest step with it.

    Beside the seconds stands in words what of that decision the targets do not allow (`Worded`).
    `NOT_ASKED` where the time was used up before; None where a step with the feature is hardly
    faster than what was found, or nothing was found.
    """
    question = found.question
    if found.found is None:
        return {}
    able_of = with_features(question.capabilities)
    better = replace(
        settings,
        top=1,
        band_ratio=0.0,
        below_s=float(found.found.step_s[0]) * (1.0 - WORTH_NAMING_RATIO),
        watch=unwatched,
    )
    known = Known(question=question, ways=found.ways)
    start_s = settings.clock()
    # All features together take no longer than the search itself may; half of that is theirs in
    # equal shares, and whoever comes next has what others left of the rest.
    share_s = settings.time_limit_s / 2.0 / max(1, len(able_of))

    def step_s(able: Capabilities, *, later: int) -> float | None:
        left_s = settings.time_limit_s - (settings.clock() - start_s)
        if left_s <= 0.0:
            return NOT_ASKED
        left_s -= share_s * later
        more = replace(question, capabilities=able)
        left_out = known if only_adds(more, question) else None
        again = search(more, replace(better, known=left_out, time_limit_s=max(share_s, left_s)))
        if again.found is None:
            return None
        refused = refused_choices(again, question)
        # What the target allows and this search alone found has nothing to do with the feature.
        if left_out is not None and not refused:
            return None
        return Worded(float(again.found.step_s[0]), ", ".join(refused))

    return {
        feature: partial(step_s, able, later=len(able_of) - 1 - index)
        for index, (feature, able) in enumerate(able_of.items())
    }


def unlaunchable(found: Search, step_s_of: Mapping[str, float | None]) -> tuple[Unlaunchable, ...]:
    """Say what the targets lack that would gain, most first.

    Args:
        found: what can be launched.
        step_s_of: what each of `feature_tasks` came to.
    """
    if found.found is None:
        return ()
    best_s = float(found.found.step_s[0])
    names = ", ".join(name for name in found.question.capabilities.names if name not in WRAPPERS)
    missing = []
    for feature, step_s in (*step_s_of.items(), *exchange_gains(found)):
        gain = 0.0 if step_s is None else 1.0 - step_s / best_s
        if gain > WORTH_NAMING_RATIO:
            condition = _condition(feature, step_s, found.question.capabilities)
            missing.append(
                Unlaunchable(target=names, feature=feature, gain_ratio=gain, condition=condition)
            )
    return tuple(sorted(missing, key=lambda one: -one.gain_ratio))


def _condition(feature: str, step_s: float | None, able: Capabilities) -> str:
    """Under which condition a target refuses a feature; empty where it has it in no form."""
    if feature not in _HAS or not _HAS[feature](able):
        return ""
    words = step_s.words if isinstance(step_s, Worded) else ""
    return words or "stages without layers"


def with_features(capabilities: Capabilities) -> dict[str, Capabilities]:
    """The manifest with one feature more, for each that it lacks."""
    found = {}
    for feature, names in FEATURES.items():
        more: dict[str, Any] = {name: getattr(EVERYTHING, name) for name in names}
        if feature in ONE_OF_SCHEDULES:
            more["schedules"] = capabilities.schedules | {ONE_OF_SCHEDULES[feature]}
        if any(getattr(capabilities, name) != value for name, value in more.items()):
            found[feature] = replace(capabilities, parts=(), **more)
    return found
