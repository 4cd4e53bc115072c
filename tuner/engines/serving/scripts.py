"""Emits one script per group, a router and a benchmark: the targets `sglang`, `vllm`, `trtllm`.

A group's script starts one machine of one of its instances; the user chooses the machines.
"""

from pathlib import PurePosixPath
from typing import Final

from tuner.engines.files import EmittedFile, comment
from tuner.engines.launchers.benchmark import benchmark_files
from tuner.engines.launchers.local import one_machine_bash
from tuner.engines.serving.command import PORTS_PER_INSTANCE
from tuner.engines.serving.engines import MPI_ENGINES, engine_files, server_bash
from tuner.engines.serving.placement import ServedPlacement, placement_lines
from tuner.engines.serving.router import by_nginx, needs_router, router_bash
from tuner.engines.serving.shape import (
    MACHINE,
    GroupShape,
    group_shapes,
    is_disaggregated,
    needs_draft_model,
    one_machine,
    vendor_traits,
)
from tuner.engines.serving.statement import brief_statement, group_notes, statement
from tuner.engines.vllm_afd.write import afd_notes, afd_unit_scripts, has_afd_units
from tuner.plans.serve import VerifiedServing

_OWN_FOLDER: Final = 'FILES="${FILES:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)}"\n'


def emit(verified: VerifiedServing, placement: ServedPlacement | None) -> tuple[EmittedFile, ...]:
    """Return the scripts and the files that they read."""
    machine = one_machine(verified)
    return (
        *(_script(verified, shape, placement) for shape in group_shapes(verified)),
        *afd_unit_scripts(verified),
        *engine_files(verified, placement),
        *((_router(verified),) if needs_router(verified) else ()),
        *((_machine(verified, machine),) if machine is not None else ()),
        *benchmark_files(verified),
    )


def _script(
    verified: VerifiedServing, shape: GroupShape, placement: ServedPlacement | None
) -> EmittedFile:
    group = shape.group
    draft = "DRAFT_MODEL=... " if needs_draft_model(verified) else ""
    lines = [
        *statement(verified),
        "",
        f"Usage: MODEL=... {draft}[PORT=...] ./{shape.name}.sh [more flags of the engine]",
        *group_notes(verified, shape),
        *afd_notes(verified, shape),
        *placement_lines(verified, placement, shape),
        f"Instances to start: {group.count}. Instances on one machine need PORTs"
        f" {PORTS_PER_INSTANCE} apart and devices of their own"
        f" ({vendor_traits(verified, group).visible_devices}).",
    ]
    if (machine := one_machine(verified)) is not None:
        where = "one machine" if machine.nodes == 1 else f"the same {machine.nodes} machines"
        lines.append(f"All instances belong on {where}: {MACHINE}.sh starts them together.")
    if shape.nodes > 1 and verified.plan.goal.engine.name in MPI_ENGINES:
        lines.append(
            f"Each is an MPI job: srun --mpi=pmix --nodes={shape.nodes} --ntasks={group.devices}"
            f" --ntasks-per-node={shape.devices_per_node} ./{shape.name}.sh"
        )
    elif shape.nodes > 1:
        lines.append(_on_machines(shape))
    text = (
        "#!/usr/bin/env bash\n"
        + comment(lines)
        + "set -euo pipefail\n"
        + _OWN_FOLDER
        + server_bash(verified, shape, placement)
    )
    return EmittedFile(path=PurePosixPath(f"{shape.name}.sh"), text=text, executable=True)


def _on_machines(shape: GroupShape) -> str:
    return (
        f"Run it on {shape.nodes} machines each, with NODE_RANK 0 to {shape.nodes - 1} and"
        " MASTER_ADDR of the first; the first takes the requests."
    )


def _machine(verified: VerifiedServing, machine: GroupShape) -> EmittedFile:
    lines = (
        *brief_statement(verified),
        "",
        f"Usage: MODEL=... ./{MACHINE}.sh [flags of every engine]",
        "Starts a machine's share of every instance, and the router on the first. KV caches are"
        " copied from device to device, which processes can that share a PID namespace and see each"
        " other's devices: start it in one container with all of a machine's.",
        *((_on_machines(machine),) if machine.nodes > 1 else ()),
    )
    body = one_machine_bash(verified, scripts="$HERE", nodes=machine.nodes)
    text = "#!/usr/bin/env bash\n" + comment(lines) + body
    return EmittedFile(path=PurePosixPath(f"{MACHINE}.sh"), text=text, executable=True)


def _router(verified: VerifiedServing) -> EmittedFile:
    named = "PREFILL_URLS and DECODE_URLS" if is_disaggregated(verified) else "WORKER_URLS"
    text = (
        "#!/usr/bin/env bash\n"
        + comment(
            (
                *statement(verified),
                "",
                f"Usage: set {named} to addresses such as http://host:30000, separated by spaces,"
                " one per instance in the order above, and run ./router.sh [more flags of the"
                " router]",
                *(
                    ("DECODE_URLS are those of attention servers; FFN servers take no requests.",)
                    if has_afd_units(verified)
                    else ()
                ),
                *(
                    ("The router is nginx, which must be installed here.",)
                    if by_nginx(verified)
                    else ()
                ),
            )
        )
        + "set -euo pipefail\n"
        + router_bash(verified)
    )
    return EmittedFile(path=PurePosixPath("router.sh"), text=text, executable=True)
