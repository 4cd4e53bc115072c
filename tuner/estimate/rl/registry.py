"""Reads a launch of reinforcement learning: a file, or a command, of any framework that is read."""

from pathlib import Path
from typing import Final

from tuner.engines.reading.rl_launch import RlLaunch
from tuner.engines.registry import RL_ENGINES, engine_file
from tuner.errors import SpecError
from tuner.estimate.registry import is_command
from tuner.spec.files import read_small_text, shown_path

LONGEST_BYTES: Final = 2 * 2**20
"""Largest launch file."""
FRAMEWORKS: Final = "verl (main_ppo) and NeMo-RL (run_grpo.py)"


def read_rl_launch(launch: str) -> RlLaunch:
    """Read a launch file, or a command that was pasted instead of one.

    Raises:
        SpecError: no such file, or no launch that can be read.
    """
    path = Path(launch)
    is_pasted = is_command(launch, path)
    source = "the command" if is_pasted else shown_path(path)
    text = launch if is_pasted else read_small_text(path, what="launch", most_bytes=LONGEST_BYTES)
    folder = Path() if is_pasted else path.parent

    def beside(name: str) -> str | None:
        near = folder / name
        return read_small_text(near, what="launch") if near.is_file() else None

    for engine in RL_ENGINES:
        reader = engine_file(engine, "read")
        if reader.recognises(text):
            read: RlLaunch = reader.read(text, source=source, beside=beside)
            return read
    raise SpecError(f"{source}: no launch of reinforcement learning that is read: {FRAMEWORKS}")
