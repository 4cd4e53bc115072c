"""Decisions that differ in one field each, for walks through everything that reads or writes them.

Every field of a training decision has at least one `Pair`: two launches that differ in it and in
what must follow from it. A field without a pair fails `test_every_field_has_a_pair_of_decisions`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.tuner.engines.testing import sample_decision
from tests.tuner.models import example_model
from tuner.config.train import TrainDecision
from tuner.spec.model import ModelSpec

MOE, DENSE, LATENT = "qwen3-30b-a3b", "llama-3.1-8b", "deepseek-v2-lite"
HYBRID, DELTA = "nemotron-3-nano", "qwen3-next-80b-a3b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two decisions for one model."""

    field: str
    model: ModelSpec
    before: TrainDecision
    after: TrainDecision


Changes = Mapping[str, Any]

_PLAIN: Final[Changes] = {
    "recompute": "none",
    "recompute_modules": (),
    "stage_recompute": ("none", "none"),
    "chunks": (1, 1),
    "pipeline_layout": (24, 24),
    "schedule": "1f1b",
}
_ONE_STAGE: Final[Changes] = {
    "pipeline_model_parallel_size": 1,
    "stage_recompute": ("none",),
    "chunks": (1,),
    "pipeline_layout": (48,),
}
_FOUR: Final[Changes] = {
    "stage_recompute": ("none",) * 4,
    "chunks": (1,) * 4,
    "pipeline_layout": (12,) * 4,
}
_VIRTUAL: Final[Changes] = {
    **_FOUR,
    "virtual_pipeline_model_parallel_size": 2,
    "schedule": "interleaved",
}
_LETTERS: Final[Changes] = {"pipeline_layout": (26, 26)}
_LETTERS_VIRTUAL: Final[Changes] = {**_VIRTUAL, "pipeline_layout": (13, 14, 13, 12)}
_DENSE: Final[Changes] = {
    "expert_model_parallel_size": 1,
    "expert_data_parallel_size": 8,
    "pipeline_layout": (16, 16),
}
_DENSE_ONE_STAGE: Final[Changes] = {**_DENSE, **_ONE_STAGE, "pipeline_layout": (32,)}
_TWO_COPIES: Final[Changes] = {"expert_model_parallel_size": 4, "expert_data_parallel_size": 2}
_FULL: Final[Changes] = {"recompute": "full", "stage_recompute": ("full", "full")}
_SELECTIVE: Final[Changes] = {
    "recompute": "selective",
    "stage_recompute": ("selective", "selective"),
}
_OF_MOE: Final[Changes] = {**_SELECTIVE, "recompute_modules": ("moe",)}

