"""Attention and FFN servers that vllm-project/afd-plugin joins: their flags, addresses and scripts.

    AFD_HOST  first machine of the FFN server
    AFD_PORT  where all ranks of a cell meet: 30 above the FFN server's PORT

Instance i of an attention group belongs to instance i of the expert group that pairs with it, whose
PORT lies as many instances behind. A cell that fits a machine has a script that starts both of its
servers. Facts and their source: tuner/spec/serving/manifests/vllm_afd.py.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Final

from tuner.devices.catalogue import find_device
from tuner.emit.files import EmittedFile, comment
from tuner.emit.serving.command import FIRST_PORT, PORTS_PER_INSTANCE
from tuner.emit.serving.shape import GroupShape, group_shapes, release_of
from tuner.emit.serving.statement import statement
from tuner.serve_plan import Role, VerifiedServing

MEETING_OFFSET: Final = 30
"""Of AFD_PORT to the FFN server's PORT; some copies of the connector take a port for every FFN rank
behind it, of which there are 64 at most."""
SERVERS: Final = frozenset({Role.ATTENTION, Role.EXPERT})
_PLUGIN_ROLE: Final = {Role.ATTENTION: "attention", Role.EXPERT: "ffn"}


def has_cells(verified: VerifiedServing) -> bool:
    """Say whether the deployment has attention and FFN servers."""
    return verified.decision.mode == "attention_expert"


def cell_pairs(shapes: Sequence[GroupShape]) -> tuple[tuple[GroupShape, GroupShape], ...]:
    """Return attention groups with the groups of their FFN servers, in order."""
    attention, expert = (
        [shape for shape in shapes if shape.group.role is role]
        for role in (Role.ATTENTION, Role.EXPERT)
    )
    return tuple(zip(attention, expert, strict=True))


def pair_of(verified: VerifiedServing, shape: GroupShape) -> tuple[GroupShape, GroupShape]:
    """Return the cell of one of its servers.

    Raises:
        ValueError: it is no server of a cell.
    """
    for pair in cell_pairs(group_shapes(verified)):
        if shape.name in (pair[0].name, pair[1].name):
            return pair
    raise ValueError(f"{shape.name} is no server of a cell")


def cell_words(verified: VerifiedServing, shape: GroupShape) -> Iterator[str]:
    """Yield the flags that make an instance a server of a cell."""
    attention, expert = pair_of(verified, shape)
    capabilities = release_of(verified, shape.group).afd
    pools = {pool.name: pool.device for pool in verified.plan.cluster.pools}
    device = pools[shape.group.pool]
    generation = None if device is None else find_device(device).generation
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


def cell_address(verified: VerifiedServing, shape: GroupShape) -> str:
    """Return bash that fills the address at which the ranks of a cell meet."""
    attention, expert = pair_of(verified, shape)
    if shape.group.role is Role.EXPERT:
        return (
            'AFD_HOST="${AFD_HOST:-${MASTER_ADDR:-$HOST_IP}}"\n'
            f'AFD_PORT="${{AFD_PORT:-$((PORT + {MEETING_OFFSET}))}}"\n'
        )
    behind = PORTS_PER_INSTANCE * (expert.first - attention.first) + MEETING_OFFSET
    return (
        ': "${AFD_HOST:?set AFD_HOST to the first machine of its FFN server}"\n'
        f'AFD_PORT="${{AFD_PORT:-$((PORT + {behind}))}}"\n'
    )


def cell_notes(verified: VerifiedServing, shape: GroupShape) -> Iterator[str]:
    """Yield what whoever starts one server of a cell should know."""
    if shape.group.role not in SERVERS:
        return
    attention, expert = pair_of(verified, shape)
    if shape.group.role is Role.ATTENTION:
        yield (
            f"Each is served by an instance of {expert.name}.sh: set AFD_HOST to the first machine"
            " of that one, and AFD_PORT unless its PORT lies"
            f" {PORTS_PER_INSTANCE * (expert.first - attention.first)} above this one's."
        )
    else:
        yield (
            f"Each serves an instance of {attention.name}.sh and takes no requests; its ranks meet"
            " that one's at AFD_HOST:AFD_PORT, by default this machine and PORT +"
            f" {MEETING_OFFSET}."
        )
    yield (
        "Start both together, in either order: ranks give up where the others have not loaded"
        " their weights two minutes later."
    )


def one_machine_cells(verified: VerifiedServing) -> tuple[tuple[GroupShape, GroupShape], ...]:
    """Return the cells that fit a machine whole."""
    sizes = {pool.name: pool.devices_per_node for pool in verified.plan.cluster.pools}
    return tuple(
        (attention, expert)
        for attention, expert in cell_pairs(group_shapes(verified))
        if attention.group.devices + expert.group.devices <= sizes[attention.group.pool]
    )


def cell_name(attention: GroupShape) -> str:
    """Return the name of the script that starts a whole cell."""
    return attention.name.replace("attention", "cell", 1)


def cell_scripts(verified: VerifiedServing) -> Iterator[EmittedFile]:
    """Yield a script for every kind of cell that fits a machine."""
    for attention, expert in one_machine_cells(verified):
        own, ffn = attention.group.devices, expert.group.devices
        lines = (
            *statement(verified),
            "",
            f"Usage: CUDA_VISIBLE_DEVICES={','.join(map(str, range(own + ffn)))} MODEL=..."
            f" [PORT=...] ./{cell_name(attention)}.sh",
            f"Starts {attention.name}.sh on the first {own} of the devices and {expert.name}.sh on"
            f" the other {ffn}, and stops both when one stops.",
        )
        text = (
            "#!/usr/bin/env bash\n"
            + comment(lines)
            + _CELL.format(
                attention=attention.name,
                expert=expert.name,
                own=own,
                all=own + ffn,
                behind=PORTS_PER_INSTANCE * (expert.first - attention.first),
                offset=MEETING_OFFSET,
                first=FIRST_PORT,
            )
        )
        path = PurePosixPath(f"{cell_name(attention)}.sh")
        yield EmittedFile(path=path, text=text, executable=True)


_CELL: Final = """\
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)"
PORT="${{PORT:-{first}}}"
IFS=, read -r -a DEVICES <<< "${{CUDA_VISIBLE_DEVICES:?set it to the {all} devices of the cell}}"
if (( ${{#DEVICES[@]}} != {all} )); then
  echo "CUDA_VISIBLE_DEVICES has ${{#DEVICES[@]}} devices, the cell takes {all}" >&2
  exit 2
fi
export AFD_HOST=127.0.0.1 AFD_PORT="$((PORT + {behind} + {offset}))" NNODES=1
trap 'jobs -p | xargs --no-run-if-empty kill 2> /dev/null || true' EXIT

devices() {{
  local IFS=,
  echo "$*"
}}
CUDA_VISIBLE_DEVICES="$(devices "${{DEVICES[@]:{own}}}")" PORT="$((PORT + {behind}))" \\
  bash "$HERE/{expert}.sh" &
CUDA_VISIBLE_DEVICES="$(devices "${{DEVICES[@]:0:{own}}}")" PORT="$PORT" \\
  bash "$HERE/{attention}.sh" "$@" &
wait -n
"""
