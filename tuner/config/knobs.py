"""The knobs of a training configuration, one row each.

A row says what a knob is to every part that treats knobs alike: the columns of the analytic
formulas (tuner/config/candidates.py), its words (tuner/config/train_words.py), the axis of the
search with its limits, and which configurations run the same kernels. A plain knob is named nowhere
else but in the value (tuner/config/train.py), the columns, the spec's `search`, the engines and its
formula.

Degrees and what differs from stage to stage (layout, recomputation level, chunks) are no knobs.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tuner.catalog.manifest import DEFAULT_RANK_ORDER, PIPELINE_INSIDE_ORDER
from tuner.config.train import TrainDecision

Value = int | str | bool | tuple[str, ...] | None

SWITCH: Final = (False, True)

PRICED_DISPATCHERS: Final = ("alltoall", "deepep", "hybridep")
"""Token dispatchers that have a price."""

FIELD_OF_DEGREE: Final = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "data": "data_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "micro_batch": "micro_batch_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}
"""Field of `TrainDecision` by column of `Strategies`."""

COLUMN_OF_MODULE: Final = {
    "core_attn": "recompute_core_attention",
    "moe_act": "recompute_moe_act",
    "layernorm": "recompute_layernorm",
    "mla_up_proj": "recompute_mla_up_proj",
    "mlp": "recompute_mlp",
    "shared_experts": "recompute_shared_experts",
    "moe": "recompute_moe",
}
"""Column of selective recomputation by Megatron's name of the module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One row."""

    field: str
    """Name of the field of `TrainDecision`; where the knob is searched also of its axis."""
    words: str = ""
    """Words of the knob in a sentence, with `{}` for the value; empty: it is worded elsewhere."""
    usual: tuple[Value, ...] = (False,)
    """Values that no sentence names."""
    short: str = ""
    """Word of the knob in a cell, with `{}` for the value; empty: it is worded elsewhere."""
    is_offload: bool = False
    """It moves something to host memory."""
    overlap: str = ""
    """Abbreviation of what overlaps, e.g. `a2a`."""
    turn_on: str = ""
    """Words of switching it on in an existing launch; empty: that is not proposed."""
    turn_off: str = ""
    """Words of switching it off in an existing launch; empty: that is not proposed."""
    needs: tuple[str, ...] = ()
    """Switches that are turned on with it."""
    columns: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    """Columns of `Strategies` that it sets, each with the value for which the column is 1; `None`:
    the column is the value."""
    choices: tuple[int | str | bool, ...] = ()
    """Values that the search tries, in order; empty: the knob is not searched."""
    of_experts: bool = False
    """A model without experts has the first choice alone."""
    is_of_dispatch: bool = False
    """Part of the first level of the search, the dispatch settings."""
    never_worse: tuple[tuple[int | str | bool, int | str | bool], ...] = ()
    """A choice, and another that is never worse with all else equal."""
    is_feature: bool = False
    """A target may lack it as a whole, which relaxations name: its manifest states the conditions
    under the same name."""
    changes_kernels: bool = False
    """The layers run other kernels, or on other sizes."""
    changes_memory: bool = False
    """A device holds other bytes."""

    def columns_of(self, value: Value) -> dict[str, float]:
        """Return the columns of a value."""
        return {column: _number(value, unit) for column, unit in self.columns.items()}

    def words_of(self, value: Value) -> str:
        """Name a value; empty where it is usual."""
        return "" if value in self.usual else self.words.format(value)

    def short_of(self, value: Value) -> str:
        """Name a value in a cell; empty where it is usual."""
        return "" if value in self.usual else self.short.format(value)


