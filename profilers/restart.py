"""What restarting the processes of a training job takes, phase by phase.

Every rank starts one more process beside itself, all at the same time, as a launcher would after a
failure (profilers/restart_rank.py):

    process           from asking the system for it until Python runs
    imports           PyTorch, and what the reference step imports
    device            the context of the accelerator
    group             every rank is connected
    first_collective  the first all-reduce, which makes the communicators
    first_kernels     what the first attention, experts, backward and update take beyond the second

A phase is over when it is over on the slowest rank, and begins when the one before it is. So phases
add up to the time until the last rank is ready. The table has a row for each, of all ranks
together. Clocks are each host's own, from the moment at which all ranks leave a barrier.

Files come from the page cache where the system has them there, which a replaced node has not; the
accelerator's driver is loaded.
Not covered: noticing the failure, a new node or job, an engine's own set-up (data index, more
groups, kernels that it compiles, graphs). Loading the checkpoint is a table of its own, over bytes
(profilers/checkpoint_load.py).
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from profilers.benchmark import Benchmark, Setting
from profilers.checkpoint_load import CheckpointLoadBenchmark
from profilers.clock import HostClock
from profilers.local_ranks import LOOPBACK_ONLY, STORE_NAME, end_sessions, rendezvous_folder
from profilers.records import Case, Measurement, MeasurementStatus

PHASES: Final = (
    "process",
    "imports",
    "device",
    "group",
    "first_collective",
    "first_kernels",
)
REPEATS: Final = 3
LONGEST_S: Final = 60.0
"""Of one start. A session ends ranks from which it hears nothing for longer."""
MOST_S: Final = 40.0
"""No further start after so long."""


def benchmarks(setting: Setting) -> tuple[Benchmark, ...]:
    """The suite of restarts: the phases of a start, and loads of a checkpoint."""
    return (RestartBenchmark(setting=setting), CheckpointLoadBenchmark(setting=setting))


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartBenchmark:
    """The table of phases; one call measures all of them."""

    setting: Setting
    operation: str = "restart"
    weight: float = 1.0
    refined_axes: tuple[str, ...] = ()

    def note(self) -> str:
        return "files were read from the page cache"

    def cases(self) -> Sequence[Case]:
        """The first phase, which stands for all: they are phases of the same starts."""
        return (self._case(PHASES[0]),)

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        del budget_s  # A start takes as long as it takes.
        team, clock = self.setting.team, HostClock()
        if case != self._case(PHASES[0]):
            raise ValueError(f"{case.id} is not measured by itself: {PHASES[0]} stands for all")
        if self.setting.device != "cpu":
            torch.cuda.empty_cache()
        starts: list[tuple[float, ...]] = []
        begin_s = clock.now_s()
        with _rendezvous(self.setting) as rendezvous:
            while len(starts) < REPEATS:
                team.barrier()
                over_s, error = self._start(f"{rendezvous}:restart{len(starts)}")
                over_s = team.slowest_s(over_s)
                errors = [one for one in team.gathered(error) if one]
                if math.inf in over_s:
                    return self._failed(errors)
                starts.append(phases_s(over_s))
                if max(team.slowest_s([clock.now_s() - begin_s])) > MOST_S:
                    break
        if team.rank != 0:
            return ()
        return tuple(
            Measurement(case=self._case(phase), times_s=tuple(start[place] for start in starts))
            for place, phase in enumerate(PHASES)
        )

    def _start(self, rendezvous: str) -> tuple[tuple[float, ...], str]:
        """Start a process; when its phases were over, in seconds from now, or why they were not."""
        setting, team = self.setting, self.setting.team
        arguments = (setting.device, f"{team.rank}", f"{team.world}", rendezvous, f"{LONGEST_S}")
        own = LOOPBACK_ONLY if not setting.rendezvous else {}
        begin_s = time.monotonic()
        with subprocess.Popen(
            (sys.executable, "-P", "-m", "profilers.restart_rank", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ, **own},
        ) as process:
            try:
                written, said = process.communicate(timeout=LONGEST_S)
                return _seconds_since(begin_s, written), ""
            except subprocess.TimeoutExpired:
                error = f"not started after {LONGEST_S:.0f} s"
            except ValueError:
                lines = said.decode(errors="replace").strip().splitlines()
                error = lines[-1] if lines else f"ended with exit code {process.returncode}"
            finally:
                end_sessions([process])
        return (math.inf,) * len(PHASES), f"rank {team.rank}: {error}"

    def _case(self, phase: str) -> Case:
        return Case(operation="restart", kind=phase, axes={"ranks": self.setting.team.world})

    def _failed(self, errors: Sequence[str]) -> tuple[Measurement, ...]:
        if self.setting.team.rank != 0:
            return ()
        line = errors[0] if errors else "a rank did not start"
        return (
            Measurement(
                case=self._case(PHASES[0]), status=MeasurementStatus.FAILED, error=line[:200]
            ),
        )


def phases_s(over_s: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of each phase from when each was over on the slowest rank."""
    return tuple(
        max(0.0, end_s - begin_s) for begin_s, end_s in zip((0.0, *over_s), over_s, strict=False)
    )


def _seconds_since(begin_s: float, written: bytes) -> tuple[float, ...]:
    """Read what a process wrote.

    Raises:
        ValueError: it is not a time for each phase, in order.
    """
    over_s = [float(one) - begin_s for one in json.loads(written)]
    if len(over_s) != len(PHASES) or over_s != sorted(over_s) or over_s[0] < 0.0:
        raise ValueError(f"{over_s} are not the ends of {len(PHASES)} phases")
    return tuple(over_s)


@contextmanager
def _rendezvous(setting: Setting) -> Iterator[str]:
    """Yield where the processes of all ranks connect; a rank by itself makes a folder."""
    if setting.rendezvous:
        yield setting.rendezvous
        return
    with rendezvous_folder() as folder:
        yield f"file:{folder / STORE_NAME}"
