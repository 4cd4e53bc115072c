"""Rows that the model cannot tell from the chosen decision.

tuner/search/ratios.py decides what a tie is, by the fields of two decisions; here the same fields
are compared for all rows at once.

Letters: C candidates.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.config.train import TrainDecision
from tuner.costs.train.calibration import StepBand
from tuner.plans.train import Band
from tuner.search.ratios import KERNEL_FIELDS, Ratios, ratios_for
from tuner.search.train.build_problem import PricedPool
from tuner.search.train.layouts import layers_of_stages
from tuner.search.train.options import RecomputeChoice
from tuner.search.train.regimes import priced_release, step_band
from tuner.search.train.search_result import SearchOutcome, Solutions, Ties
from tuner.spec.spec import Spec

Mask = npt.NDArray[np.bool_]

DEGREE_OF: Final[Mapping[str, str]] = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context",
    "data_parallel_size": "data",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
    "micro_batch_size": "micro_batch",
}
"""Column of the degree by field of a decision."""

UNIFORM_FIELDS: Final = ("fp8_recipe", "gradient_bytes")
"""Fields that are equal in all decisions of one problem."""


def pool_band(spec: Spec, priced_pool: PricedPool) -> StepBand:
    """Return the band of a step on a pool."""
    release = priced_release(spec.programs, spec.goal.engine, priced_pool.residuals)
    return step_band(
        spec.programs.first,
        priced_pool.sheet,
        priced_pool.residuals,
        precision=spec.goal.precision.value,
        has_experts=spec.model.moe is not None,
        release=release.stated,
    )


def pool_ratios(spec: Spec, priced_pool: PricedPool, *, band: Band) -> Ratios:
    """Return the bands of ratios on a pool; `band` is that of a single time."""
    return ratios_for(
        priced_pool.residuals,
        generation=str(priced_pool.sheet.generation),
        has_experts=spec.model.moe is not None,
        band=band,
    )


def count_ties(
    search: SearchOutcome, ratios: Ratios, *, chosen: TrainDecision, step_s: float
) -> Ties:
    """Count the rows that tie with a chosen decision of so many seconds."""
    return Ties(
        count=int(tied_rows(search, ratios, chosen=chosen, step_s=step_s).sum()),
        is_least=bool(step_s * ratios.farthest > search.proof.complete_s),
    )


def tied_rows(
    search: SearchOutcome, ratios: Ratios, *, chosen: TrainDecision, step_s: float
) -> Mask:
    """Return for every row whether it ties with a chosen decision of other degrees."""
    if search.solutions is None:
        return np.zeros(0, dtype=bool)
    solutions, ratio_C = search.solutions, search.solutions.step_s / step_s
    same_C = _has_same_kernels(search, solutions, chosen)
    low_C, high_C = (
        np.where(same_C, ratios.same_kernels[edge], ratios.other_kernels[edge]) * ratio_C
        for edge in (0, 1)
    )
    rows = solutions.candidates.rows
    own_C = _all([rows[degree] == getattr(chosen, name) for name, degree in DEGREE_OF.items()])
    return ~own_C & (low_C <= 1.0) & (high_C >= 1.0)


def _has_same_kernels(search: SearchOutcome, solutions: Solutions, chosen: TrainDecision) -> Mask:
    """`ratios.has_same_kernels` of every row with a decision."""
    special = _special(search, solutions, chosen)
    fields = [name for name in KERNEL_FIELDS if name not in UNIFORM_FIELDS]
    return _all([_equal(search, solutions, chosen, name, special) for name in (*fields, "chunks")])


def _equal(
    search: SearchOutcome,
    solutions: Solutions,
    chosen: TrainDecision,
    name: str,
    special: Mapping[str, Mask],
) -> Mask:
    """Return whether every row has the decision's value of a field."""
    if name in special:
        return special[name]
    value = getattr(chosen, name)
    if name in DEGREE_OF:
        equal_C: Mask = solutions.candidates.rows[DEGREE_OF[name]] == value
        return equal_C
    return _is_chosen(solutions, name, [choice == value for choice in search.options.choices[name]])


def _special(search: SearchOutcome, solutions: Solutions, chosen: TrainDecision) -> dict[str, Mask]:
    """Fields of a decision that are no column, as `search_result.decision_fields` computes them."""
    rows = solutions.candidates.rows
    recompute: list[RecomputeChoice] = list(search.options.choices["recompute"])  # type: ignore[arg-type] # this axis only
    share_C = np.array([choice.share for choice in recompute])[
        solutions.candidates.options["recompute"]
    ]
    is_part_C = (share_C > 0.0) & (share_C < 1.0)
    layers_C = np.where(is_part_C, np.ceil(share_C * _layer_capacity(solutions)), 0.0)
    is_domain = [choice == "domain" for choice in search.options.choices["sharding"]]
    copies_C = np.where(_is_chosen(solutions, "sharding", is_domain), rows.get("copies", 1), 1)
    ranks_C = np.where(copies_C > 1, rows["data"] * rows["context"] // copies_C, 0)
    has_sequence = search.problem.capabilities.sequence_parallel
    chunks = [{choice} == set(chosen.chunks) for choice in search.options.choices["chunks"]]
    modules = set(chosen.recompute_modules)
    return {
        "sequence_parallel": ((rows["tensor"] > 1) & has_sequence) == chosen.sequence_parallel,
        "recompute": _is_chosen(
            solutions, "recompute", [choice.level == chosen.recompute for choice in recompute]
        ),
        "recompute_modules": _is_chosen(
            solutions, "recompute", [choice.modules == modules for choice in recompute]
        ),
        "recompute_num_layers": layers_C == (chosen.recompute_num_layers or 0),
        "shard_ranks": ranks_C == (chosen.shard_ranks or 0),
        "chunks": _is_chosen(solutions, "chunks", chunks),
    }


def _is_chosen(solutions: Solutions, axis: str, is_wanted: list[bool]) -> Mask:
    """Return whether every row's choice on an axis is among the wanted ones."""
    wanted_C: Mask = np.array(is_wanted, dtype=np.bool_)[solutions.candidates.options[axis]]
    return wanted_C


def _layer_capacity(solutions: Solutions) -> npt.NDArray[np.int64]:
    """Layers of every row's longest stage."""
    most_C = np.zeros(len(solutions), dtype=np.int64)
    first, shape_C = solutions.candidates.same(("pipeline", "virtual_pipeline"))
    for shape, index in enumerate(first):
        pipeline, virtual = (
            int(solutions.candidates.rows[name][index]) for name in ("pipeline", "virtual_pipeline")
        )
        like = np.flatnonzero(shape_C == shape)
        layers_SC = layers_of_stages(solutions.layers_PC[:pipeline, like], virtual=virtual)
        most_C[like] = layers_SC.max(axis=0)
    return most_C


def _all(masks: list[Mask]) -> Mask:
    every_C: Mask = np.logical_and.reduce(masks)
    return every_C