KNOBS: Final = (
    Knob(
        field="zero_stage",
        columns={"zero_stage": None},
        choices=(0, 1, 2, 3),
        changes_kernels=True,
        changes_memory=True,
    ),
    Knob(
        field="sequence_parallel",
        words="sequence parallelism (SP)",
        columns={"sequence_parallel": None},
        changes_kernels=True,
    ),
    Knob(
        field="dispatcher",
        words="dispatcher {}",
        short="{}",
        usual=("alltoall",),
        columns={"is_deepep": "deepep", "is_hybridep": "hybridep"},
        choices=PRICED_DISPATCHERS,
        of_experts=True,
        is_of_dispatch=True,
        changes_kernels=True,
        changes_memory=True,
    ),
    Knob(field="shard_ranks", usual=(None,), short="shard{}", changes_kernels=True),
    Knob(
        field="a2a_overlap",
        words="overlapped all-to-all",
        overlap="a2a",
        turn_on="overlap the all-to-all",
        turn_off="do not overlap the all-to-all",
        columns={"a2a_overlap": None},
        choices=SWITCH,
        of_experts=True,
        is_of_dispatch=True,
        never_worse=((False, True),),
        is_feature=True,
        changes_kernels=True,
    ),
    Knob(
        field="overlap_grad_reduce",
        words="overlapped gradient reduction",
        overlap="grad",
        turn_on="overlap gradient reduction with the backward pass",
        columns={"overlap_gradients": None},
        choices=SWITCH,
        never_worse=((False, True),),
    ),
    Knob(
        field="ddp_bucket_size",
        words="gradient buckets of {} parameters",
        short="bucket{}",
        usual=(None,),
        columns={"bucket_parameters": None},
    ),
    Knob(
        field="overlap_param_gather",
        words="overlapped parameter all-gather",
        overlap="param",
        turn_on="overlap the parameter all-gather with the forward pass",
        needs=("overlap_grad_reduce",),
        columns={"overlap_parameters": None},
        choices=SWITCH,
        never_worse=((False, True),),
    ),
    Knob(
        field="gradient_bytes",
        words="bf16 gradients",
        short="bf16-grads",
        usual=(4,),
        columns={"gradient_bytes": None},
        changes_kernels=True,
    ),
    Knob(
        field="optimizer_offload",
        words="optimizer state in host memory",
        short="host-optimizer",
        is_offload=True,
        columns={"optimizer_offload": None},
        choices=SWITCH,
        changes_kernels=True,
        changes_memory=True,
    ),
    Knob(
        field="activation_offload",
        words="activations in host memory",
        short="host-activations",
        is_offload=True,
        columns={"activation_offload": None},
        choices=SWITCH,
        changes_kernels=True,
        changes_memory=True,
    ),
    Knob(
        field="schedule",
        words="a zero-bubble schedule",
        short="zero-bubble",
        usual=(None, "1f1b", "interleaved"),
        columns={"zero_bubble": "zero_bubble"},
        choices=("1f1b", "interleaved", "zero_bubble"),
    ),
    Knob(field="recompute_modules", changes_kernels=True),
    Knob(field="recompute_num_layers", changes_kernels=True),
    Knob(
        field="cuda_graph",
        words="CUDA graphs {}",
        short="graphs:{}",
        usual=("none",),
        columns={"partial_graph": "partial", "full_graph": "full_iteration"},
        choices=("none", "partial", "full_iteration"),
        is_of_dispatch=True,
        never_worse=(("none", "full_iteration"), ("partial", "full_iteration")),
        changes_kernels=True,
        changes_memory=True,
    ),
    Knob(field="fp8_recipe", words="precision {}", short="{}", usual=("",), changes_kernels=True),
    Knob(field="mtp_num_layers", short="mtp{}"),
    Knob(
        field="rank_order",
        words="rank order {}",
        short="{}",
        usual=(DEFAULT_RANK_ORDER,),
        choices=(DEFAULT_RANK_ORDER, PIPELINE_INSIDE_ORDER),
    ),
    Knob(
        field="ends_as_layers",
        words="embedding and loss counted as layers",
        short="ends-as-layers",
        columns={"embedding_loss_as_layers": None},
    ),
)
"""The knobs, in the order in which a sentence names them."""

OFFLOADS: Final = tuple(knob.field for knob in KNOBS if knob.is_offload)
"""Fields of knobs that move something to host memory; their columns have the same names."""


def knob_columns(decision: TrainDecision) -> dict[str, float]:
    """Return the columns of a decision's knobs."""
    return {
        column: number
        for knob in KNOBS
        for column, number in knob.columns_of(getattr(decision, knob.field)).items()
    }


def searched() -> Iterator[Knob]:
    """Yield the knobs that the search tries, the dispatch settings first."""
    for is_of_dispatch in (True, False):
        yield from (
            knob for knob in KNOBS if knob.choices and knob.is_of_dispatch is is_of_dispatch
        )


def kernel_fields() -> Iterator[str]:
    """Yield the knobs that are equal where the layers of two decisions run the same kernels."""
    yield from (knob.field for knob in KNOBS if knob.changes_kernels)


def _number(value: Value, unit: Value) -> float:
    if unit is not None:
        return float(value == unit)
    assert isinstance(value, int) or value is None
    return float(value or 0)


def overlaps_contend(decision: TrainDecision) -> bool:
    """Return whether TP or CP wants one launch queue while the expert all-to-all wants many."""
    is_cut = decision.tensor_model_parallel_size > 1 or decision.context_parallel_size > 1
    return decision.a2a_overlap and is_cut
