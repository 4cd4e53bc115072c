"""Emits `job.sbatch`: one Slurm job whose components ask for exactly the devices of the plan.

Every group is a component of a heterogeneous job (sbatch(1), `#SBATCH hetjob`). Instances of one
machine are tasks of one step with --gpus-per-task, so that Slurm packs them; an instance over
several machines is a step of its own on machines of its own. `instance.sh` tells a task which
instance it is, and writes down the address that the router waits for.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

from tuner.emit.files import JOB_FOLDER, JOB_NAME, EmittedFile, comment, label
from tuner.emit.serving.afd import MEETING_OFFSET, cell_name, cell_pairs, one_machine_cells
from tuner.emit.serving.benchmark import bench_files
from tuner.emit.serving.command import FIRST_PORT, PORTS_PER_INSTANCE, checks
from tuner.emit.serving.engines import MPI_ENGINES
from tuner.emit.serving.placement import ServedPlacement, placement_notes
from tuner.emit.serving.router import ROUTER_PORT, needs_router
from tuner.emit.serving.shape import GroupShape, group_shapes, needs_draft_model, url_list
from tuner.emit.serving.statement import statement
from tuner.serve_plan import VerifiedServing

_CPUS_PER_GPU: Final = 8
"""Cores beside each device; a task has one otherwise, which every process of an engine would share.
Servers of 8 devices have more than 64 (NVIDIA DGX A100: 128, DGX H100: 112)."""
_PORT_SLOTS: Final = 150
"""Instances with ports of their own below 60000; later ones begin again."""


def emit(verified: VerifiedServing, placement: ServedPlacement | None) -> tuple[EmittedFile, ...]:
    """Return the batch script, what its tasks run, and the benchmark."""
    shapes = _components(verified)
    engine, ffns = verified.plan.goal.engine.name, _ffn_groups(verified)
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
        + (_router(shapes, engine=engine) if needs_router(verified) else "")
        + "wait -n\n"
    )
    return (
        EmittedFile(path=PurePosixPath(JOB_NAME), text=text, executable=True),
        EmittedFile(
            path=PurePosixPath("instance.sh"),
            text="#!/usr/bin/env bash\n"
            + comment((*statement(verified), "", "Started by job.sbatch, once a task."))
            + _INSTANCE.format(
                engine=engine,
                first=FIRST_PORT,
                each=PORTS_PER_INSTANCE,
                slots=_PORT_SLOTS,
                meets=_MEETS.format(offset=MEETING_OFFSET) if ffns else "",
            ),
            executable=True,
        ),
        *bench_files(verified),
    )


def _components(verified: VerifiedServing) -> tuple[GroupShape, ...]:
    """Return the groups, but a cell that fits a machine as one, so that its links are there."""
    whole = {one.name: (one, other) for one, other in one_machine_cells(verified)}
    inside = {other.name for _, other in whole.values()}
    found = []
    for shape in group_shapes(verified):
        if shape.name in whole:
            devices = sum(one.group.devices for one in whole[shape.name])
            cell = shape.group.model_copy(update={"devices": devices})
            found.append(replace(shape, name=cell_name(shape), group=cell))
        elif shape.name not in inside:
            found.append(shape)
    return tuple(found)


def _ffn_groups(verified: VerifiedServing) -> dict[str, str]:
    """Return, by attention group, the group of FFN servers on machines of their own."""
    whole = {one.name for one, _ in one_machine_cells(verified)}
    pairs = cell_pairs(group_shapes(verified))
    return {one.name: other.name for one, other in pairs if one.name not in whole}


def _directives(verified: VerifiedServing, shapes: tuple[GroupShape, ...]) -> str:
    name = f"moetune-{label(verified.plan.model.name)}"
    head = f"#SBATCH --job-name={name}\n#SBATCH --output=%x-%j.out\n"
    engine = verified.plan.goal.engine.name
    return head + "#SBATCH hetjob\n".join(
        "".join(f"#SBATCH {option}\n" for option in _asks(shape, engine=engine)) for shape in shapes
    )


def _asks(shape: GroupShape, *, engine: str) -> Iterator[str]:
    group = shape.group
    yield f"--cpus-per-gpu={_CPUS_PER_GPU}"
    if shape.nodes == 1:
        yield f"--ntasks={group.count}"
        yield f"--gpus-per-task={group.devices}"
        return
    yield f"--nodes={group.count * shape.nodes}"
    yield f"--ntasks-per-node={_tasks_per_node(shape, engine=engine)}"
    yield f"--gpus-per-node={shape.devices_per_node}"


def _tasks_per_node(shape: GroupShape, *, engine: str) -> int:
    return shape.devices_per_node if engine in MPI_ENGINES else 1


def _usage(verified: VerifiedServing, shapes: tuple[GroupShape, ...]) -> Iterator[str]:
    named = "MODEL=... DRAFT_MODEL=..." if needs_draft_model(verified) else "MODEL=..."
    port = ROUTER_PORT if needs_router(verified) else FIRST_PORT
    yield f"Submit it by this name: {named} sbatch [PATH/]{JOB_NAME}"
    yield "The machines must share its folder and the one that you submit it from."
    pools = [shape.group.pool for shape in shapes]
    if len(shapes) > 1:
        yield f"Its components, in order, are for the pools {', '.join(pools)}: give each its own"
        yield "partition or constraint, sbatch --partition=A : --partition=B job.sbatch"
    yield "Where the site gives little memory by default, add --mem=0 or what the weights need."
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

"""

_INSTANCE: Final = """\
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)"
# Which group, which of its instances ("task": each task is one), how many instances the groups
# before it have, machines of an instance.
GROUP="$1" INDEX="$2" FIRST="$3"
export NNODES="$4" NODE_RANK=0
shift 4
ANSWERS=yes
if [[ "$INDEX" == task ]]; then
  INDEX="$SLURM_PROCID"
else
  NODE_RANK="$SLURM_NODEID"
  MASTER_ADDR="$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)"
  export MASTER_ADDR
  if (( SLURM_PROCID > 0 )); then ANSWERS=no; fi
fi
export PORT="$(( {first} + (FIRST + INDEX) % {slots} * {each} ))"
if [[ "$ANSWERS" == yes ]]; then
  printf 'http://%s:%s\\n' "${{SLURMD_NODENAME:-$(hostname)}}" "$PORT" > "$RUN/$GROUP.$INDEX.url"
fi
{meets}exec bash "$HERE/../{engine}/$GROUP.sh" "$@"
"""

_MEETS: Final = """\
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
  # Of which group, how many; waits ten minutes for each to be written down.
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
    meets = "" if ffn is None else f"FFN_GROUP={ffn} "
    het = "" if component is None else f"--het-group={component} "
    kill = "--kill-on-bad-exit=1"
    cpus = f"--cpus-per-gpu={_CPUS_PER_GPU}"
    if shape.nodes == 1:
        return (
            f"{meets}srun {het}--ntasks={group.count} --gpus-per-task={group.devices} {cpus}"
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
  {meets}srun {het}{mpi}--nodes={shape.nodes} --nodelist="$hosts" --ntasks={tasks} \\
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
    found = "".join(f'{name}="$({"; ".join(calls)})"\n' for name, calls in lists.items())
    return (
        f"{_ADDRESSES}{found}export {' '.join(lists)}\n"
        f'bash "$ENGINE/router.sh" > "$RUN/router.log" 2>&1 &\n'
    )
