"""Emits `job.sbatch`: a Slurm job that starts the plan's program on every node of the allocation.

The program is the first one that the plan emits; its `run.sh` is in the neighbouring folder. Slurm
copies a batch script away before it runs, so the job looks for that folder from where it was
submitted. Where the order of nodes matters, the job requests those nodes and places its tasks in
the order of `hosts.txt` (SLURM_HOSTFILE with --distribution=arbitrary, srun(1)). Where the plan
counts on checkpoints the job starts its program again after failures (restart_loop.py).
"""

from pathlib import PurePosixPath

from tuner.engines.files import JOB_FOLDER, JOB_NAME, EmittedFile, comment, label
from tuner.engines.launchers import restart_loop
from tuner.engines.launchers.hosts import HOSTS_NAME, hosts, notes
from tuner.engines.launchers.restart_loop import RestartLoop
from tuner.engines.launchers.sbatch import directives, training_resources
from tuner.engines.launchers.shape import LaunchShape, launch_shape
from tuner.engines.statement import brief_statement
from tuner.engines.targets import programs
from tuner.plans.train import Plan, VerifiedPlan


def emit(verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return the batch script, sized for exactly the devices of the decision."""
    shape = launch_shape(verified.plan, verified.decision)
    program = programs(verified.plan.emit).chosen[0]
    loop = restart_loop.restart_loop(
        verified, program=program, line_pools=_line_pools(verified.plan, shape)
    )
    text = (
        "#!/usr/bin/env bash\n"
        + _directives(shape, loop, name=f"moetune-{label(verified.plan.model.name)}")
        + comment(
            (
                *brief_statement(verified),
                "",
                "Submit it by this name: sbatch [PATH/]job.sbatch [arguments of the program]",
                "Account, partition and time limit are yours: sbatch --partition=... job.sbatch",
                *notes(shape),
                *(() if loop is None else ("", *loop.lines)),
            )
        )
        + (
            _body(shape, program=program)
            if loop is None
            else _restarting_body(shape, loop, program=program)
        )
    )
    return (EmittedFile(path=PurePosixPath(JOB_NAME), text=text, executable=True),)


def _line_pools(plan: Plan, shape: LaunchShape) -> tuple[str, ...]:
    """Return the pool of each line of hosts.txt; empty where nodes are of one kind."""
    placement = plan.placement
    if placement is None or not shape.hosts:
        return ()
    pools = [stage.pool for stage in placement.stages for _ in range(stage.devices)]
    return tuple(pools[:: shape.devices_per_node]) if len(set(pools)) > 1 else ()


def _directives(shape: LaunchShape, loop: RestartLoop | None, *, name: str) -> str:
    nodelist = hosts(shape) if _is_named(shape) else ()
    requested = training_resources(shape, name=name, nodelist=nodelist)
    if loop is not None:
        # Slurm would give the fewest nodes that hold the tasks.
        del requested["ntasks-per-node"]
        requested |= restart_loop.options(loop, nodes=shape.nodes)
    return directives((*requested.items(), ("output", "%x-%j.out")))


def _is_named(shape: LaunchShape) -> bool:
    return bool(shape.hosts) and not shape.unnamed


def _program(program: str) -> str:
    """Return bash that finds the program from wherever the job was submitted."""
    return f"""\
set -euo pipefail
{JOB_FOLDER}PROGRAM="$JOB/../{program}/run.sh"
if [[ ! -f "$PROGRAM" ]]; then
  echo "$PROGRAM is missing; {JOB_NAME} belongs beside its folder, under this name" >&2
  exit 2
fi
"""


def _restarting_body(shape: LaunchShape, loop: RestartLoop, *, program: str) -> str:
    hostfile = f'HOSTFILE="${{HOSTFILE:-$JOB/{HOSTS_NAME}}}"\n' if shape.hosts else ""
    return (
        _program(program)
        + hostfile
        + f"export NNODES={shape.nodes}\nexport NPROC_PER_NODE={shape.devices_per_node}\n"
        + restart_loop.body(
            loop,
            program=program,
            has_hosts=bool(shape.hosts),
            is_named=_is_named(shape),
            device_kind=shape.device_kind,
        )
    )


def _body(shape: LaunchShape, *, program: str) -> str:
    return f"""\
{_program(program)}{_hostfile(shape)}
export NNODES={shape.nodes}
export NPROC_PER_NODE={shape.devices_per_node}
# Where Slurm's node names are no host names, set MASTER_ADDR before sbatch.
export MASTER_ADDR="${{MASTER_ADDR:-$({_first_node(shape)})}}"
# Jobs that share a node need different ports.
export MASTER_PORT="${{MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}}"

srun {_layout(shape)} --kill-on-bad-exit=1 bash "$PROGRAM" "$@"
"""


def _hostfile(shape: LaunchShape) -> str:
    if not shape.hosts:
        return ""
    return f"""\
export HOSTFILE="${{HOSTFILE:-$JOB/{HOSTS_NAME}}}"
export SLURM_HOSTFILE="$HOSTFILE"
"""


def _first_node(shape: LaunchShape) -> str:
    if shape.hosts:
        return 'head -n 1 -- "$HOSTFILE"'
    return 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1'


def _layout(shape: LaunchShape) -> str:
    if not shape.hosts:
        return "--ntasks-per-node=1"
    return f"--nodes={shape.nodes} --ntasks={shape.nodes} --distribution=arbitrary"
