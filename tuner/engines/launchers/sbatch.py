"""The head of every batch script: `#SBATCH` lines, and what a training job requests."""

from collections.abc import Iterable, Sequence

from tuner.engines.launchers.shape import LaunchShape


def directives(options: Iterable[tuple[str, str]]) -> str:
    """Write sbatch's options as lines; one without value is a flag."""
    return "".join(
        f"#SBATCH --{name}={value}\n" if value else f"#SBATCH --{name}\n" for name, value in options
    )


def training_resources(
    shape: LaunchShape, *, name: str, nodelist: Sequence[str] = ()
) -> dict[str, str]:
    """Return what a job of one task a node requests: nodes and their devices."""
    per_node = "cpus-per-task" if shape.device_kind == "cpu" else "gpus-per-node"
    return {
        "job-name": name,
        "nodes": str(shape.nodes),
        **({"nodelist": ",".join(nodelist)} if nodelist else {}),
        "ntasks-per-node": "1",
        per_node: str(shape.devices_per_node),
    }
