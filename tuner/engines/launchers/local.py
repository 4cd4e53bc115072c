"""Emits `local.sh`, which starts every instance and the router on one machine.

Devices are assigned in order, so that an instance's devices are neighbours; the script refuses a
machine with fewer devices than the plan. It starts the scripts of the engine's folder beside it,
and stops everything when one process stops.
"""

import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from tuner.engines.files import EmittedFile, comment
from tuner.engines.launchers.benchmark import benchmark_files
from tuner.engines.serving.command import FIRST_PORT, PORTS_PER_INSTANCE, checks
from tuner.engines.serving.placement import ServedPlacement, placement_notes
from tuner.engines.serving.router import ROUTER_PORT, needs_router
from tuner.engines.serving.shape import (
    group_shapes,
    needs_draft_model,
    url_list,
    vendor_traits,
    vendors,
)
from tuner.engines.serving.statement import statement
from tuner.engines.vllm_afd.write import has_afd_units
from tuner.errors import UnknownTargetError
from tuner.plans.serve import VerifiedServing


def emit(verified: VerifiedServing, placement: ServedPlacement | None) -> tuple[EmittedFile, ...]:
    """Return the script and the benchmark.

    Raises:
        UnknownTargetError: devices are of several vendors, which no machine holds.
    """
    names = vendors(verified)
    if len(names) > 1:
        raise UnknownTargetError(
            f"emit: no machine holds devices of {' and '.join(names)}, which local would start"
            " together; emit slurm or kubernetes"
        )
    pools = sorted({group.pool for group in verified.decision.instances})
    lines = [
        *statement(verified),
        "",
        "Usage: MODEL=... ./local.sh [flags of every engine, such as --load-format dummy]",
        "Logs are written to the folder LOGS, by default ./logs.",
        f"Requests go to http://127.0.0.1:{ROUTER_PORT if needs_router(verified) else FIRST_PORT}.",
        *placement_notes(verified, placement),
    ]
    if len(pools) > 1:
        lines.append(
            f"The plan is for several pools ({', '.join(pools)}); here they are one machine."
        )
    folder = f"$HERE/../{verified.plan.goal.engine.name}"
    text = "#!/usr/bin/env bash\n" + comment(lines) + one_machine_bash(verified, scripts=folder)
    script = EmittedFile(path=PurePosixPath("local.sh"), text=text, executable=True)
    return (script, *benchmark_files(verified))


def one_machine_bash(verified: VerifiedServing, *, scripts: str, nodes: int = 1) -> str:
    """Return bash that starts every instance and the router on the machine that it runs on.

    Args:
        verified: the deployment.
        scripts: folder of the engine's scripts.
        nodes: machines that it runs on, as much of every instance on each; the first has the
            router.
    """
    traits = vendor_traits(verified, verified.decision.instances[0])
    return (
        _HEAD.format(
            scripts=scripts,
            num_devices=verified.decision.num_devices // nodes,
            spread="NNODES=1 HOST_IP=127.0.0.1" if nodes == 1 else f"NNODES={nodes}",
            count_command=traits.count_command,
            visible_devices=traits.visible_devices,
            checks=checks(draft_model=needs_draft_model(verified)),
        )
        + ("export AFD_HOST=127.0.0.1\n" if has_afd_units(verified) else "")
        + (_RANK_CHECK if nodes > 1 else "")
        + "".join(_starts(verified, between=traits.between_devices, nodes=nodes))
        + _tail(verified, nodes=nodes)
    )


_HEAD = """\
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)"
{checks}export MODEL
ENGINE="{scripts}"
LOGS="${{LOGS:-$PWD/logs}}"
mkdir -p -- "$LOGS"

if [[ -z "${{AVAILABLE:-}}" ]]; then
  AVAILABLE="$({{ {count_command}; }} 2> /dev/null || true)"
  if (( ${{AVAILABLE:-0}} == 0 )); then
    echo "no devices were counted ({count_command}); AVAILABLE says how many there are" >&2
    AVAILABLE={num_devices}
  fi
fi
if (( AVAILABLE < {num_devices} )); then
  echo "this machine has $AVAILABLE devices, the plan is for {num_devices}" >&2
  exit 2
fi

trap 'jobs -p | xargs --no-run-if-empty kill 2> /dev/null || true' EXIT

FLAGS=("$@")

start() {{
  # Arguments: group, port, devices.
  {visible_devices}="$3" PORT="$2" {spread} \\
    bash "$ENGINE/$1.sh" ${{FLAGS[@]+"${{FLAGS[@]}}"}} > "$LOGS/$1-$2.log" 2>&1 &
}}
"""


_RANK_CHECK = """\
: "${NODE_RANK:?set NODE_RANK and MASTER_ADDR}"
: "${MASTER_ADDR:?set NODE_RANK and MASTER_ADDR}"
export NODE_RANK MASTER_ADDR
LOGS="$LOGS/$NODE_RANK"
mkdir -p -- "$LOGS"
"""


def _starts(verified: VerifiedServing, *, between: str, nodes: int) -> Iterator[str]:
    device = 0
    for shape in group_shapes(verified):
        for index in range(shape.group.count):
            devices = range(device, device + shape.group.devices // nodes)
            device = devices.stop
            device_list = shlex.quote(between.join(map(str, devices)))
            yield f"start {shape.name} {_port(shape.first + index)} {device_list}\n"


def _port(instance: int) -> int:
    return FIRST_PORT + PORTS_PER_INSTANCE * instance


def _tail(verified: VerifiedServing, *, nodes: int) -> str:
    if not needs_router(verified):
        return "wait -n\n"
    urls: dict[str, list[str]] = {}
    host = "127.0.0.1" if nodes == 1 else "$MASTER_ADDR"
    for shape in group_shapes(verified):
        name = url_list(shape.group.role)
        if name is None:
            continue
        urls.setdefault(f"{name}_URLS", []).extend(
            f"http://{host}:{_port(shape.first + index)}" for index in range(shape.group.count)
        )
    lists = " ".join(f'{name}="{" ".join(addresses)}"' for name, addresses in urls.items())
    router = f'{lists} bash "$ENGINE/router.sh" > "$LOGS/router.log" 2>&1 &\n'
    if nodes > 1:
        router = f"if (( NODE_RANK == 0 )); then\n  {router}fi\n"
    return f"{router}wait -n\n"
