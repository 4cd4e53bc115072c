"""Emits a vLLM plugin that returns the planned table, and a `run.sh` with the flags that match it.

vLLM reads no placement file: it starts with experts in order and moves them when its expert load
balancer rearranges. The plugin sets a policy in `EPLB_POLICIES["default"]` that returns the table
for any loads. It is installed as a package, since vLLM loads plugins by the entry point
`vllm.general_plugins` in each of its processes. Models of another shape, such as the draft model of
speculative decoding, keep vLLM's policy.

Read from vLLM 0.33.0: vllm/distributed/eplb/{policy,eplb_state.py}, vllm/config/parallel.py. The
policy is called during memory profiling, where a wrong number of ranks aborts the start, and again
after `step_interval` / 4 passes, when the table takes effect.
"""

import json
import shlex
from pathlib import PurePosixPath
from typing import Final

from tuner.config.place import PlaceDecision
from tuner.engines.files import EmittedFile, comment
from tuner.engines.placement.launch_script import num_nodes, run_script
from tuner.engines.placement.statement import statement
from tuner.plans.place import VerifiedPlacement
from tuner.units import spans

STEP_INTERVAL: Final = 1000
"""Passes between rearrangements; the first comes after a quarter of them, later ones move nothing.
"""

_MODULE: Final = "moetune_placement"
SERVED_FILE: Final = f"{_MODULE}.py"


def emit(verified: VerifiedPlacement) -> tuple[EmittedFile, ...]:
    """Return the plugin and the script."""
    decision = verified.decision
    config = {
        "num_redundant_experts": decision.redundant_experts,
        "step_interval": STEP_INTERVAL,
        # Recorded loads are not used.
        "window_size": 1,
    }
    return (
        EmittedFile(path=PurePosixPath("pyproject.toml"), text=_PROJECT),
        EmittedFile(path=PurePosixPath(SERVED_FILE), text=_module(verified, decision)),
        run_script(
            verified,
            usage=(
                "Once, on every node: pip install --no-deps .   (in this folder)",
                "Usage: ./run.sh MODEL [more flags of the engine]",
                f"The placement takes effect after {STEP_INTERVAL // 4} passes.",
                whole_model(decision),
            ),
            command=(
                'vllm serve "$@"',
                *parallel_flags(verified),
                "--enable-eplb",
                f"--eplb-config {shlex.quote(json.dumps(config))}",
            ),
        ),
    )


def whole_model(decision: PlaceDecision) -> str:
    """Return the requirement on the model where an engine counts MoE layers only."""
    return f"MODEL must have MoE layers {spans(decision.layer_ids)} and no others, one per row."


def parallel_flags(verified: VerifiedPlacement) -> tuple[str, ...]:
    """Return vLLM's flags for one data-parallel, hence one expert-parallel, rank per device."""
    decision, nodes = verified.decision, num_nodes(verified)
    flags = (
        "--tensor-parallel-size 1",
        f"--data-parallel-size {decision.num_devices}",
        "--enable-expert-parallel",
    )
    if nodes == 1:
        return flags
    local = decision.ranks_per_node
    return (
        *flags,
        f"--data-parallel-size-local {local}",
        f'--data-parallel-start-rank "$((node * {local}))"',
        '--data-parallel-address "$MASTER_ADDR"',
        "--data-parallel-rpc-port 13345",
        '$([[ "$node" == 0 ]] || echo --headless)',
    )


_PROJECT: Final = f"""\
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "moetune-placement"
version = "1"

[project.entry-points."vllm.general_plugins"]
{_MODULE} = "{_MODULE}:register"

[tool.setuptools]
py-modules = ["{_MODULE}"]
"""


def _module(verified: VerifiedPlacement, decision: PlaceDecision) -> str:
    rows = "".join(f"    {tuple(row)!r},\n" for row in decision.physical_to_logical)
    return (
        comment(statement(verified))
        + '"""Places experts as planned, for any loads."""\n\n'
        + "import logging\n\n"
        + f"NUM_EXPERTS = {decision.num_experts}\n"
        + f"NUM_RANKS = {decision.num_devices}\n"
        + f"NUM_SLOTS = {decision.num_slots}\n"
        + f"PHYSICAL_TO_LOGICAL = (\n{rows})\n"
        + _POLICY
    )


_POLICY: Final = '''

def register() -> None:
    """Replace the default policy; vLLM may call this several times in a process."""
    import torch
    from vllm.distributed.eplb.policy import EPLB_POLICIES, DefaultEplbPolicy

    class PlannedPlacement(DefaultEplbPolicy):
        """Returns the planned table."""

        @classmethod
        def rebalance_experts(
            cls,
            weight,
            num_replicas,
            num_groups,
            num_nodes,
            num_ranks,
            old_global_expert_indices=None,
        ):
            planned = (len(PHYSICAL_TO_LOGICAL), NUM_EXPERTS)
            if tuple(weight.shape) != planned:
                logging.getLogger(__name__).warning(
                    "%s layers and experts are not the planned %s: vLLM's policy places them",
                    tuple(weight.shape),
                    planned,
                )
                return super().rebalance_experts(
                    weight,
                    num_replicas,
                    num_groups,
                    num_nodes,
                    num_ranks,
                    old_global_expert_indices,
                )
            if (num_replicas, num_ranks) != (NUM_SLOTS, NUM_RANKS):
                raise ValueError(
                    f"{num_replicas} slots on {num_ranks} ranks, the placement was planned for"
                    f" {NUM_SLOTS} on {NUM_RANKS}: start vLLM with the flags of run.sh"
                )
            return torch.tensor(PHYSICAL_TO_LOGICAL, dtype=torch.int64)

    EPLB_POLICIES["default"] = PlannedPlacement
'''
