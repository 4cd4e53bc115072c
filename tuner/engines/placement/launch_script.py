"""The shell script that starts an engine with an emitted placement.

The script finds its own folder and passes the user's arguments on to the engine. On several nodes
it runs once on each, with NODE_RANK set, unless the engine has a launcher of its own.
"""

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

from tuner.engines.files import EmittedFile, comment
from tuner.engines.placement.statement import statement
from tuner.plans.place import VerifiedPlacement

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
        command: words of the command as bash reads them, quoted where they must be; `"$@"` marks
            the place of the user's arguments.
    """
    words = tuple(command)
    lines = [*statement(verified), "", *usage]
    by_node = any("$node" in word for word in words)
    if by_node:
        last = num_nodes(verified) - 1
        lines.append(f"Run it on each node, with NODE_RANK 0 to {last} and MASTER_ADDR of node 0.")
    text = (
        "#!/usr/bin/env bash\n"
        + comment(lines)
        + "set -euo pipefail\n"
        + (_OWN_FOLDER if any("$here" in word for word in words) else "")
        + (_WHICH_NODE if by_node else "")
        + "exec "
        + " \\\n  ".join(words)
        + "\n"
    )
    return EmittedFile(path=PurePosixPath("run.sh"), text=text, executable=True)


def num_nodes(verified: VerifiedPlacement) -> int:
    """Return the number of machines."""
    return -(-verified.decision.num_devices // verified.decision.ranks_per_node)
