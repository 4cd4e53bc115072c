"""Predicted gain of tuning the gradient bucket size, by data parallelism and network.

    python tests/benchmarks/gradient_buckets.py

Steps of one micro-batch a rank on H100 servers, no pipeline, ZeRO-1, everything else as the
engine's defaults. Prints the engine's own size, the best of the menu and its share of the step;
sizes that save less than the noise of a step are not stated in a plan.
"""

from collections.abc import Iterator
from pathlib import Path

from tuner.costs.train.calibration import shipped
from tuner.costs.train.gradient_buckets import default_bucket
from tuner.engines.megatron_lm import read as megatron
from tuner.estimate.configuration import build_configuration
from tuner.estimate.estimate import pricing_setup
from tuner.estimate.prices import price_configurations
from tuner.search.train.gradient_buckets import LEAST_GAIN_RATIO, MENU
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.goal import TrainGoal
from tuner.spec.huggingface.read import read_model
from tuner.spec.spec import Spec

MODELS = Path(__file__).parents[2] / "examples" / "models"
EXPERTS = "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall "


def gains() -> Iterator[tuple[str, int, int, float, float, float]]:
    """Yield model, ranks, Gbit/s per NIC, the engine's size, the best one, and its gain."""
    for name, flags in (("llama-3.1-8b", ""), ("qwen3-30b-a3b", EXPERTS)):
        for ranks in (64, 256, 1024, 2048):
            for gbit in (100, 400):
                step_s = {
                    size: _step_s(name, flags, ranks=ranks, gbit=gbit, size=size)
                    for size in (0.0, *MENU)
                }
                best = min(step_s, key=lambda size: step_s[size])
                yield (
                    name,
                    ranks,
                    gbit,
                    float(default_bucket(ranks)),
                    best,
                    (1.0 - step_s[best] / step_s[0.0]),
                )


def _step_s(name: str, flags: str, *, ranks: int, gbit: int, size: float) -> float:
    pool = Pool(
        name="pool", device="h100-sxm", nodes=ranks // 8, devices_per_node=8, nic=gbit * 1e9 / 8
    )
    spec = Spec(
        path=Path("spec.yaml"),
        model_path=MODELS / name,
        model=read_model(MODELS / name),
        cluster=Cluster(pools=(pool,)),
        goal=TrainGoal(kind="train", sequence_length=4096, global_batch_size=ranks),
        emit=("megatron-lm",),
    )
    stated = f"--ddp-bucket-size {int(size)} " if size else ""
    launch = megatron.read(
        "pretrain_gpt.py --bf16 --micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        f"--global-batch-size {ranks} --seq-length 4096 {flags}{stated}",
        source="benchmark",
    )
    setup = pricing_setup(spec, shipped())
    return price_configurations((build_configuration(launch, spec)[0],), setup)[0].step_s


def main() -> None:
    """Print a line for every case."""
    print(f"stated from {LEAST_GAIN_RATIO:.1%} of a step on")  # noqa: T201
    for name, ranks, gbit, own, best, gain in gains():
        chosen = f"{best / 1e6:.0f}M" if best else "its own"
        print(  # noqa: T201
            f"{name:14} DP {ranks:5} {gbit:4} Gbit/s  engine's own {own / 1e6:5.0f}M  "
            f"best {chosen:>7}  saves {gain:6.2%}"
        )


if __name__ == "__main__":
    main()
