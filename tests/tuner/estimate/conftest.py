from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuner.engines.reading.launch import LaunchSettings
from tuner.engines.targets import programs
from tuner.estimate.changes import Changes
from tuner.estimate.estimate import estimate
from tuner.estimate.records import Estimate
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.goal import TrainGoal
from tuner.spec.huggingface.read import read_model
from tuner.spec.spec import Spec

MODELS = Path(__file__).parents[3] / "examples" / "models"
LAUNCHES = Path(__file__).parent / "launches"


@pytest.fixture(scope="session")
def spec_of() -> Callable[..., Spec]:
    """Make a spec of a model on servers of eight devices."""

    def make(model: str, *, nodes: int, device: str = "h100-sxm", **goal: Any) -> Spec:
        arguments = {"sequence_length": 4096, "global_batch_size": 256} | goal
        pool = Pool(name="pool", device=device, nodes=nodes, devices_per_node=8, nic=50e9)
        return Spec(
            path=Path("spec.yaml"),
            model_path=MODELS / model,
            model=read_model(MODELS / model),
            cluster=Cluster(pools=(pool,)),
            goal=TrainGoal(kind="train", **arguments),
            programs=programs(("megatron-lm",)),
        )

    return make


def predict(spec: Spec, launch: LaunchSettings, **given: Any) -> Estimate:
    """Estimate a launch without changes of it, which take most of the time."""
    none = Changes(smallest=None, best_pair=None, by_knob=(), num_tried=0)
    return estimate(spec, launch, advise=lambda *_, **__: none, **given)
