"""The exact sizes that planning a spec needs prices of, so that a profile can measure them.

With them nothing is interpolated; the generic grid of the profilers then serves every other model.
Sizes that many candidates share come first.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from profilers.records import Case
from tuner.costs.reference.operations import (
    boundary_ops,
    embedding_ops,
    head_ops,
    layer_ops,
)
from tuner.costs.reference.update import embedding_units, head_units, layer_units, update_ops
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.prices.ops import Op
from tuner.search.reference.decisions import options
from tuner.search.reference.engine_workload import workload_of
from tuner.search.reference.space import enumerate_degrees
from tuner.spec.spec import Spec


def cases_for(spec: Spec) -> tuple[Case, ...]:
    """List every case that prices some legal candidate of the spec, most used first."""
    work = workload_of(spec)
    capabilities = spec.programs.launchable(
        model=spec.model,
        precision=spec.goal.precision,
        adapters=spec.goal.adapters,
    )
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
        ops = step_ops(work, degrees, layers=_distinct_layers(work), chunk_counts=chunk_counts)
        for case in map(Op.case, ops):
            by_id.setdefault(case.id, case)
            num_uses[case.id] += 1
    ranked = sorted(by_id, key=lambda name: (-num_uses[name], name))
    return tuple(by_id[name] for name in ranked)


def step_ops(
    work: Workload, degrees: StepDegrees, *, layers: Iterable[int], chunk_counts: Iterable[int]
) -> Iterator[Op]:
    """Yield the operations of a step that has these layers, experts in these numbers of chunks."""
    yield from embedding_ops(work, degrees)
    yield from head_ops(work, degrees)
    yield from boundary_ops(work, degrees)
    units = [*embedding_units(work, degrees), *head_units(work, degrees)]
    for layer in layers:
        for chunks in chunk_counts:
            yield from chain(*layer_ops(work, degrees, layer=layer, chunks=chunks))
        units += layer_units(work, degrees, layer=layer)
    yield from chain(*update_ops(tuple(units), work, degrees))


def _distinct_layers(work: Workload) -> list[int]:
    """The first layer of each kind and load, and of those before and after the first adapter."""
    first: dict[object, int] = {}
    for layer, index in enumerate(work.moe_index):
        load = None if index is None else work.copies_LE[index]
        first.setdefault((load, work.trainings[layer].has_input_gradient), layer)
    return list(first.values())
