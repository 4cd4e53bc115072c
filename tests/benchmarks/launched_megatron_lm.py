"""The layouts of Megatron-LM on two processes of a CPU."""

from tests.benchmarks.launched_engine import CHECKOUT, LaunchedEngine

_FOUR = "micro_batch_size: [4]"
_ONE = f"{_FOUR}, zero_stage: [0]"
_DATA = (
    "tensor_model_parallel_size: [1], pipeline_model_parallel_size: [1],"
    " expert_model_parallel_size: [1]"
)
_EXPERTS = _DATA.replace("expert_model_parallel_size: [1]", "expert_model_parallel_size: [2]")
_TENSOR = "tensor_model_parallel_size: [2], zero_stage: [0]"
_PIPELINE = "pipeline_model_parallel_size: [2], zero_stage: [0]"

ENGINE = LaunchedEngine(
    name="megatron-lm",
    metrics="megatron",
    model=CHECKOUT / "examples" / "models" / "tiny-moe" / "config.json",
    goal="sequence_length: 256, global_batch_size: 16, precision: bf16",
    layouts={
        "1 rank": (1, _ONE),
        "1 rank, recompute full": (1, f"{_ONE}, recompute: [full], chunks: [1]"),
        "1 rank, MLP chunks 2": (1, f"{_ONE}, recompute: [selective], chunks: [2]"),
        "1 rank, MLP chunks 4": (1, f"{_ONE}, recompute: [selective], chunks: [4]"),
        "DP 2, ZeRO 1": (2, f"{_DATA}, zero_stage: [1], {_FOUR}"),
        "DP 2, ZeRO 1, micro-batch 8": (2, f"{_DATA}, zero_stage: [1], micro_batch_size: [8]"),
        "FSDP, ZeRO 3": (2, f"{_DATA}, zero_stage: [3], {_FOUR}"),
        "EP 2, ZeRO 1": (2, f"{_EXPERTS}, zero_stage: [1], {_FOUR}"),
        "TP 2, EP 2": (2, f"{_TENSOR}, expert_model_parallel_size: [2], {_FOUR}"),
        "PP 2": (2, f"{_PIPELINE}, virtual_pipeline_model_parallel_size: [1], {_FOUR}"),
        "PP 2, VPP 2": (2, f"{_PIPELINE}, virtual_pipeline_model_parallel_size: [2], {_FOUR}"),
    },
    # What the checkout itself must be told: no text, and nothing that a plan decides.
    arguments="--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --lr 1e-4"
    " --eval-iters 0 --eval-interval 1000000 --log-interval 1 --train-iters {steps}",
    environment={"MEGATRON_LM": str(CHECKOUT / "examples" / "engines" / "megatron_lm")},
)
