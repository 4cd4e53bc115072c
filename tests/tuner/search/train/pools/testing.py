"""Specs of two small pools."""

from pathlib import Path
from typing import Any

from tests.tuner.models import MODELS, example_model
from tuner.engines.targets import programs
from tuner.plans.train import Provenance
from tuner.spec.cluster import Cluster, Link, Pool
from tuner.spec.goal import TrainGoal
from tuner.spec.search import Search
from tuner.spec.spec import Spec

FEW = {
    "context_parallel_size": (1,),
    "micro_batch_size": (1,),
    "dispatcher": ("alltoall",),
    "a2a_overlap": (False,),
    "cuda_graph": ("none",),
    "activation_offload": (False,),
}
"""Limits that keep a space small enough to try everything."""


PROVENANCE = Provenance(
    moetune_version="0",
    spec_sha256="",
    profile_sha256={},
    profile_source={"new": "datasheet", "old": "datasheet"},
    extrapolated=(),
)


def spec(
    model: str = "tiny-moe",
    *,
    new: dict[str, Any] | None = None,
    old: dict[str, Any] | None = None,
    bandwidth: float | None = 50e9,
    latency: float = 2e-5,
    limits: dict[str, Any] | None = None,
    emit: str = "megatron-lm",
    **goal: Any,
) -> Spec:
    """Return two small pools, `new` (H100) and `old` (A100), joined by a link."""
    any_pool = {"nodes": 2, "devices_per_node": 2, "nic": 25e9}
    pools = (
        Pool.model_validate({"name": "new", "device": "h100-sxm", **any_pool, **(new or {})}),
        Pool.model_validate({"name": "old", "device": "a100-80gb", **any_pool, **(old or {})}),
    )
    joined = Link(between=("new", "old"), bandwidth=bandwidth or 1.0, latency=latency)
    wanted = {"kind": "train", "sequence_length": 1024, "global_batch_size": 8} | goal
    return Spec(
        path=Path("spec.yaml"),
        model_path=MODELS / model,
        model=example_model(model),
        cluster=Cluster(pools=pools, links=() if bandwidth is None else (joined,)),
        goal=TrainGoal.model_validate(wanted),
        search=Search.model_validate(FEW | (limits or {})),
        programs=programs((emit,)),
    )
