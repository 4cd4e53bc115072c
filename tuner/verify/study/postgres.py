"""A study in a PostgreSQL database, for workers that share no file system.

Optuna's tables hold the study; workers and their heartbeats are attributes of it. A worker that
proposes or tells holds an advisory lock for one transaction on a separate connection. The server
releases the lock when that connection ends or idles for `TURN_S`: the holder then finds the
connection broken at the end of its turn and retries it. What such a turn wrote is settled by the
next worker (claims.py), and the server lets a trial end only once.

Passwords are read like libpq does: from the URL, PGPASSWORD, PGPASSFILE or ~/.pgpass. Prefer the
latter; command lines are visible to everybody on a node. No message or record contains one.

Not covered: databases other than PostgreSQL; poolers that hand out a connection per statement; jobs
of Slurm whose worker died and whose folder the others do not see: each ends with its lease
(tuner/verify/slurm/launcher.py); until then its successor may run beside it.
"""

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial
from pydantic import ValidationError

from tuner.errors import EnvironmentMissingError, PlanUnreadableError, SpecError, StudyError
from tuner.units import format_s
from tuner.verify.study.worker import MOST_WORKERS, Worker, WorkerHeartbeat

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine

Result = TypeVar("Result")

SCHEMES: Final = ("postgresql", "postgres")
SECRETS: Final = ("password", "sslpassword")
"""Parameters of libpq in a URL."""

BEAT_KEY: Final = "worker:"
_MALFORMED: Final = "not a URL like postgresql://user@host:5432/database"

TURN_S: Final = 60
"""Idle time in a turn after which the server ends it: its worker is stopped or disconnected."""

PATIENCE_S: Final = 600.0
"""For a server that stops responding during a study, from the first failure on; as for Slurm's
controller."""

PAUSE_S: Final = 1.0
CONNECT_S: Final = 15
OPTIONS: Final[Mapping[str, Any]] = {
    "pool_pre_ping": True,
    "connect_args": {"connect_timeout": CONNECT_S, "application_name": "moetune"},
}
"""Of every engine."""


