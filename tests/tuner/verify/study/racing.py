"""Races: several processes verify one plan at once, time and again, and write down what they saw.

Run as a script by test_races.py. Each race is a study of its own; its workers are forked from here,
so that all start within a moment. A launch appends a line to one file, and takes a moment. Where
some are to be killed, that happens at random moments, and at least one is left; nobody is killed in
the first races, as many as are to be peaceful.

One line of JSON is printed per race: `launched` [decision, process], `records` of each survivor
[[number, status, decision]], `killed` processes, `failed` workers.
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path

from tuner import api
from tuner.config.train import TrainDecision
from tuner.goals.train_folder import read_plan, read_used_profile
from tuner.plans.folder import STUDY_NAME, TRIALS_NAME, trial_file, write_trial
from tuner.verify.launcher import EngineMetrics, Launch, LaunchResult
from tuner.verify.launches import TrialJobs, start_training
from tuner.verify.loop import run_trials
from tuner.verify.search import StudySearch
from tuner.verify.space import TrainSpace
from tuner.verify.study.database import open_study
from tuner.verify.study.shared import TRAINING, StudyCallbacks, join_workers

LAUNCH_S = 0.004
KILL_WITHIN_S = 0.4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--storage", default="")
    parser.add_argument("--races", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--kill", type=int, default=0)
    parser.add_argument("--peaceful", type=int, default=0)
    requested = parser.parse_args()
    space = _around(requested.plan)
    # What Optuna imports when a database is opened, once for all workers.
    for name in ("alembic.command", "optuna.storages._rdb.models", "psycopg"):
        importlib.import_module(name)
    rng = random.Random(0)
    for race in range(requested.races):
        folder = requested.out / f"race-{race}"
        folder.mkdir(parents=True)
        kill = 0 if race < requested.peaceful else requested.kill
        sys.stdout.write(json.dumps(_race(space, folder, requested, rng, kill=kill)) + "\n")
        sys.stdout.flush()


def _race(
    space: TrainSpace,
    folder: Path,
    requested: argparse.Namespace,
    rng: random.Random,
    *,
    kill: int,
) -> dict[str, object]:
    workers = [_forked(space, folder, requested, index) for index in range(requested.workers)]
    killed = []
    for pid in rng.sample(workers, min(kill, requested.workers - 1)):
        time.sleep(rng.uniform(0.0, KILL_WITHIN_S))
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)
    ended = {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers}
    survivors = [pid for pid, code in ended.items() if code == 0]
    return {
        "launched": [json.loads(line) for line in (folder / "launched").read_text().splitlines()],
        "records": [json.loads((folder / f"saw-{pid}").read_text()) for pid in survivors],
        "killed": [pid for pid in killed if ended[pid] == -signal.SIGKILL],
        "failed": [pid for pid, code in ended.items() if code not in (0, -signal.SIGKILL)],
    }


def _forked(space: TrainSpace, folder: Path, requested: argparse.Namespace, index: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _work(space, folder, requested, index)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _work(space: TrainSpace, folder: Path, requested: argparse.Namespace, index: int) -> None:
    rng = random.Random(os.getpid())

    def launch(launch: Launch) -> LaunchResult:
        line = json.dumps([_name(launch.decision), os.getpid()]) + "\n"
        with (folder / "launched").open("ab", buffering=0) as file:
            file.write(line.encode())
        time.sleep(rng.uniform(0.0, LAUNCH_S))
        steps_s = (launch.predicted.step_time_s,) * 3
        return LaunchResult(
            status="ok", reason="", report=None, wall_s=0.0, metrics=EngineMetrics(steps_s=steps_s)
        )

    # Where a server is shared, folders are not.
    own = folder / f"plan-{index}" if requested.storage else folder / "plan"
    outside = StudyCallbacks(
        write=lambda record: write_trial(own, record),
        copy=lambda record: write_trial(own, record),
        on_message=_print_message,
    )
    database = open_study(
        requested.storage or own / TRIALS_NAME / STUDY_NAME,
        study_name=str(folder),
        on_message=_print_message,
    )
    with join_workers(database, kind=TRAINING, finished=(), outside=outside) as shared:
        start = partial(
            start_training,
            jobs=TrialJobs(space=space),
            steps=3,
            launch=launch,
            scratch=own / "scratch",
            started=lambda _decision, _s: None,
        )
        records = run_trials(
            StudySearch(space, shared),
            start=start,
            trials=requested.trials,
            ended=lambda _record: None,
        )
    for record in records:
        if not trial_file(own, record.number).is_file():
            raise FileNotFoundError(trial_file(own, record.number))
    seen = [[one.number, one.status, _name(one.decision)] for one in records]
    (folder / f"saw-{os.getpid()}").write_text(json.dumps(seen))


def _print_message(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _around(folder: Path) -> TrainSpace:
    plan = read_plan(folder)
    space = TrainSpace(
        plan=plan,
        machine=api.machine_of(plan.cluster.pools[0], read_used_profile(folder)),
    )
    # Priced once, for all workers to come.
    space.points()
    return space


def _name(decision: TrainDecision) -> str:
    return hashlib.sha256(decision.model_dump_json().encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
