"""The layouts of torchtitan on two processes of a CPU."""

from tests.benchmarks.launched_engine import CHECKOUT, LaunchedEngine

_EXAMPLE = CHECKOUT / "examples" / "engines" / "torchtitan"
_ONLY = "pipeline_model_parallel_size: [1]"


def _layout(
    *,
    zero: int = 2,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
    micro: int = 4,
    recompute: str = "none",
) -> str:
    return (
        f"{_ONLY}, zero_stage: [{zero}], tensor_model_parallel_size: [{tensor}],"
        f" context_parallel_size: [{context}], expert_model_parallel_size: [{expert}],"
        f" micro_batch_size: [{micro}], recompute: [{recompute}]"
    )


ENGINE = LaunchedEngine(
    name="torchtitan",
    metrics="torchtitan",
    model=_EXAMPLE / "config.json",
    goal="sequence_length: 256, global_batch_size: 16, precision: bf16",
    layouts={
        "1 rank": (1, _layout(zero=0)),
        "ZeRO 0": (2, _layout(zero=0)),
        "ZeRO 2": (2, _layout()),
        "ZeRO 3": (2, _layout(zero=3)),
        "ZeRO 2, micro-batch 8": (2, _layout(micro=8)),
        "ZeRO 2, recomputed": (2, _layout(recompute="full")),
        "EP 2": (2, _layout(expert=2)),
        "TP 2, EP 2": (2, _layout(tensor=2, expert=2)),
    },
    arguments="--training.steps {steps} --dump_folder {launch}/outputs",
    environment={
        "CONFIG": "tiny_moe",
        "MODULE": "tiny_moe",
        "PYTHONPATH": str(_EXAMPLE),
        "TRAIN_FILE": "train_on_cpu",
    },
)