class PostgresStore:
    """A `Store` in a database; a resource with connections."""

    is_beside_records = False

    def __init__(self, url: str, *, study_name: str, on_message: Callable[[str], None]) -> None:
        """Connect, and create Optuna's tables if missing.

        Args:
            url: `postgresql://user@host:port/database`.
            study_name: of the study in the database.
            on_message: gets a line when the server does not respond.

        Raises:
            SpecError: the URL is not of PostgreSQL.
            EnvironmentMissingError: its driver is not installed.
            StudyError: the server refuses or does not respond.
        """
        self._url = _parsed(url)
        self._study_name = study_name
        self._on_message = on_message
        self._turn_key = _key(study_name)
        self._study_id = -1
        self._turns = self._engine()
        self._storage = self._connected()

    @property
    def name(self) -> str:
        shown = self._url.set(drivername=SCHEMES[0]).difference_update_query(SECRETS)
        return shown.render_as_string(hide_password=True)

    def opened(
        self,
        *,
        space: Mapping[str, BaseDistribution],
        sampler: BaseSampler,
        is_only_worker: Callable[[], bool],
    ) -> optuna.Study:
        del is_only_worker  # Transactions leave no partial writes.
        study = optuna.create_study(
            study_name=self._study_name, storage=self._storage, sampler=sampler, load_if_exists=True
        )
        self._study_id = self._storage.get_study_id_from_name(self._study_name)
        for trial in study.get_trials(deepcopy=False):
            if any(space.get(name) != one for name, one in trial.distributions.items()):
                raise PlanUnreadableError(
                    f"study {self._study_name!r} in {self.name} was begun by another release of"
                    " moetune: use the same one everywhere, or another database"
                )
        return study

    def exclusively(self, action: Callable[[], Result]) -> Result:
        until_s = math.inf
        while True:
            try:
                return self._in_turn(action, key=self._turn_key)
            except _database_errors() as error:
                # From the first failure on: waiting for the turn does not count.
                is_first = math.isinf(until_s)
                until_s = min(until_s, time.monotonic() + PATIENCE_S)
                if time.monotonic() > until_s:
                    raise StudyError(
                        f"{self.name} did not respond for {format_s(PATIENCE_S)}"
                        f" ({self._line(error)}); run the same command again when it does"
                    ) from error
                if is_first:
                    self._on_message(
                        f"{self.name} does not respond ({self._line(error)}); retrying"
                    )
            time.sleep(PAUSE_S)

    def trial(self, number: int) -> FrozenTrial:
        return self._storage.get_trial(self._trial_id(number))

    def note(self, number: int, key: str, value: object) -> None:
        self._storage.set_trial_user_attr(self._trial_id(number), key, value)

    def watch(self, tokens: Collection[str]) -> None:
        del tokens  # A query returns all heartbeats.

    def heartbeats(self) -> Mapping[str, WorkerHeartbeat]:
        beats_by_token: dict[str, WorkerHeartbeat] = {}
        for key, value in self._storage.get_study_user_attrs(self._study_id).items():
            if (
                key.startswith(BEAT_KEY)
                and isinstance(value, dict)
                and len(beats_by_token) < MOST_WORKERS
            ):
                # Any user with write access may have added attributes.
                with contextlib.suppress(ValidationError, LookupError, TypeError, ValueError):
                    worker = Worker.model_validate(value["worker"])
                    beats_by_token[worker.token] = WorkerHeartbeat(
                        worker=worker, count=int(value["count"])
                    )
        return beats_by_token

    def heartbeat(self, heartbeat: WorkerHeartbeat) -> Mapping[str, WorkerHeartbeat] | None:
        value = {"count": heartbeat.count, "worker": heartbeat.worker.model_dump(mode="json")}
        with contextlib.suppress(*_database_errors()):
            self._storage.set_study_user_attr(
                self._study_id, f"{BEAT_KEY}{heartbeat.worker.token}", value
            )
            return self.heartbeats()
        return None

    def forget(self, token: str) -> None:
        if self._study_id < 0:
            return
        with contextlib.suppress(*_database_errors()):
            self._storage.set_study_user_attr(self._study_id, f"{BEAT_KEY}{token}", None)

    def leave(self, token: str) -> None:
        self.forget(token)
        self._storage.remove_session()
        for engine in (self._storage.engine, self._turns):
            engine.dispose()

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def _engine(self) -> "Engine":
        from sqlalchemy import create_engine
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return create_engine(self._url, **OPTIONS)
        except ImportError as error:
            raise EnvironmentMissingError(
                "--storage needs a driver of PostgreSQL: pip install 'moetune[postgres]'"
            ) from error
        except (SQLAlchemyError, ValueError, TypeError) as error:
            raise SpecError(f"--storage: {self._line(error)}; {_MALFORMED}") from error

    def _connected(self) -> optuna.storages.RDBStorage:
        """Open the storage; creating its tables concurrently would fail."""
        from sqlalchemy import text
        from sqlalchemy.exc import SQLAlchemyError

        try:
            with self._turns.connect() as connection, connection.begin():
                connection.execute(
                    text("SELECT pg_advisory_xact_lock(:key)"), {"key": _key("tables")}
                )
                return optuna.storages.RDBStorage(
                    self._url.render_as_string(hide_password=False), engine_kwargs=dict(OPTIONS)
                )
        except (SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError) as error:
            self._turns.dispose()
            raise StudyError(f"{self.name}: {self._line(error)}") from error
        except (ValueError, TypeError) as error:
            # Of the URL's parameters, which the driver takes as they are.
            raise SpecError(f"--storage: {self._line(error)}; {_MALFORMED}") from error

    def _in_turn(self, action: Callable[[], Result], *, key: int) -> Result:
        from sqlalchemy import text

        with self._turns.connect() as connection, connection.begin():
            _end_when_idle(connection)
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})
            result = action()
            # Fails if the server has ended the turn meanwhile.
            connection.execute(text("SELECT 1"))
        return result

    def _line(self, error: BaseException) -> str:
        """Return the first line of a server's or driver's message, without passwords."""
        cause = error.__cause__ if isinstance(error, optuna.exceptions.OptunaError) else error
        message = str(getattr(cause, "orig", None) or cause or error).strip().partition("\n")[0]
        query = self._url.normalized_query
        secrets = [self._url.password, *(one for name in SECRETS for one in query.get(name, ()))]
        for secret in filter(None, secrets):
            message = message.replace(secret, "***")
        return message[:300]


def _end_when_idle(connection: "Connection") -> None:
    from sqlalchemy import text

    connection.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = '{TURN_S}s'"))


def _database_errors() -> tuple[type[Exception], ...]:
    """Errors after which a turn may be retried."""
    from sqlalchemy.exc import SQLAlchemyError

    return (
        SQLAlchemyError,
        optuna.exceptions.StorageInternalError,
        optuna.exceptions.UpdateFinishedTrialError,
    )


def _parsed(url: str) -> "URL":
    """Read a URL; errors do not print it, for it may contain a password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise SpecError(f"--storage: {_MALFORMED}") from error
    if scheme.partition("+")[0] not in SCHEMES:
        raise SpecError(
            f"--storage of kind {scheme or 'file'!r}: a study is shared through"
            " postgresql://user@host/database, or, without --storage, through the plan's own folder"
        )
    try:
        return make_url(url).set(drivername="postgresql+psycopg")
    except (ArgumentError, ValueError) as error:
        raise SpecError(f"--storage: {_MALFORMED}") from error


def _key(name: str) -> int:
    """Return the signed 64-bit key of an advisory lock."""
    digest = hashlib.sha256(f"moetune {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
