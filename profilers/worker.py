"""One rank that a session started: `python -P -m profilers.worker SCRATCH RANK RANKS PIPE PARENT`.

It reports over the pipe, a JSON object a line: `{}` for each case that it is done with, an event
for each case from rank 0, and an error with its last breath. It leaves when its parent is gone or
asks it to.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from profilers.errors import LostPeersError, ProfilerError
from profilers.job import Job
from profilers.progress import ProgressEvent
from profilers.ranks import RankInfo

WATCH_S = 0.5


def main(arguments: list[str]) -> int:
    """Measure as one rank; exit code 0, or 1 after reporting an error."""
    scratch, rank, ranks, pipe, parent = arguments[0], *map(int, arguments[1:])
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    job = Job.model_validate_json((Path(scratch) / "job.json").read_bytes())
    info = RankInfo(rank=rank, world=ranks, local_rank=rank, local_world=ranks)

    def tell(message: dict[str, Any]) -> None:
        os.write(pipe, (json.dumps(message) + "\n").encode())

    def progress(event: ProgressEvent) -> None:
        tell(event.model_dump())

    # Ranks of one host meet over loopback, whatever the host believes its name to be.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        from profilers.conduct import conduct

        conduct(
            job,
            info=info,
            rendezvous=Path(scratch) / "meet",
            progress=progress,
            alive=lambda: tell({}),
        )
    except ProfilerError as error:
        tell(
            {
                "error": str(error),
                "kind": type(error).__name__,
                "lost_peers": isinstance(error, LostPeersError),
            }
        )
        return 1
    return 0


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(1)


def _watch(parent: int) -> None:
    """Leave at once when the parent is gone: nobody would kill this process any more."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
