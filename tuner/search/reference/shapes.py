"""The exact sizes that planning a spec needs prices of, so that a profile can measure them.

With them nothing is interpolated; the generic grid of the profilers then serves every other model.
Sizes that many candidates share come first.
"""

from collections import Counter
from collections.abc import Iterator

from profilers.records import Case
from tuner.costs.reference.operations import (
    Call,
    boundary_calls,
    cases,
    embedding_calls,
    head_calls,
    layer_calls,
)
from tuner.costs.reference.update import embedding_units, head_units, layer_units, update_cases
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.engines.capabilities import launchable
from tuner.search.reference.options import options
from tuner.search.reference.plan_profiled import workload_of
from tuner.search.reference.space import enumerate_degrees
from tuner.spec.spec import Spec


def cases_for(spec: Spec) -> tuple[Case, ...]:
    """List every case that prices some legal candidate of the spec, most used first."""
    work = workload_of(spec)
    capabilities = launchable(spec.emit, precision=spec.goal.precision)
    stage_options = options(
        has_experts=work.model.moe is not None, capabilities=capabilities, search=spec.search
    )
    chunk_counts = sorted({option.chunks for option in stage_options} | {1})
    legal = enumerate_degrees(
        work,
        num_devices=spec.num_devices,
        capabilities=capabilities,
        search=spec.search,
        ranks_per_node=spec.cluster.pools[0].devices_per_node,
    ).legal
    num_uses: Counter[str] = Counter()
    by_id: dict[str, Case] = {}
    for degrees in legal:
        for case in _cases(work, degrees, chunk_counts):
            by_id.setdefault(case.id, case)
            num_uses[case.id] += 1
    ranked = sorted(by_id, key=lambda name: (-num_uses[name], name))
    return tuple(by_id[name] for name in ranked)


def _cases(work: Workload, degrees: StepDegrees, chunk_counts: list[int]) -> Iterator[Case]:
    yield from cases(_calls(work, degrees, chunk_counts))
    units = [*embedding_units(work, degrees), *head_units(work, degrees)]
    for layer in _distinct_layers(work):
        units += layer_units(work, degrees, layer=layer)
    yield from update_cases(tuple(units), work, degrees)


def _calls(work: Workload, degrees: StepDegrees, chunk_counts: list[int]) -> Iterator[Call]:
    yield from embedding_calls(work, degrees)
    yield from head_calls(work, degrees)
    yield from boundary_calls(work, degrees)
    for layer in _distinct_layers(work):
        for chunks in chunk_counts:
            outside, inside = layer_calls(work, degrees, layer=layer, chunks=chunks)
            yield from outside
            yield from inside


def _distinct_layers(work: Workload) -> list[int]:
    """The first layer of each kind and load."""
    first: dict[object, int] = {}
    for layer, index in enumerate(work.moe_index):
        first.setdefault(None if index is None else work.copies_LE[index], layer)
    return list(first.values())
