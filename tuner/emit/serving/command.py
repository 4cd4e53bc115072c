"""The command of an engine's server as bash, and the variables that it reads.

    MODEL        path or name of the weights
    DRAFT_MODEL  likewise of a draft layer, where one is trained apart from the model
    PORT         of its HTTP server; the next 199 belong to the instance too, and SGLang takes a few
                 from PORT + 233 on for itself (ZMQ_TCP_PORT_DELTA), clear of the next instance's
    NNODES       machines of the instance; NODE_RANK this one's number; MASTER_ADDR the first one
    HOST_IP      address under which other instances reach this machine
    PLACEMENT    folder of a placement of experts, where one is served

Words are bash as it stands: whatever is not written here passes through `shlex.quote` first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner.emit.serving.shape import GroupShape

PORTS_PER_INSTANCE = 200
FIRST_PORT = 30_000

RENDEZVOUS = '"$((PORT + 100))"'
"""Port where the machines of an instance meet; SGLang takes those after it too."""
BOOTSTRAP_OFFSET = 10
BOOTSTRAP = f'"$((PORT + {BOOTSTRAP_OFFSET}))"'
"""Port where decode instances ask a prefill instance for KV caches."""
SIDE_CHANNEL_OFFSET = 20
SIDE_CHANNEL = f'"$((PORT + {SIDE_CHANNEL_OFFSET}))"'
"""First of the ports where workers introduce themselves, one per data-parallel rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """One process of an instance."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Values as bash words."""
    before: str = ""
    """Bash that runs first."""

    @property
    def bash(self) -> str:
        """The lines that end in the server."""
        exports = "".join(f"export {name}={value}\n" for name, value in self.environment.items())
        return f"{exports}{self.before}exec " + " \\\n  ".join(self.words) + "\n"


MODEL_CHECK = ': "${MODEL:?set MODEL to the path or name of the weights}"\n'
DRAFT_CHECK = ': "${DRAFT_MODEL:?set DRAFT_MODEL to the path or name of the EAGLE draft layer}"\n'


def checks(*, draft_model: bool) -> str:
    """Return bash that stops where weights are not named."""
    return MODEL_CHECK + (DRAFT_CHECK if draft_model else "")


def variables(shape: GroupShape, *, meets_by_address: bool, draft_model: bool = False) -> str:
    """Return bash that fills the variables and refuses another number of machines.

    Args:
        shape: what is started.
        meets_by_address: the machines of an instance find each other by the address of the first;
            else a launcher such as MPI brings them together.
        draft_model: DRAFT_MODEL is read.
    """
    lines = [
        f'PORT="${{PORT:-{FIRST_PORT}}}"',
        'HOST_IP="${HOST_IP:-$(hostname -i)}"',
        'HOST_IP="${HOST_IP%% *}"',
    ]
    if shape.nodes > 1:
        lines += [
            f'NNODES="${{NNODES:-{shape.nodes}}}"',
            f'case "$NNODES" in 1 | {shape.nodes}) ;; *)',
            f'  echo "NNODES $NNODES is neither 1 nor {shape.nodes}, the machines of one instance"'
            " >&2",
            "  exit 2 ;;",
            "esac",
        ]
    if shape.nodes > 1 and meets_by_address:
        lines += [
            "if (( NNODES > 1 )); then",
            '  : "${NODE_RANK:?set NODE_RANK and MASTER_ADDR}"',
            '  : "${MASTER_ADDR:?set NODE_RANK and MASTER_ADDR}"',
            "fi",
            'NODE_RANK="${NODE_RANK:-0}"',
        ]
    return checks(draft_model=draft_model) + "".join(f"{line}\n" for line in lines)
