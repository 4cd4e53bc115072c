"""AFD with vllm-project/afd-plugin: flags, addresses and scripts of attention and FFN servers.

    AFD_HOST  first machine of the FFN server
    AFD_PORT  rendezvous of all ranks of an AFD unit: 30 above the FFN server's PORT

An AFD unit is one attention server and its FFN server. Instance i of an attention group belongs to
instance i of the paired expert group, whose PORT is as many instances further. A unit that fits on
one machine has a script that starts both servers. Facts and their source:
tuner/engines/vllm_afd/capabilities.py.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Final

from tuner.config.serve import Role
from tuner.engines.files import EmittedFile, comment
from tuner.engines.serving.command import FIRST_PORT, PORTS_PER_INSTANCE
from tuner.engines.serving.shape import GroupShape, group_release, group_shapes
from tuner.engines.serving.statement import brief_statement
from tuner.plans.serve import VerifiedServing

RENDEZVOUS_PORT_OFFSET: Final = 30
"""Distance from the FFN server's PORT to AFD_PORT; some instances of the connector use one port per
FFN rank after it, 64 at most."""
SERVERS: Final = frozenset({Role.ATTENTION, Role.EXPERT})
_PLUGIN_ROLE: Final = {Role.ATTENTION: "attention", Role.EXPERT: "ffn"}


def has_afd_units(verified: VerifiedServing) -> bool:
    """Say whether the deployment has attention and FFN servers."""
    return any(group.role in SERVERS for group in verified.decision.instances)


def afd_units(shapes: Sequence[GroupShape]) -> tuple[tuple[GroupShape, GroupShape], ...]:
    """Return attention groups with the groups of their FFN servers, in order."""
    attention, expert = (
        [shape for shape in shapes if shape.group.role is role]
        for role in (Role.ATTENTION, Role.EXPERT)
    )
    return tuple(zip(attention, expert, strict=True))


def server_pair(verified: VerifiedServing, shape: GroupShape) -> tuple[GroupShape, GroupShape]:
    """Return both servers of the unit that a server belongs to.

    Raises:
        ValueError: it is not a server of an AFD unit.
    """
    for pair in afd_units(group_shapes(verified)):
        if shape.name in (pair[0].name, pair[1].name):
            return pair
    raise ValueError(f"{shape.name} is not a server of an AFD unit")


def afd_flags(verified: VerifiedServing, shape: GroupShape) -> Iterator[str]:
    """Yield the flags that make an instance a server of an AFD unit."""
    attention, expert = server_pair(verified, shape)
    capabilities = group_release(verified, shape.group).afd
    pool = next(pool for pool in verified.plan.cluster.pools if pool.name == shape.group.pool)
    generation = None if pool.device is None else pool.sheet.generation
    connector = None if capabilities is None else capabilities.connector(generation)
    if connector is None:
        raise ValueError(f"{shape.name}: no connector runs on {generation} devices")
    config = {
        "role": _PLUGIN_ROLE[shape.group.role],
        "connector": connector.name,
        "host": "AFD_HOST",
        "port": "AFD_PORT",
        "num_attention_ranks": attention.group.devices,
        "num_ffn_ranks": expert.group.devices,
    }
    text = json.dumps({"afd": config})
    for name in ("AFD_HOST", "AFD_PORT"):
        text = text.replace(f'"{name}"', f'"\'"${name}"\'"')
    yield f"--additional-config '{text}'"
    yield f"--compilation-config '{json.dumps({'cudagraph_mode': connector.graphs})}'"


def afd_address(verified: VerifiedServing, shape: GroupShape) -> str:
    """Return bash that sets the rendezvous address of a unit's ranks."""
    attention, expert = server_pair(verified, shape)
    if shape.group.role is Role.EXPERT:
        return (
            'AFD_HOST="${AFD_HOST:-${MASTER_ADDR:-$HOST_IP}}"\n'
            f'AFD_PORT="${{AFD_PORT:-$((PORT + {RENDEZVOUS_PORT_OFFSET}))}}"\n'
        )
    behind = PORTS_PER_INSTANCE * (expert.first - attention.first) + RENDEZVOUS_PORT_OFFSET
    return (
        ': "${AFD_HOST:?set AFD_HOST to the first machine of its FFN server}"\n'
        f'AFD_PORT="${{AFD_PORT:-$((PORT + {behind}))}}"\n'
    )


