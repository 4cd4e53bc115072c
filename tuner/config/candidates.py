"""Training configurations as columns of the analytic formulas: the one translation there is.

A decision is one column (`strategies_of`); the search makes columns of many choices at a time out
of the same parts. Precision, routing and what only a launch states are set by the caller.
"""

from collections.abc import Iterable

from profilers.steps.config import Recompute
from tuner.catalog.rules.decision import selective_modules
from tuner.config.columns import Strategies
from tuner.config.knobs import COLUMN_OF_MODULE, FIELD_OF_DEGREE, knob_columns
from tuner.config.train import TrainDecision


def strategies_of(
    decision: TrainDecision, *, sequence_length: int, global_batch_size: int
) -> Strategies:
    """Return a decision as a column: bf16 and balanced experts."""
    shared = decision.data_parallel_size * decision.context_parallel_size
    copies = decision.num_state_copies
    return Strategies(
        sequence=float(sequence_length),
        num_microbatches=float(decision.num_microbatches(global_batch_size)),
        shard_ranks=0.0 if copies == 1 else shared / copies,
        chunks=float(max(decision.chunks)),
        **{column: float(getattr(decision, name)) for column, name in FIELD_OF_DEGREE.items()},
        **recompute_columns(_modules(decision), full_ratio=_full_ratio(decision)),
        **knob_columns(decision),
    )


def recompute_columns(modules: Iterable[str], *, full_ratio: float) -> dict[str, float]:
    """Return the columns of recomputation.

    Args:
        modules: of selective recomputation, by Megatron's names.
        full_ratio: share of every stage's layers that are recomputed as a whole.
    """
    chosen = frozenset(modules)
    return {"recompute_full": full_ratio} | {
        column: float(module in chosen) for module, column in COLUMN_OF_MODULE.items()
    }


def _modules(decision: TrainDecision) -> tuple[str, ...]:
    return selective_modules(decision) if decision.recompute is Recompute.SELECTIVE else ()


def _full_ratio(decision: TrainDecision) -> float:
    if decision.recompute is not Recompute.FULL:
        return 0.0
    layers = decision.recompute_num_layers
    return 1.0 if layers is None else min(1.0, layers / max(decision.pipeline_layout))