FIELDS: Final[Mapping[str, tuple[tuple[str, Changes, Changes], ...]]] = {
    "tensor_model_parallel_size": (
        (
            MOE,
            {},
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "expert_data_parallel_size": 2,
            },
        ),
        (
            MOE,
            _ONE_STAGE,
            {**_ONE_STAGE, "tensor_model_parallel_size": 2, "expert_data_parallel_size": 2},
        ),
    ),
    "pipeline_model_parallel_size": (
        (MOE, {}, {**_FOUR, "pipeline_model_parallel_size": 4}),
        (
            HYBRID,
            _LETTERS,
            {**_FOUR, "pipeline_layout": (13,) * 4, "pipeline_model_parallel_size": 4},
        ),
        (DELTA, {}, {**_FOUR, "pipeline_model_parallel_size": 4}),
    ),
    "virtual_pipeline_model_parallel_size": (
        (MOE, {}, _VIRTUAL),
        (HYBRID, _LETTERS, _LETTERS_VIRTUAL),
    ),
    "context_parallel_size": (
        (MOE, {}, {"context_parallel_size": 2, "expert_data_parallel_size": 2}),
    ),
    "data_parallel_size": ((MOE, {}, {"data_parallel_size": 16, "expert_data_parallel_size": 2}),),
    "expert_model_parallel_size": (
        (MOE, {}, _TWO_COPIES),
        (MOE, _ONE_STAGE, {**_ONE_STAGE, **_TWO_COPIES}),
    ),
    "expert_tensor_parallel_size": (
        (
            MOE,
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "expert_data_parallel_size": 2,
            },
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "expert_tensor_parallel_size": 2,
            },
        ),
    ),
    "sequence_parallel": (
        (
            DENSE,
            {**_DENSE, "tensor_model_parallel_size": 2, "expert_data_parallel_size": 16},
            {
                **_DENSE,
                "tensor_model_parallel_size": 2,
                "expert_data_parallel_size": 16,
                "sequence_parallel": True,
            },
        ),
    ),
    "micro_batch_size": ((MOE, {}, {"micro_batch_size": 2}),),
    "zero_stage": (
        (MOE, {"zero_stage": 0}, {"zero_stage": 1}),
        (MOE, {**_ONE_STAGE, "zero_stage": 2}, {**_ONE_STAGE, "zero_stage": 3}),
    ),
    "shard_ranks": (
        (MOE, _TWO_COPIES, {**_TWO_COPIES, "shard_ranks": 4}),
        (
            MOE,
            {**_TWO_COPIES, "zero_stage": 2},
            {**_TWO_COPIES, "zero_stage": 2, "shard_ranks": 4},
        ),
        (
            MOE,
            {
                **_ONE_STAGE,
                **_TWO_COPIES,
                "zero_stage": 3,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
            },
            {
                **_ONE_STAGE,
                **_TWO_COPIES,
                "zero_stage": 3,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "shard_ranks": 4,
            },
        ),
    ),
    "dispatcher": (
        (MOE, {}, {"dispatcher": "deepep"}),
        (MOE, {"dispatcher": "deepep"}, {"dispatcher": "hybridep"}),
        (MOE, {}, {"dispatcher": "allgather"}),
        (MOE, {}, {"dispatcher": "hierarchical"}),
        (MOE, _ONE_STAGE, {**_ONE_STAGE, "dispatcher": "deepep"}),
    ),
    "a2a_overlap": ((MOE, _VIRTUAL, {**_VIRTUAL, "a2a_overlap": True}),),
    "recompute_modules": (
        (
            MOE,
            {**_SELECTIVE, "recompute_modules": ("moe_act",)},
            {**_SELECTIVE, "recompute_modules": ("layernorm", "moe_act")},
        ),
        (
            LATENT,
            {**_SELECTIVE, "recompute_modules": ("core_attn",), "pipeline_layout": (14, 13)},
            {
                **_SELECTIVE,
                "recompute_modules": ("mla_up_proj", "mlp", "shared_experts"),
                "pipeline_layout": (14, 13),
            },
        ),
    ),
    "recompute_num_layers": (
        (MOE, _FULL, {**_FULL, "recompute_num_layers": 6}),
        (
            MOE,
            {**_VIRTUAL, "recompute": "full", "stage_recompute": ("full",) * 4},
            {
                **_VIRTUAL,
                "recompute": "full",
                "stage_recompute": ("full",) * 4,
                "recompute_num_layers": 3,
            },
        ),
    ),
    "stage_recompute": (
        (MOE, {}, _FULL),
        (MOE, {}, _OF_MOE),
        (
            MOE,
            {"recompute": "full", "stage_recompute": ("full", "none")},
            {"recompute": "full", "stage_recompute": ("none", "full")},
        ),
    ),
    "chunks": (
        (MOE, _OF_MOE, {**_OF_MOE, "chunks": (4, 4)}),
        (MOE, {**_OF_MOE, "chunks": (4, 2)}, {**_OF_MOE, "chunks": (2, 4)}),
    ),
    "pipeline_layout": (
        (MOE, {}, {"pipeline_layout": (23, 25)}),
        (
            MOE,
            {**_VIRTUAL, "pipeline_layout": (11, 12, 12, 13)},
            {**_VIRTUAL, "pipeline_layout": (12, 11, 12, 13)},
        ),
    ),
    "mtp_num_layers": (
        (MOE, {}, {"mtp_num_layers": 1}),
        (MOE, {"pipeline_layout": (25, 23)}, {"pipeline_layout": (25, 23), "mtp_num_layers": 1}),
        (HYBRID, _LETTERS, {**_LETTERS, "mtp_num_layers": 1}),
    ),
    "fp8_recipe": tuple(
        (MOE, {}, {"fp8_recipe": recipe})
        for recipe in ("mxfp8", "fp8-blockwise", "fp8-delayed", "fp8-tensorwise", "nvfp4")
    ),
    "schedule": ((MOE, _VIRTUAL, {**_VIRTUAL, "schedule": "zero_bubble"}),),
    "rank_order": ((MOE, {}, {"rank_order": "tp-cp-ep-pp-dp"}),),
    "cuda_graph": (
        (MOE, {}, {"cuda_graph": "partial"}),
        (HYBRID, _LETTERS, {**_LETTERS, "cuda_graph": "partial"}),
        (
            MOE,
            {"dispatcher": "hybridep"},
            {"dispatcher": "hybridep", "cuda_graph": "full_iteration"},
        ),
        (DENSE, _DENSE_ONE_STAGE, {**_DENSE_ONE_STAGE, "cuda_graph": "full_iteration"}),
        (
            DENSE,
            {**_DENSE_ONE_STAGE, "zero_stage": 0},
            {**_DENSE_ONE_STAGE, "zero_stage": 0, "cuda_graph": "full_iteration"},
        ),
    ),
    "ddp_bucket_size": (
        (
            MOE,
            {**_TWO_COPIES, "overlap_grad_reduce": True},
            {**_TWO_COPIES, "overlap_grad_reduce": True, "ddp_bucket_size": 120_000_000},
        ),
    ),
    "overlap_grad_reduce": (
        (MOE, {}, {"overlap_grad_reduce": True}),
        (MOE, {"zero_stage": 0}, {"zero_stage": 0, "overlap_grad_reduce": True}),
    ),
    "overlap_param_gather": (
        (
            MOE,
            {"overlap_grad_reduce": True},
            {"overlap_grad_reduce": True, "overlap_param_gather": True},
        ),
    ),
    "gradient_bytes": ((MOE, {}, {"gradient_bytes": 2}),),
    "optimizer_offload": ((MOE, {}, {"optimizer_offload": True}),),
    "activation_offload": (
        (MOE, {}, {"activation_offload": True}),
        (
            MOE,
            {**_SELECTIVE, "recompute_modules": ("layernorm",)},
            {**_SELECTIVE, "recompute_modules": ("layernorm",), "activation_offload": True},
        ),
    ),
    "ends_as_layers": ((MOE, {}, {"ends_as_layers": True}),),
}
"""By field: model, and what both decisions change of `_PLAIN`."""

FOLLOWS: Final[Mapping[str, str]] = {
    "expert_data_parallel_size": "TP * CP * DP / (ETP * EP)",
    "recompute": "the strongest level of stage_recompute",
}
"""Fields whose value the other fields say."""


@pytest.fixture(scope="session")
def pairs() -> tuple[Pair, ...]:
    """Return every pair of every field."""
    names = (MOE, DENSE, LATENT, HYBRID, DELTA)
    models = {name: example_model(name) for name in names}
    return tuple(
        Pair(
            field=field,
            model=models[model],
            before=sample_decision(**{**_PLAIN, **before}),
            after=sample_decision(**{**_PLAIN, **after}),
        )
        for field, variants in FIELDS.items()
        for model, before, after in variants
    )


@pytest.fixture(scope="session")
def follows() -> Mapping[str, str]:
    """Return the fields that the others say."""
    return FOLLOWS


@pytest.fixture
def none_of() -> Callable[[list[str]], None]:
    """Fail with every line of a list."""

    def check(failures: list[str]) -> None:
        assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures)

    return check
