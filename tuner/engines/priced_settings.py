"""Engine settings that a predicted step time or memory depends on, beside those a plan decides.

    priced     what the prediction assumes
    default    what the engine does when its launch file says nothing

Where the two differ the emitters write the setting, unless it changes what is computed: such a
setting is the user's, and tuner/engines/assumptions.py names it instead. `estimate` names the rows
that a launch leaves at another value than the priced one.

The constants of the model were fitted on published runs of Megatron-Bridge, whose recipes fuse the
permutation of tokens and the cross entropy, collect garbage on every rank at once and, with
overlapped expert communication, delay weight gradients (scripts/performance/utils/overrides.py and
src/megatron/bridge/recipes of the tags v0.3.0 to v0.5.0).

Defaults were read from the argument parsers and dataclasses of core_v0.16.1 to core_v0.19.0 of
github.com/NVIDIA/Megatron-LM, and from the packages torchtitan 0.3.0 and deepspeed 0.19.8. A test
reads them again where the packages are installed.

Not covered: what decides neither time nor memory (initialisation, logging, data loading), the
network's environment variables, kernels that one engine selects by itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from tuner.config.train import TrainDecision
from tuner.engines.megatron_lm.capabilities import delays_weight_gradients
from tuner.spec.model import ModelSpec

Value = bool | int | float | str | None
Rule = Callable[[ModelSpec, TrainDecision], bool]


def _always(model: ModelSpec, decision: TrainDecision) -> bool:
    return True


def _has_experts(model: ModelSpec, decision: TrainDecision) -> bool:
    return model.num_moe_layers > 0


def _has_pipeline(model: ModelSpec, decision: TrainDecision) -> bool:
    return decision.virtual_pipeline_model_parallel_size > 1


def _cuts_sequences(model: ModelSpec, decision: TrainDecision) -> bool:
    return decision.context_parallel_size > 1


def _in_fp8(model: ModelSpec, decision: TrainDecision) -> bool:
    return bool(decision.fp8_recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedSetting:
    """One setting of one engine."""

    quantity: str
    """Assumption of the prediction, in words."""
    name: str
    """The engine's own: a field of its configuration; Megatron-LM's flag has `-` for `_`."""
    priced: Value
    default: Value
    read_from: str
    """Source of the default: a class of the engine's package, or its parser's file."""
    applies: Rule = _always
    changes: Literal["", "memory", "time"] = ""
    """Part of the prediction that does not hold at another value; empty: nothing beyond the
    bands."""

    @property
    def is_written(self) -> bool:
        """The emitted files must state it, since it differs from the default."""
        return self.priced != self.default


CORE: Final = "TransformerConfig"
PARSER: Final = "megatron/training/arguments.py"
TRAINING: Final = "megatron/training/config/training_config.py"
OPTIMIZER: Final = "OptimizerConfig"
DDP: Final = "DistributedDataParallelConfig"

GC_INTERVAL: Final = 100
"""Steps between two collections of garbage in the recipes of Megatron-Bridge."""

MEGATRON: Final = (
    PricedSetting(
        quantity="tokens are permuted by one fused kernel",
        name="moe_permute_fusion",
        priced=True,
        default=False,
        read_from=CORE,
        applies=_has_experts,
    ),
    PricedSetting(
        quantity="the cross entropy is one fused kernel",
        name="cross_entropy_loss_fusion",
        priced=True,
        default=False,
        read_from=CORE,
    ),
    PricedSetting(
        quantity="the cross entropy writes gradients over the logits, as Transformer Engine's does",
        name="cross_entropy_fusion_impl",
        priced="te",
        default="native",
        read_from=CORE,
    ),
    PricedSetting(
        quantity="weight gradients are delayed to cover the all-to-all of the backward pass",
        name="delay_wgrad_compute",
        priced=True,
        default=False,
        read_from=CORE,
        applies=delays_weight_gradients,
    ),
    PricedSetting(
        quantity="all ranks collect Python's garbage in the same step",
        name="manual_gc",
        priced=True,
        default=False,
        read_from=TRAINING,
    ),
    PricedSetting(
        quantity="steps between two such collections",
        name="manual_gc_interval",
        priced=GC_INTERVAL,
        default=0,
        read_from=TRAINING,
    ),
    PricedSetting(
        quantity="no token is dropped and none padded",
        name="moe_expert_capacity_factor",
        priced=None,
        default=None,
        read_from=CORE,
        applies=_has_experts,
    ),
    PricedSetting(
        quantity="shared experts run after the routed ones, not beside their all-to-all",
        name="moe_shared_expert_overlap",
        priced=False,
        default=False,
        read_from=CORE,
        applies=_has_experts,
    ),
    PricedSetting(
        quantity="the router computes in the type of the activations",
        name="moe_router_dtype",
        priced=None,
        default=None,
        read_from=CORE,
        applies=_has_experts,
    ),
    PricedSetting(
        quantity="attention is one fused kernel, which the engine chooses",
        name="attention_backend",
        priced="auto",
        default="auto",
        read_from=CORE,
    ),
    PricedSetting(
        quantity="collectives of tensor parallelism are not overlapped",
        name="tp_comm_overlap",
        priced=False,
        default=False,
        read_from=CORE,
    ),
    PricedSetting(
        quantity="context parallelism passes keys and values around a ring",
        name="cp_comm_type",
        priced="p2p",
        default="p2p",
        read_from=PARSER,
        applies=_cuts_sequences,
        changes="time",
    ),
    PricedSetting(
        quantity="stages of an interleaved pipeline send beside their work",
        name="overlap_p2p_comm",
        priced=True,
        default=True,
        read_from=PARSER,
        applies=_has_pipeline,
    ),
    PricedSetting(
        quantity="weight gradients are added by the kernel that computes them",
        name="gradient_accumulation_fusion",
        priced=True,
        default=True,
        read_from=PARSER,
    ),
    PricedSetting(
        quantity="rotary positions are one fused kernel",
        name="apply_rope_fusion",
        priced=True,
        default=True,
        read_from=PARSER,
    ),
    PricedSetting(
        quantity="the gated activation is one fused kernel",
        name="bias_swiglu_fusion",
        priced=True,
        default=True,
        read_from=PARSER,
    ),
    PricedSetting(
        quantity="the vocabulary is padded to a multiple of",
        name="make_vocab_size_divisible_by",
        priced=128,
        default=128,
        read_from=PARSER,
    ),
    PricedSetting(
        quantity="fp8 GEMMs keep bf16 parameters beside them",
        name="fp8_param",
        priced=False,
        default=False,
        read_from=CORE,
        applies=_in_fp8,
    ),
    PricedSetting(
        quantity="every layer runs in fp8, the first and last included",
        name="first_last_layers_bf16",
        priced=False,
        default=False,
        read_from=CORE,
        applies=_in_fp8,
    ),
    PricedSetting(
        quantity="type of the first moment",
        name="exp_avg_dtype",
        priced="float32",
        default="float32",
        read_from=OPTIMIZER,
    ),
    PricedSetting(
        quantity="type of the second moment",
        name="exp_avg_sq_dtype",
        priced="float32",
        default="float32",
        read_from=OPTIMIZER,
    ),
    PricedSetting(
        quantity="type of the master weights",
        name="main_params_dtype",
        priced="float32",
        default="float32",
        read_from=OPTIMIZER,
    ),
    PricedSetting(
        quantity="parameters of one bucket of gradients: the engine's choice",
        name="bucket_size",
        priced=None,
        default=None,
        read_from=DDP,
    ),
)
"""Settings of Megatron-LM. The emitted `--ddp-bucket-size` is part of a decision, not of this
table."""

TORCHTITAN: Final = (
    PricedSetting(
        quantity="gradients are reduced in fp32",
        name="mixed_precision_reduce",
        priced="float32",
        default="float32",
        read_from="TrainingConfig",
    ),
    PricedSetting(
        quantity="parameters and optimizer state stay on the device",
        name="enable_cpu_offload",
        priced=False,
        default=False,
        read_from="TrainingConfig",
    ),
    PricedSetting(
        quantity="collectives of tensor parallelism are not fused into the GEMMs",
        name="enable_async_tensor_parallel",
        priced=False,
        default=False,
        read_from="CompileConfig",
    ),
    PricedSetting(
        quantity="experts are balanced by a bias that follows their load, in steps of",
        name="load_balance_coeff",
        priced=1e-3,
        default=1e-3,
        read_from="MoE.Config",
        applies=_has_experts,
    ),
)

DEEPSPEED: Final = (
    PricedSetting(
        quantity="gradients are copied into one buffer",
        name="contiguous_gradients",
        priced=True,
        default=True,
        read_from="DeepSpeedZeroConfig",
    ),
    PricedSetting(
        quantity="elements of one bucket of gradients",
        name="reduce_bucket_size",
        priced=500_000_000,
        default=500_000_000,
        read_from="DeepSpeedZeroConfig",
    ),
    PricedSetting(
        quantity="elements of one gather of parameters",
        name="allgather_bucket_size",
        priced=500_000_000,
        default=500_000_000,
        read_from="DeepSpeedZeroConfig",
    ),
)

_SECTION: Final = {TRAINING: "train", OPTIMIZER: "optimizer", DDP: "ddp"}

FROM_RECIPE: Final = (
    "moe_permute_fusion",
    "cross_entropy_loss_fusion",
    "moe_shared_expert_overlap",
    "tp_comm_overlap",
    "manual_gc",
    "manual_gc_interval",
)
"""Rows that Megatron-Bridge's recipes set to values of their own, so that overrides always say
them; none changes what is computed."""


def written(model: ModelSpec, decision: TrainDecision) -> dict[str, Value]:
    """Return the fields that Megatron-LM's arguments must state, by name."""
    return {
        row.name: row.priced for row in MEGATRON if row.is_written and row.applies(model, decision)
    }


def overridden(model: ModelSpec, decision: TrainDecision) -> Iterator[tuple[str, Value]]:
    """Yield what Megatron-Bridge's overrides must state, by path."""
    for row in MEGATRON:
        if row.name in FROM_RECIPE and row.applies(model, decision):
            yield f"{_SECTION.get(row.read_from, 'model')}.{row.name}", row.priced
    # Stated also where it is off: a recipe that delays them is refused without the overlap.
    yield "model.delay_wgrad_compute", delays_weight_gradients(model, decision)
