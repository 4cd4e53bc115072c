"""Assumptions of a prediction that an emitted file leaves to the user, a line each.

Settings that change what is computed (an auxiliary loss, the type of gradient reduction) are never
written for a user who did not state them, nor is what lives in the user's own program. Each line
names the assumption, the engine's default where it violates it, and what to state. The lines are in
the plan's notes and on top of the emitted files.

Sources: tuner/engines/priced_settings.py; `torch.chunk` gives at most so many pieces, fewer for
short inputs, and megatron/core/transformer/transformer_layer.py of core_v0.18.0 splits the tokens
of a rank with it, so ranks with fewer tokens than others run fewer rounds of expert collectives.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from tuner.config.train import TrainDecision
from tuner.engines.megatron_lm.capabilities import refuses_delayed_gradients
from tuner.spec.goal import TrainGoal
from tuner.spec.linear_attention import LinearName
from tuner.spec.model import ModelSpec

MIN_MEMORY_LOSS: Final = (
    "assumed: memory for a loss that is compiled, fused or cut into chunks (4 bytes a logit); "
    "PyTorch's plain cross entropy in fp32 holds 14"
)
"""tuner/costs/train/memory_constants.py"""
STATE_IT: Final = "state goal.moe_aux_loss_coeff to have it written (it changes the loss)"


def assumptions(
    target: str, model: ModelSpec, goal: TrainGoal, decision: TrainDecision
) -> tuple[str, ...]:
    """Return what the launch files of a target leave to the user."""
    lines = _OF_TARGET.get(target)
    return () if lines is None else tuple(lines(model, goal, decision))


def plan_assumptions(
    targets: Sequence[str], model: ModelSpec, goal: TrainGoal, decision: TrainDecision
) -> tuple[str, ...]:
    """Return the same for all targets of a plan, each line once, with its targets."""
    named: dict[str, list[str]] = {}
    for target in targets:
        for line in assumptions(target, model, goal, decision):
            named.setdefault(line, []).append(target)
    return tuple(f"{', '.join(who)}: {line}" for line, who in named.items())


def _is_balanced_by_assumption(model: ModelSpec, goal: TrainGoal) -> bool:
    return model.num_moe_layers > 0 and goal.routing is None


def _megatron(model: ModelSpec, goal: TrainGoal, decision: TrainDecision) -> Iterator[str]:
    yield from _megatron_balance(model, goal, default="is 0.0 unless given")
    yield from _megatron_core(model, decision)


def _bridge(model: ModelSpec, goal: TrainGoal, decision: TrainDecision) -> Iterator[str]:
    yield from _megatron_balance(model, goal, default="is the recipe's")
    yield "assumed: fp32 moments; recipes that keep bf16 ones (DeepSeek-V3) use less memory"
    yield from _megatron_core(model, decision)


def _megatron_balance(model: ModelSpec, goal: TrainGoal, *, default: str) -> Iterator[str]:
    if not _is_balanced_by_assumption(model, goal):
        return
    assert model.moe is not None
    if goal.moe_aux_loss_coeff:
        yield (
            "assumed: balanced routing, which the auxiliary loss with coefficient "
            f"{goal.moe_aux_loss_coeff:g} is to bring about"
        )
    elif model.moe.score_correction_bias:
        yield "assumed: balanced routing, which the experts' bias is to bring about"
    else:
        yield (
            "assumed: balanced routing, though no auxiliary loss is written here "
            f"(moe_aux_loss_coeff {default}); {STATE_IT}"
        )


def _megatron_core(model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    if may_deadlock(decision):
        yield DEADLOCK
    if refuses_delayed_gradients(model, decision):
        yield (
            "assumed: delayed weight gradients, which the engine refuses beside CUDA graphs of "
            "attention with biases: expect less overlap"
        )


def may_deadlock(decision: TrainDecision) -> bool:
    """Return whether ranks of one expert group can run unequal numbers of collectives."""
    return max(decision.chunks) > 1 and decision.expert_model_parallel_size > 1


DEADLOCK: Final = (
    "WARNING: mlp_chunks_for_training cuts each rank's own tokens into at most so many chunks. "
    "Under expert parallelism, ranks of a group with unequal numbers of tokens may run unequal "
    "numbers of all-to-alls and hang: give every rank sequences of one length (pad them, and do "
    "not pack sequences of varying length)"
)


def _torchtitan(model: ModelSpec, goal: TrainGoal, decision: TrainDecision) -> Iterator[str]:
    yield "assumed: a step between compiled and eager ones; compilation is left to you"
    yield MIN_MEMORY_LOSS
    if _is_balanced_by_assumption(model, goal):
        yield (
            "assumed: balanced routing, which torchtitan's expert bias (load_balance_coeff 0.001 "
            "in the model's configuration) is to bring about"
        )
    if goal.moe_aux_loss_coeff:
        yield "goal.moe_aux_loss_coeff is not written: torchtitan has no auxiliary loss"


def _deepspeed(model: ModelSpec, goal: TrainGoal, decision: TrainDecision) -> Iterator[str]:
    yield "assumed: attention as one fused kernel, which your model chooses"
    yield MIN_MEMORY_LOSS
    shared = decision.data_parallel_size * decision.context_parallel_size
    if decision.gradient_bytes == 4 and shared > 1 and goal.precision.value != "fp32":
        yield (
            "assumed: gradients reduced in fp32; DeepSpeed reduces them in bf16, twice as fast, "
            "unless communication_data_type says fp32"
        )
    if _is_balanced_by_assumption(model, goal):
        stated = goal.moe_aux_loss_coeff
        coefficient = f" with coefficient {stated:g}" if stated else ""
        yield (
            "assumed: balanced routing, which your program's auxiliary loss"
            f"{coefficient} is to bring about"
        )


def _peft(model: ModelSpec, goal: TrainGoal, decision: TrainDecision) -> Iterator[str]:
    yield "assumed: Transformers' eager modules, attention by SDPA, experts by grouped GEMMs"
    if model.linear is not None:
        package = "mamba_ssm" if model.linear.kind is LinearName.MAMBA2 else "fla"
        yield f"assumed: linear attention by the kernels of causal_conv1d and {package}"
    if goal.adapters is None:
        yield "assumed: bf16 weights and moments, without fp32 copies"
    if _is_balanced_by_assumption(model, goal):
        yield "assumed: balanced routing, as the pretrained router has it"


_OF_TARGET: Final[Mapping[str, Callable[[ModelSpec, TrainGoal, TrainDecision], Iterator[str]]]] = {
    "megatron-lm": _megatron,
    "megatron-lm-0.16": _megatron,
    "ms-swift": _megatron,
    "megatron-bridge": _bridge,
    "megatron-bridge-26.02": _bridge,
    "megatron-bridge-26.04": _bridge,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
    "transformers-peft": _peft,
}
"""The reference step forces the routing that it is given, and wrappers start another program."""
