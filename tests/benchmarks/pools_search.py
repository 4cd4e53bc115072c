"""Gap of plans over heterogeneous pools by search time: `python tests/benchmarks/pools_search.py`.

DeepSeek-V3 over 512 H100 and 512 A100, the example two-pools scaled up, on datasheets without
calibration. Printed are the best step, the bound and the gap after given seconds of processor time,
one thread: other load on the machine only affects how long that takes.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tuner.search.settings import SearchSettings
from tuner.search.train.pools.build_problem import build_pools_problem
from tuner.search.train.pools.search import search
from tuner.spec.cluster import Cluster, Link, Pool
from tuner.spec.goal import TrainGoal
from tuner.spec.huggingface.read import read_model
from tuner.spec.spec import Spec

MODELS = Path(__file__).parents[2] / "examples" / "models"


def two_pools(model: str, *, nodes: int, batch: int) -> Spec:
    """`nodes` nodes of eight H100 and as many of eight A100, 3.2 Tbit/s between them."""
    pools = tuple(
        Pool(name=name, device=device, nodes=nodes, devices_per_node=8)
        for name, device in (("h100", "h100-sxm"), ("a100", "a100-80gb-sxm"))
    )
    link = Link(between=("h100", "a100"), bandwidth=4e11, latency=2e-5)
    return Spec(
        path=Path("spec.yaml"),
        model_path=MODELS / model,
        model=read_model(MODELS / model),
        cluster=Cluster(pools=pools, links=(link,)),
        goal=TrainGoal(kind="train", sequence_length=4096, global_batch_size=batch),
        emit=("megatron-lm",),
    )


def searched(spec: Spec, *, time_limit_s: float) -> dict[str, Any]:
    """Search for a time limit in processor seconds."""
    problem = build_pools_problem(spec, residuals=None)
    settings = SearchSettings(top=1, time_limit_s=time_limit_s, clock=time.process_time)
    result = search(problem, settings)
    best_s = result.chains[0].price.step_s if result.chains else None
    return {
        "model": spec.model.name,
        "devices": spec.cluster.num_devices,
        "step_s": best_s,
        "bound_s": result.bound_s,
        "gap_ratio": None if best_s is None else 1.0 - result.bound_s / best_s,
        "open": result.counts.open,
        "cpu_s": result.solve_s,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=40.0)
    given = parser.parse_args()
    one = searched(two_pools("deepseek-v3", nodes=64, batch=7680), time_limit_s=given.seconds)
    if given.json:
        sys.stdout.write(json.dumps(one, indent=2) + "\n")
        return
    sys.stdout.write(
        f"{one['model']} on {one['devices']} devices of two kinds: step {one['step_s']:.2f} s, "
        f"bound {one['bound_s']:.2f} s, gap {one['gap_ratio']:.2%} after {one['cpu_s']:.1f} s of "
        "the processor\n"
    )


if __name__ == "__main__":
    main()
