"""Emits `job.sbatch`: one Slurm job whose components request exactly the devices of the plan.

Every group is a component of a heterogeneous job (sbatch(1), `#SBATCH hetjob`). Instances of one
machine are tasks of one step with --gpus-per-task, so that Slurm packs them; an instance over
several machines is a step of its own on machines of its own. `instance.sh` sets the instance number
of a task and writes the address that the router waits for. Instances that send KV caches inside one
machine are one task with a machine of its own: tasks do not see each other's devices.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

from tuner.engines.files import JOB_FOLDER, JOB_NAME, EmittedFile, comment, label
from tuner.engines.launchers.benchmark import benchmark_files
from tuner.engines.launchers.sbatch import directives
from tuner.engines.serving.command import FIRST_PORT, PORTS_PER_INSTANCE, checks
from tuner.engines.serving.engines import MPI_ENGINES
from tuner.engines.serving.placement import ServedPlacement, placement_notes
from tuner.engines.serving.router import ROUTER_PORT, needs_router
from tuner.engines.serving.shape import (
    MACHINE,
    GroupShape,
    group_shapes,
    needs_draft_model,
    one_machine,
    url_list,
)
from tuner.engines.serving.statement import brief_statement, statement
from tuner.engines.vllm_afd.write import (
    RENDEZVOUS_PORT_OFFSET,
    afd_unit_name,
    afd_units,
    one_machine_units,
)
from tuner.plans.serve import VerifiedServing

_CPUS_PER_GPU: Final = 8
"""Cores per device; a task has one otherwise, which every process of an engine would share. Servers
of 8 devices have more than 64 (NVIDIA DGX A100: 128, DGX H100: 112)."""
_PORT_SLOTS: Final = 150
"""Instances with distinct ports below 60000; later ones reuse them."""


def emit(verified: VerifiedServing, placement: ServedPlacement | None) -> tuple[EmittedFile, ...]:
    """Return the batch script, the script of its tasks, and the benchmark."""
    shapes = _components(verified)
    engine, ffns = verified.plan.goal.engine.name, _ffn_groups(verified)
    has_router = needs_router(verified) and shapes[0].name != MACHINE  # which starts it itself
    text = (
        "#!/usr/bin/env bash\n"
        + _directives(verified, shapes)
        + comment(
            (
                *statement(verified),
                "",
                *_usage(verified, shapes),
                *placement_notes(verified, placement),
            )
        )
        + _BODY.format(
            engine=engine,
            first=shapes[0].name,
            folder=JOB_FOLDER,
            name=JOB_NAME,
            checks=checks(draft_model=needs_draft_model(verified)),
        )
        + "".join(
            _steps(
                shape,
                component=index if len(shapes) > 1 else None,
                engine=engine,
                ffn=ffns.get(shape.name),
            )
            for index, shape in enumerate(shapes)
        )
        + (_router(shapes, engine=engine) if has_router else "")
        + "wait -n\n"
    )
    return (
        EmittedFile(path=PurePosixPath(JOB_NAME), text=text, executable=True),
        EmittedFile(
            path=PurePosixPath("instance.sh"),
            text="#!/usr/bin/env bash\n"
            + comment((*brief_statement(verified), "", "Started by job.sbatch, once per task."))
            + _INSTANCE.format(
                engine=engine,
                first=FIRST_PORT,
                each=PORTS_PER_INSTANCE,
                slots=_PORT_SLOTS,
                rendezvous=_AFD_RENDEZVOUS.format(offset=RENDEZVOUS_PORT_OFFSET) if ffns else "",
            ),
            executable=True,
        ),
        *benchmark_files(verified),
    )


def _components(verified: VerifiedServing) -> tuple[GroupShape, ...]:
    """Return the groups; an AFD unit that fits on one machine is one component, on one machine."""
    if (machine := one_machine(verified)) is not None:
        return (machine,)
    whole = {attention.name: (attention, ffn) for attention, ffn in one_machine_units(verified)}
    inside = {ffn.name for _, ffn in whole.values()}
    components = []
    for shape in group_shapes(verified):
        if shape.name in whole:
            devices = sum(server.group.devices for server in whole[shape.name])
            unit = shape.group.model_copy(update={"devices": devices})
            components.append(replace(shape, name=afd_unit_name(shape), group=unit))
        elif shape.name not in inside:
            components.append(shape)
    return tuple(components)


def _ffn_groups(verified: VerifiedServing) -> dict[str, str]:
    """Return, by attention group, the group of FFN servers on machines of their own."""
    whole = {attention.name for attention, _ in one_machine_units(verified)}
    pairs = afd_units(group_shapes(verified))
    return {attention.name: ffn.name for attention, ffn in pairs if attention.name not in whole}


def _directives(verified: VerifiedServing, shapes: tuple[GroupShape, ...]) -> str:
    name = f"moetune-{label(verified.plan.model.name)}"
    head = directives((("job-name", name), ("output", "%x-%j.out")))
    engine = verified.plan.goal.engine.name
    return head + "#SBATCH hetjob\n".join(
        directives(_resource_options(shape, engine=engine)) for shape in shapes
    )


def _resource_options(shape: GroupShape, *, engine: str) -> Iterator[tuple[str, str]]:
    group = shape.group
    if shape.name == MACHINE:
        yield "exclusive", ""  # Its devices are numbered from 0.
    yield "cpus-per-gpu", str(_CPUS_PER_GPU)
    if shape.nodes == 1:
        yield "ntasks", str(group.count)
        yield "gpus-per-task", str(group.devices)
        return
    yield "nodes", str(group.count * shape.nodes)
    yield "ntasks-per-node", str(_tasks_per_node(shape, engine=engine))
    yield "gpus-per-node", str(shape.devices_per_node)


def _tasks_per_node(shape: GroupShape, *, engine: str) -> int:
    return shape.devices_per_node if engine in MPI_ENGINES else 1


def _usage(verified: VerifiedServing, shapes: tuple[GroupShape, ...]) -> Iterator[str]:
    named = "MODEL=... DRAFT_MODEL=..." if needs_draft_model(verified) else "MODEL=..."
    port = ROUTER_PORT if needs_router(verified) else FIRST_PORT
    yield f"Submit it by this name: {named} sbatch [PATH/]{JOB_NAME}"
    yield "The machines must share its folder and the one that you submit it from."
    pools = [shape.group.pool for shape in shapes]
    if len(shapes) > 1:
        yield f"Its components, in order, are for the pools {', '.join(pools)}: give each its"
        yield "partition or constraint, sbatch --partition=A : --partition=B job.sbatch"
    yield "If Slurm's default memory is too small for the weights, add --mem=0."
    yield f"Requests go to port {port} of the machine that the job starts on."


_BODY: Final = """\
set -euo pipefail
{folder}ENGINE="$JOB/../{engine}"
if [[ ! -f "$ENGINE/{first}.sh" ]]; then
  echo "$ENGINE/{first}.sh is missing; {name} belongs beside its folder, under this name" >&2
  exit 2
