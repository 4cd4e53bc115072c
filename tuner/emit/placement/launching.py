"""The shell script that starts an engine with an emitted placement.

The script finds its own folder, wherever it is called from, and passes what the user adds on to the
engine. On several nodes it runs once on each, told apart by NODE_RANK.
"""

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

from tuner.emit.files import EmittedFile, comment
from tuner.emit.placement.statement import statement
from tuner.place_plan import VerifiedPlacement

_OWN_FOLDER: Final = 'here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"\n'

_WHICH_NODE: Final = """\
node="${NODE_RANK:?set NODE_RANK and MASTER_ADDR}"
: "${MASTER_ADDR:?set NODE_RANK and MASTER_ADDR}"
"""


def run_script(
    verified: VerifiedPlacement, *, usage: Iterable[str], command: Iterable[str]
) -> EmittedFile:
    """Return `run.sh`.

    Args:
        verified: what is started.
        usage: lines for people.
        command: words of the command as bash reads them, quoted where they must be; the user's own
            arguments follow.
    """
    nodes = num_nodes(verified)
    words = tuple(command)
    lines = [*statement(verified), "", *usage]
    if nodes > 1:
        lines.append(f"Run it on each of {nodes} nodes: NODE_RANK=0..{nodes - 1} MASTER_ADDR=node0")
    text = (
        "#!/usr/bin/env bash\n"
        + comment(lines)
        + "set -euo pipefail\n"
        + (_OWN_FOLDER if any("$here" in word for word in words) else "")
        + (_WHICH_NODE if nodes > 1 else "")
        + "exec "
        + " \\\n  ".join((*words, '"$@"'))
        + "\n"
    )
    return EmittedFile(path=PurePosixPath("run.sh"), text=text, executable=True)


def num_nodes(verified: VerifiedPlacement) -> int:
    """Return the machines that the ranks stand on."""
    return -(-verified.decision.num_devices // verified.decision.ranks_per_node)