def afd_notes(verified: VerifiedServing, shape: GroupShape) -> Iterator[str]:
    """Yield notes for the user who starts one server of a unit."""
    if shape.group.role not in SERVERS:
        return
    attention, expert = server_pair(verified, shape)
    if shape.group.role is Role.ATTENTION:
        yield (
            f"Each needs an instance of {expert.name}.sh: set AFD_HOST to the first machine of that"
            " instance, and AFD_PORT unless its PORT is"
            f" {PORTS_PER_INSTANCE * (expert.first - attention.first)} above this one's."
        )
    else:
        yield (
            f"Each serves an instance of {attention.name}.sh and takes no requests; their ranks"
            " rendezvous at AFD_HOST:AFD_PORT, by default this machine and PORT +"
            f" {RENDEZVOUS_PORT_OFFSET}."
        )
    yield (
        "Start both together, in either order: ranks time out if the others have not loaded"
        " their weights two minutes later."
    )


def one_machine_units(verified: VerifiedServing) -> tuple[tuple[GroupShape, GroupShape], ...]:
    """Return the units that fit on one machine."""
    sizes = {pool.name: pool.devices_per_node for pool in verified.plan.cluster.pools}
    return tuple(
        (attention, expert)
        for attention, expert in afd_units(group_shapes(verified))
        if attention.group.devices + expert.group.devices <= sizes[attention.group.pool]
    )


def afd_unit_name(attention: GroupShape) -> str:
    """Return the name of the script that starts a whole unit."""
    return attention.name.replace("attention", "cell", 1)


def afd_unit_scripts(verified: VerifiedServing) -> Iterator[EmittedFile]:
    """Yield a script for every kind of unit that fits on one machine."""
    for attention, expert in one_machine_units(verified):
        attention_devices, ffn_devices = attention.group.devices, expert.group.devices
        num_devices = attention_devices + ffn_devices
        lines = (
            *brief_statement(verified),
            "",
            f"Usage: CUDA_VISIBLE_DEVICES={','.join(map(str, range(num_devices)))} MODEL=..."
            f" [PORT=...] ./{afd_unit_name(attention)}.sh",
            f"Starts {attention.name}.sh on the first {attention_devices} of the devices and"
            f" {expert.name}.sh on the other {ffn_devices}, and stops both when one stops.",
        )
        text = (
            "#!/usr/bin/env bash\n"
            + comment(lines)
            + _UNIT_SCRIPT.format(
                attention=attention.name,
                expert=expert.name,
                split=attention_devices,
                all=num_devices,
                behind=PORTS_PER_INSTANCE * (expert.first - attention.first),
                offset=RENDEZVOUS_PORT_OFFSET,
                first=FIRST_PORT,
            )
        )
        path = PurePosixPath(f"{afd_unit_name(attention)}.sh")
        yield EmittedFile(path=path, text=text, executable=True)


_UNIT_SCRIPT: Final = """\
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)"
PORT="${{PORT:-{first}}}"
IFS=, read -r -a DEVICES <<< "${{CUDA_VISIBLE_DEVICES:?set it to {all} devices}}"
if (( ${{#DEVICES[@]}} != {all} )); then
  echo "CUDA_VISIBLE_DEVICES has ${{#DEVICES[@]}} devices, the AFD unit takes {all}" >&2
  exit 2
fi
export AFD_HOST=127.0.0.1 AFD_PORT="$((PORT + {behind} + {offset}))" NNODES=1
trap 'jobs -p | xargs --no-run-if-empty kill 2> /dev/null || true' EXIT

devices() {{
  local IFS=,
  echo "$*"
}}
CUDA_VISIBLE_DEVICES="$(devices "${{DEVICES[@]:{split}}}")" PORT="$((PORT + {behind}))" \\
  bash "$HERE/{expert}.sh" &
CUDA_VISIBLE_DEVICES="$(devices "${{DEVICES[@]:0:{split}}}")" PORT="$PORT" \\
  bash "$HERE/{attention}.sh" "$@" &
wait -n
"""
