"""Megatron-Bridge: megatron-core behind recipes, by the NeMo container that ships it.

Read from `ConfigContainer`, `CommOverlapConfig`, the mixed-precision recipes and the recipes of the
tags v0.3.0 (container 26.02, core 0.16), v0.4.0 (26.04, core 0.17) and v0.5.0 (26.06, core 0.18) of
github.com/NVIDIA-NeMo/Megatron-Bridge. Bridge has the rules of megatron-core; in addition:

- OLMoE's norm over all heads is a layer specification of its own recipe;
- sparse attention is a layer specification that no recipe has (its GLM-5 and DeepSeek-V3.2 are
  conversions of checkpoints), and overrides cannot name one;
- its recipes of DeepSeek-V4 need Megatron-LM's branch dev; that of the containers is not expected
  to run them (examples/models/deepseek_v4/README.md of v0.6.0);
- hybrids have no interleaved pipeline (`MambaModelProvider.provide`); patterns hold pipeline stages
  and MTP layers from 0.4 on (core 0.17);
- Megatron-FSDP excludes the rank order in which replicas are the most distant.

Checkpoints on hosts are not planned: only Megatron-LM's were read.

LoRA (`megatron.bridge.peft`) freezes all else; adapters have the type of the model's parameters.
Until 0.4 all experts of a rank share one adapter, which is no adapter of each and is not planned;
0.5 has one for each with `share_expert_adapters=False`. Its 4-bit weights are not those of nf4.
Checkpoints hold adapters alone (`apply_peft_adapter_filter_to_state_dict` of
training/checkpointing.py), and a restart loads `pretrained_checkpoint` first (training/setup.py).
An adapter's first matrix is a `ColumnParallelLinear` of the rank's width (peft/utils.py,
`ParallelLinearAdapter`), except beside layers whose input is split: `linear_proj`, `linear_fc2` and
`out_proj`.
Recipes of adapters (`*_peft_config`, in 0.3 `*_finetune_config`) exist for GLM-4.5, gpt-oss, Llama
3.1, Nemotron-3 and -H, OLMoE and Qwen3; that of Qwen3-Next raises NotImplementedError ("PEFT is not
currently supported"), and DeepSeek, Kimi-K2 and the plain model have none. Samples are packed,
which needs micro-batches of 1; under context parallelism they need `calculate_per_token_loss` and
no `average_in_collective` (`ConfigContainer.validate`).
Fields of overrides and of `LoRA`, and names of recipes were compared with the three tags
(tests/tuner/engines/bridge_fields.json). No emitted file was started: Bridge needs a CUDA device.
"""

from dataclasses import replace
from functools import partial
from typing import Final

from tuner.catalog.manifest import restricted
from tuner.catalog.target import LaunchFormat, Target
from tuner.engines.megatron_lm.capabilities import (
    MEGATRON_0_16,
    MEGATRON_0_18,
    WITH_0_17,
    saved_bytes,
)
from tuner.engines.megatron_lm.core import Core
from tuner.engines.megatron_lm.mixers import HYBRIDS
from tuner.spec.features import ModelFeature
from tuner.spec.model import ModelSpec
from tuner.spec.serving.lengths import LengthKind, LengthLaw
from tuner.spec.tune import (
    ADAPTER_TARGETS,
    EXPERTS,
    GATE_UP,
    JOINED_INPUTS,
    QKV,
    SPLIT_INPUTS,
    Adapters,
)

_UNSUPPORTED: Final = (MEGATRON_0_18.unsupported - {ModelFeature.QK_NORM_FULL}) | {
    ModelFeature.QK_NORM_UNWEIGHTED,
    ModelFeature.SPARSE_ATTENTION,
}
_NOT_INTERLEAVED: Final = restricted(*HYBRIDS, virtual_pipeline=False)

_FUSED: Final = frozenset({QKV, GATE_UP, JOINED_INPUTS, SPLIT_INPUTS})
_RANK_SPLITTING: Final = frozenset(ADAPTER_TARGETS) - {"o_proj", "out_proj", "down_proj"}

SQUAD: Final = LengthLaw(kind=LengthKind.LOGNORMAL, mean=180, cv=0.45)
"""Tokens of a sample of SQuAD 1.1, a paragraph with a question and its answer: our estimate, from
some 130 words. In rows of thousands of tokens attention is as good as nothing, whatever it is."""


def _tuning_documents(core: Core, model: ModelSpec, adapters: Adapters | None) -> LengthLaw | None:
    """Return the samples of a recipe of adapters, which are packed; other recipes pack nothing."""
    from tuner.engines.megatron_bridge.write import adapter_recipe

    return SQUAD if adapter_recipe(model, adapters, core=core) else None


_WITH_0_18: Final = replace(
    MEGATRON_0_18,
    in_process_restart_zero_stages=frozenset(),
    adapters=frozenset({"lora"}),
    fused_layers=_FUSED,
    adapter_dtypes=frozenset({"bf16"}),
    rank_splitting_targets=_RANK_SPLITTING,
    packing=frozenset({"first_fit_shuffle"}),
    packing_needs_single_rows=True,
)
_WITH_0_16: Final = replace(
    MEGATRON_0_16,
    in_process_restart_zero_stages=frozenset(),
    adapters=frozenset({"lora"}),
    adapter_targets=frozenset(ADAPTER_TARGETS) - {EXPERTS},
    fused_layers=_FUSED,
    adapter_dtypes=frozenset({"bf16"}),
    rank_splitting_targets=_RANK_SPLITTING,
    packing=frozenset({"first_fit_shuffle"}),
    packing_needs_single_rows=True,
)

BRIDGE_26_06: Final = replace(
    _WITH_0_18,
    names=("megatron-bridge",),
    release="0.5, container 26.06 and later",
    source="github.com/NVIDIA-NeMo/Megatron-Bridge v0.5.0",
    unsupported=_UNSUPPORTED,
    restrictions=MEGATRON_0_18.restrictions | _NOT_INTERLEAVED,
)

BRIDGE_26_04: Final = replace(
    _WITH_0_16,
    names=("megatron-bridge-26.04",),
    release="0.4, container 26.04",
    source="github.com/NVIDIA-NeMo/Megatron-Bridge v0.4.0",
    unsupported=_UNSUPPORTED,
    restrictions=WITH_0_17 | _NOT_INTERLEAVED,
)

BRIDGE_26_02: Final = replace(
    _WITH_0_16,
    names=("megatron-bridge-26.02",),
    release="0.3, container 26.02",
    source="github.com/NVIDIA-NeMo/Megatron-Bridge v0.3.0",
    unsupported=_UNSUPPORTED,
)

TARGETS: Final = (
    Target(
        capabilities=BRIDGE_26_06,
        family="nemo",
        software="megatron-2026",
        saved_bytes=saved_bytes,
        tuning_documents=partial(_tuning_documents, Core.V0_18),
    ),
    Target(
        capabilities=BRIDGE_26_04,
        family="nemo",
        software="megatron-2026",
        saved_bytes=saved_bytes,
        tuning_documents=partial(_tuning_documents, Core.V0_17),
        emitter="emit_26_04",
    ),
    Target(
        capabilities=BRIDGE_26_02,
        family="nemo",
        software="megatron-2025",
        saved_bytes=saved_bytes,
        tuning_documents=partial(_tuning_documents, Core.V0_16),
        emitter="emit_26_02",
    ),
)
FORMATS: Final = (
    LaunchFormat(name="megatron-bridge", reader="read_container", recognised_by="holds_container"),
    LaunchFormat(name="megatron-bridge"),
)
