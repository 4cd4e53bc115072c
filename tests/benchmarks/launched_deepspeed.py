"""The layouts of DeepSpeed on two processes of a CPU."""

import shlex

from tests.benchmarks.launched_engine import CHECKOUT, LaunchedEngine

_MODEL = CHECKOUT / "examples" / "models" / "tiny-moe" / "config.json"
_ONLY = "pipeline_model_parallel_size: [1], tensor_model_parallel_size: [1]"
_LAYOUTS = {
    "1 rank, ZeRO 1": (1, "zero_stage: [1], micro_batch_size: [4]"),
    "1 rank, ZeRO 1, micro-batch 8": (1, "zero_stage: [1], micro_batch_size: [8]"),
    "ZeRO 1": (2, "zero_stage: [1], expert_model_parallel_size: [1], micro_batch_size: [4]"),
    "ZeRO 2": (2, "zero_stage: [2], expert_model_parallel_size: [1], micro_batch_size: [4]"),
    "ZeRO 3": (2, "zero_stage: [3], expert_model_parallel_size: [1], micro_batch_size: [4]"),
    "ZeRO 1, micro-batch 8": (
        2,
        "zero_stage: [1], expert_model_parallel_size: [1], micro_batch_size: [8]",
    ),
    "ZeRO 3, micro-batch 2": (
        2,
        "zero_stage: [3], expert_model_parallel_size: [1], micro_batch_size: [2]",
    ),
    "ZeRO 1, AutoEP 2": (
        2,
        "zero_stage: [1], expert_model_parallel_size: [2], micro_batch_size: [4]",
    ),
    "ZeRO 2, AutoEP 2": (
        2,
        "zero_stage: [2], expert_model_parallel_size: [2], micro_batch_size: [4]",
    ),
}

ENGINE = LaunchedEngine(
    name="deepspeed",
    metrics="deepspeed",
    model=_MODEL,
    goal="sequence_length: 256, global_batch_size: 16, precision: bf16",
    layouts={name: (ranks, f"{_ONLY}, {search}") for name, (ranks, search) in _LAYOUTS.items()},
    arguments=f"--model {shlex.quote(str(_MODEL))} --sequence 256 --steps {{steps}}",
    environment={
        "DS_ACCELERATOR": "cpu",
        "TRAIN": str(CHECKOUT / "examples" / "engines" / "deepspeed" / "train.py"),
    },
)