fi
{checks}export MODEL
export RUN="$PWD/run-$SLURM_JOB_ID"
mkdir -p -- "$RUN"
# A job that is queued again keeps its number.
rm -f -- "$RUN"/*.url

"""

_INSTANCE: Final = """\
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)"
# Arguments: group, instance ("task": one per task), instances of the groups before it,
# machines of an instance.
GROUP="$1" INDEX="$2" FIRST="$3"
export NNODES="$4" NODE_RANK=0
shift 4
TAKES_REQUESTS=yes
if [[ "$INDEX" == task ]]; then
  INDEX="$SLURM_PROCID"
else
  NODE_RANK="$SLURM_NODEID"
  MASTER_ADDR="$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)"
  export MASTER_ADDR
  if (( SLURM_PROCID > 0 )); then TAKES_REQUESTS=no; fi
fi
export PORT="$(( {first} + (FIRST + INDEX) % {slots} * {each} ))"
if [[ "$TAKES_REQUESTS" == yes ]]; then
  printf 'http://%s:%s\\n' "${{SLURMD_NODENAME:-$(hostname)}}" "$PORT" > "$RUN/$GROUP.$INDEX.url"
fi
{rendezvous}exec bash "$HERE/../{engine}/$GROUP.sh" "$@"
"""

_AFD_RENDEZVOUS: Final = """\
if [[ -n "${{FFN_GROUP:-}}" ]]; then
  # The FFN server of this instance has the same number; wait ten minutes for its address.
  for (( tries = 0; tries < 600; tries++ )); do
    if [[ -s "$RUN/$FFN_GROUP.$INDEX.url" ]]; then break; fi
    sleep 1
  done
  AFD_HOST="$(cat -- "$RUN/$FFN_GROUP.$INDEX.url")"
  AFD_HOST="${{AFD_HOST#http://}}"
  export AFD_PORT="$(( ${{AFD_HOST##*:}} + {offset} ))" AFD_HOST="${{AFD_HOST%:*}}"
else
  export AFD_HOST="${{MASTER_ADDR:-${{SLURMD_NODENAME:-$(hostname)}}}}"
fi
"""

_ADDRESSES: Final = """\

addresses() {
  # Arguments: group, count; waits up to ten minutes for each address file.
  local index tries
  for (( index = 0; index < $2; index++ )); do
    for (( tries = 0; tries < 600; tries++ )); do
      if [[ -s "$RUN/$1.$index.url" ]]; then break; fi
      sleep 1
    done
    cat -- "$RUN/$1.$index.url"
  done
}
"""


def _steps(shape: GroupShape, *, component: int | None, engine: str, ffn: str | None = None) -> str:
    group = shape.group
    ffn_group = "" if ffn is None else f"FFN_GROUP={ffn} "
    het = "" if component is None else f"--het-group={component} "
    kill = "--kill-on-bad-exit=1"
    cpus = f"--cpus-per-gpu={_CPUS_PER_GPU}"
    if shape.nodes == 1:
        return (
            f"{ffn_group}srun {het}--ntasks={group.count} --gpus-per-task={group.devices} {cpus}"
            f" {kill} \\\n"
            f'  bash "$JOB/instance.sh" {shape.name} task {shape.first} 1 &\n'
        )
    tasks = shape.nodes * _tasks_per_node(shape, engine=engine)
    mpi = "--mpi=pmix " if engine in MPI_ENGINES else ""
    nodes = "SLURM_JOB_NODELIST" + ("" if component is None else f"_HET_GROUP_{component}")
    return f"""\
mapfile -t HOSTS < <(scontrol show hostnames "${nodes}")
for (( index = 0; index < {group.count}; index++ )); do
  hosts="$(IFS=,; echo "${{HOSTS[*]:index * {shape.nodes}:{shape.nodes}}}")"
  {ffn_group}srun {het}{mpi}--nodes={shape.nodes} --nodelist="$hosts" --ntasks={tasks} \\
    --ntasks-per-node={tasks // shape.nodes} --gpus-per-node={shape.devices_per_node} \\
    {cpus} {kill} \\
    bash "$JOB/instance.sh" {shape.name} "$index" {shape.first} {shape.nodes} &
done
"""


def _router(shapes: tuple[GroupShape, ...], *, engine: str) -> str:
    lists: dict[str, list[str]] = {}
    for shape in shapes:
        name = url_list(shape.group.role)
        if name is not None:
            lists.setdefault(f"{name}_URLS", []).append(
                f"addresses {shape.name} {shape.group.count}"
            )
    assignments = "".join(f'{name}="$({"; ".join(calls)})"\n' for name, calls in lists.items())
    return (
        f"{_ADDRESSES}{assignments}export {' '.join(lists)}\n"
        f'bash "$ENGINE/router.sh" > "$RUN/router.log" 2>&1 &\n'
    )
