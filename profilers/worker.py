"""One rank that a session started: `python -P -m profilers.worker SCRATCH PIPE`.

profilers/local_ranks.py says in the environment which rank it is. It reports over the pipe, a JSON
object with its rank a line: alone for each case that it is done with, an `event` for each case from
rank 0, and an `error` before it exits. It leaves when its parent is gone or sends SIGTERM.
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
from profilers.local_ranks import PARENT, STORE_NAME, leave_with
from profilers.progress import ProgressEvent
from profilers.ranks import RankInfo

LONGEST_ERROR = 600
"""Characters of a reported error: one write of a line is whole, whichever ranks write beside it."""


def main(arguments: list[str]) -> int:
    """Measure as one rank; exit code 0, or 1 after reporting an error."""
    scratch, pipe = Path(arguments[0]), int(arguments[1])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    signal.signal(signal.SIGTERM, _leave)
    leave_with(int(os.environ[PARENT]), folder=scratch)
    job = Job.model_validate_json((scratch / "job.json").read_bytes())
    info = RankInfo(rank=rank, world=ranks, local_rank=rank, local_world=ranks)

    def report(**message: Any) -> None:
        os.write(pipe, (json.dumps({"rank": rank, **message}) + "\n").encode())

    def progress(event: ProgressEvent) -> None:
        report(event=event.model_dump())

    try:
        from profilers.rank_loop import run_rank

        run_rank(job, info=info, rendezvous=scratch / STORE_NAME, progress=progress, alive=report)
    except ProfilerError as error:
        report(
            error=str(error)[:LONGEST_ERROR],
            kind=type(error).__name__,
            lost_peers=isinstance(error, LostPeersError),
        )
        return 1
    return 0


def _leave(_number: int, _stack: FrameType | None) -> NoReturn:
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
