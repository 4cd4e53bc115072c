"""Emits TensorRT-LLM's `moe_load_balancer.yaml`, an options file that names it, and a `run.sh`.

Keys of `initial_global_assignments` are absolute decoder layers; `layer_updates_per_iter: 0` keeps
the placement as it is. Read from TensorRT-LLM's examples/wide_ep/ep_load_balancer and its LLM API
options.
"""

from pathlib import PurePosixPath
from typing import Final

from tuner.engines.files import EmittedFile, comment
from tuner.engines.placement.launch_script import num_nodes, run_script
from tuner.engines.placement.statement import brief_statement, statement
from tuner.plans.place import VerifiedPlacement

SERVED_FILE: Final = "moe_load_balancer.yaml"
_OPTIONS: Final = "llm_api_options.yaml"


def emit(verified: VerifiedPlacement) -> tuple[EmittedFile, ...]:
    """Return the balancer's file, the options and the script."""
    decision = verified.decision
    rows = "".join(
        f"  {layer}: [{', '.join(map(str, row))}]\n"
        for layer, row in zip(decision.layer_ids, decision.physical_to_logical, strict=True)
    )
    balancer = (
        comment(brief_statement(verified))
        + f"num_slots: {decision.num_slots}\n"
        + "initial_global_assignments:\n"
        + rows
        + "layer_updates_per_iter: 0\n"
    )
    # The engine opens the path relative to its current folder.
    options = (
        comment(statement(verified))
        + f"tensor_parallel_size: {decision.num_devices}\n"
        + f"moe_expert_parallel_size: {decision.num_devices}\n"
        + f"gpus_per_node: {min(decision.ranks_per_node, decision.num_devices)}\n"
        + "enable_attention_dp: true\n"
        + "moe_config:\n"
        + f"  load_balancer: ./{SERVED_FILE}\n"
    )
    usage = [
        "Usage: ./run.sh MODEL [more flags of the engine]; MODEL as a name or an absolute path",
    ]
    launcher: tuple[str, ...] = ()
    if num_nodes(verified) > 1:
        usage.append(
            f"Start it with srun --mpi=pmix --nodes={num_nodes(verified)}"
            f" --ntasks={decision.num_devices} --ntasks-per-node={decision.ranks_per_node}"
        )
        launcher = ("trtllm-llmapi-launch",)
    script = run_script(
        verified,
        usage=usage,
        command=(
            'env --chdir="$here"',
            *launcher,
            'trtllm-serve serve "$@"',
            f"--tp_size {decision.num_devices}",
            f"--ep_size {decision.num_devices}",
            f"--extra_llm_api_options {_OPTIONS}",
        ),
    )
    return (
        EmittedFile(path=PurePosixPath(SERVED_FILE), text=balancer),
        EmittedFile(path=PurePosixPath(_OPTIONS), text=options),
        script,
    )
