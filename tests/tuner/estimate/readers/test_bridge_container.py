"""What a dry run of a recipe of Megatron-Bridge writes."""

import pytest

from tests.rows import each_row
from tuner.engines.megatron_bridge.read import holds_container, read_container
from tuner.engines.reading.launch import TokenDispatcher
from tuner.errors import SpecError

RESOLVED = """
_target_: megatron.bridge.training.config.ConfigContainer
comm_overlap: null
dataset: {_target_: megatron.bridge.training.config.GPTDatasetConfig, sequence_length: 4096}
ddp:
  _target_: megatron.bridge.training.config.DistributedDataParallelConfig
  bucket_size: 40000000
  grad_reduce_in_fp32: false
  overlap_grad_reduce: true
  overlap_param_gather: true
  use_custom_fsdp: false
  use_distributed_optimizer: true
mixed_precision: {bf16: true, fp16: false, fp8: null, fp8_recipe: tensorwise}
model:
  _target_: megatron.bridge.models.qwen.qwen_provider.Qwen3MoEModelProvider
  attention_backend:
    _args_: [3]
    _call_: true
    _target_: megatron.core.transformer.enums.AttnBackend
  attention_dropout: 0.0
  cross_entropy_fusion_impl: te
  cross_entropy_loss_fusion: true
  cuda_graph_scope: full
  expert_model_parallel_size: 16
  generation_config: {_target_: transformers.GenerationConfig, config_dict: {max_length: 20}}
  hidden_dropout: 0.0
  moe_enable_deepep: false
  moe_flex_dispatcher_backend: hybridep
  moe_grouped_gemm: true
  moe_token_dispatcher_type: flex
  pipeline_model_parallel_layout: null
  pipeline_model_parallel_size: 1
  recompute_granularity: null
  recompute_modules: [core_attn]
  seq_length: 40960
  tensor_model_parallel_size: 1
optimizer:
  bf16: true
  exp_avg_dtype: {_call_: false, _target_: torch.bfloat16}
  exp_avg_sq_dtype: {_call_: false, _target_: torch.bfloat16}
  optimizer: adam
  overlap_param_gather: false
  use_precision_aware_optimizer: true
checkpoint: {save: null, save_interval: 500}
peft: null
train: {global_batch_size: 1024, micro_batch_size: 1, manual_gc: true}
"""


def test_a_resolved_configuration_says_every_setting_of_a_recipe() -> None:
    assert holds_container(RESOLVED)
    assert not holds_container("model: {tensor_model_parallel_size: 2}\n")
    launch = read_container(RESOLVED, source="c.yaml")
    assert (launch.sequence, launch.micro_batch, launch.global_batch) == (4096, 1, 1024)
    assert (launch.expert, launch.tensor, launch.pipeline) == (16, 1, 1)
    assert launch.dispatcher is TokenDispatcher.HYBRIDEP
    assert (launch.precision, launch.fp8_recipe, launch.recompute) == ("bf16", "", "none")
    assert (launch.gradient_bytes, launch.moments_bytes) == (2, 4)
    assert (launch.overlap_param_gather, launch.saves_nowhere) == (True, True)
    assert (launch.flash_attention, launch.sequential_experts) == (False, False)
    assert launch.deprecated == ()


def test_precisions_have_names_and_stages_lists() -> None:
    named = RESOLVED.replace("{bf16: true, fp16: false, fp8: null, fp8_recipe: tensorwise}", "{}")
    text = named.replace("mixed_precision: {}", "mixed_precision: bf16_with_mxfp8_mixed")
    assert read_container(text, source="c.yaml").fp8_recipe == "mxfp8"
    stages = "[[embedding, decoder, decoder], [decoder, mtp, loss]]"
    text = RESOLVED.replace("parallel_layout: null", f"parallel_layout: {stages}")
    layout = read_container(text, source="c.yaml").layout
    assert [(stage.layers, stage.mtp_layers) for stage in layout] == [(2, 0), (1, 1)]


@each_row(
    ("before", "after", "named"),
    (
        ("peft: null", "peft: {dim: 8}", "peft: adapters of Megatron-Bridge are not read"),
        ("layout: null", "layout: {_target_: x}", "is no part of a layout"),
        ("layout: null", "layout: [[head]]", "is no part of a layout"),
    ),
)
def test_what_a_resolved_configuration_cannot_be_read_for_is_refused(
    before: str, after: str, named: str
) -> None:
    with pytest.raises(SpecError, match=named):
        read_container(RESOLVED.replace(before, after), source="c.yaml")
