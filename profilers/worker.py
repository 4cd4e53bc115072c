"""One rank that a session started: `python -P -m profilers.worker SCRATCH RANK RANKS PIPE PARENT`.

It reports over the pipe, a JSON object a line: `{}` for each case that it is done with, an event
for each case from rank 0, and an error before it exits. It leaves when its parent is gone or
sends SIGTERM.
"""

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from profilers.errors import LostPeersError, ProfilerError
from profilers.job import Job
from profilers.local_ranks import LOOPBACK_ONLY, STORE_NAME, leave_with
from profilers.progress import ProgressEvent
from profilers.ranks import RankInfo


def main(arguments: list[str]) -> int:
    """Measure as one rank; exit code 0, or 1 after reporting an error."""
    scratch, rank, ranks, pipe, parent = arguments[0], *map(int, arguments[1:])
    signal.signal(signal.SIGTERM, _leave)
    leave_with(parent, folder=Path(scratch))
    job = Job.model_validate_json((Path(scratch) / "job.json").read_bytes())
    info = RankInfo(rank=rank, world=ranks, local_rank=rank, local_world=ranks)

    def report(message: dict[str, Any]) -> None:
        os.write(pipe, (json.dumps(message) + "\n").encode())

    def progress(event: ProgressEvent) -> None:
        report(event.model_dump())

    os.environ.update(LOOPBACK_ONLY)
    try:
        from profilers.rank_loop import run_rank

        run_rank(
            job,
            info=info,
            rendezvous=Path(scratch) / STORE_NAME,
            progress=progress,
            alive=lambda: report({}),
        )
    except ProfilerError as error:
        report(
            {
                "error": str(error),
                "kind": type(error).__name__,
                "lost_peers": isinstance(error, LostPeersError),
            }
        )
        return 1
    return 0


def _leave(_number: int, _stack: FrameType | None) -> NoReturn:
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
