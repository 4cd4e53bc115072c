"""A study in Optuna's tables: a SQLite file, or a PostgreSQL database.

    trials/study.db     by default, for workers that share the folder
    --storage URL       PostgreSQL, for workers that share no folder

Optuna reads and writes JSON there and unpickles nothing. Every transaction on SQLite takes its
write lock first: Optuna reads the state of a trial and then writes another one, which two
connections could otherwise do at once.

A new file is built in memory, trials of earlier workers included, and written in one transaction: a
kill leaves the whole study or none, and the second of two workers finds that of the first.

SQLite relies on the locks of the file system. NFS has them (version 4, or 3 with lockd), Lustre
with the mount option `flock`; where they are missing or local to a node, workers on several nodes
must share PostgreSQL. Passwords are read like libpq does: from the URL, PGPASSWORD, PGPASSFILE or
~/.pgpass. Prefer the latter; command lines are visible to everybody on a node. No message or record
contains one.

A worker that is stopped (SIGSTOP) in the milliseconds of a transaction blocks the others on SQLite
until it goes on or ends. They retry for `PATIENCE_S`, and so they do after an I/O error of the file
system; PostgreSQL ends such a transaction after `TRANSACTION_S`.

Not covered: databases other than these.
"""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

import optuna
from optuna.exceptions import OptunaError, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from profilers.files import read_bounded, require_regular
from tuner.errors import (
    EnvironmentMissingError,
    OutputError,
    PlanUnreadableError,
    SpecError,
    StudyError,
    TunerError,
)
from tuner.units import format_s

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection

Result = TypeVar("Result")

SCHEMES: Final = ("postgresql", "postgres")
SECRETS: Final = ("password", "sslpassword")
"""Parameters of libpq in a URL."""

TRANSACTION_S: Final = 60
"""Time after which a transaction is given up, waited for (SQLite) or idle (PostgreSQL)."""

PATIENCE_S: Final = 600.0
"""Time that a database may not respond during a study, from the first failure on; as for Slurm's
controller."""

PAUSE_S: Final = 1.0
CONNECT_S: Final = 15
MOST_BYTES: Final = 2**28
"""Largest study file; a trial takes some kilobytes."""

CREATION_KEY: Final = 7_236_010
"""Advisory lock of the creation of Optuna's tables, which fails when done twice at once."""

UNWRITABLE: Final = ("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")
UNLOCKED: Final = ("SQLITE_BUSY", "SQLITE_IOERR", "SQLITE_PROTOCOL")
"""Prefixes of error names that say nothing about a file's content."""

SUPER_JOURNAL: Final = bytes.fromhex("d9d505f920a163d7")
"""End of a journal that names another one, which SQLite deletes with it; written only by
transactions on several files. Source: https://sqlite.org/fileformat.html#the_rollback_journal"""

MISREAD: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that Optuna raises for tables that do not hold a study of ours."""

_MALFORMED: Final = "not a URL like postgresql://user@host:5432/database"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlace:
    """The place of a study, with what messages say about it."""

    name: str
    """Path or URL; never with a password."""
    remedy: str
    """Action for the user where it does not hold the study of the plan's folder."""
    secrets: tuple[str, ...] = ()
    """Texts that no message may contain."""
    transient: tuple[str, ...] = ("",)
    """Prefixes of error names after which actions run again; a server's errors have none."""

    def line(self, error: BaseException) -> str:
        """Return the first line of a driver's message, without secrets."""
        message = str(_cause(error)).strip().partition("\n")[0]
        for secret in self.secrets:
            message = message.replace(secret, "***")
        return message[:300]

    def refusal(self, error: BaseException) -> TunerError:
        """Return the error for the user after one of the database."""
        message, cause = f"{self.name}: {self.line(error)}", _cause(error)
        if not isinstance(cause, sqlite3.Error):
            return StudyError(message)
        code = _error_name(error)
        if code.startswith(UNWRITABLE):
            return OutputError(message)
        if code.startswith(UNLOCKED):
            return StudyError(
                f"{message}; if its file system has no locks, share the study with --storage"
                " postgresql://..."
            )
        return PlanUnreadableError(f"{message}; {self.remedy}")

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Refuse, while this is entered, tables that do not hold what Optuna wrote."""
        try:
            yield
        except MISREAD as error:
            raise PlanUnreadableError(
                f"{self.name} is damaged, or of another plan or release; {self.remedy}"
            ) from error


class StudyDatabase:
    """The trials of one study, in a database that other workers share; a resource."""

    def __init__(
        self,
        storage: RDBStorage,
        place: StudyPlace,
        *,
        study_name: str,
        on_message: Callable[[str], None],
    ) -> None:
        self.place = place
        self._storage = storage
        self._on_message = on_message
        try:
            with place.readable():
                self._study = optuna.load_study(study_name=study_name, storage=storage)
                self._study_id = storage.get_study_id_from_name(study_name)
        except BaseException:
            self.close()
            raise

    def trials(self) -> list[FrozenTrial]:
        """Return the trials of all workers, by number.

        Raises:
            PlanUnreadableError: the tables do not hold what Optuna wrote.
        """
        with self.place.readable():
            return self._study.get_trials(deepcopy=False)

    def add(self, trial: FrozenTrial) -> int:
        """Add a trial in one transaction, and return its number."""
        key = self._storage.create_new_trial(self._study_id, template_trial=trial)
        return self._storage.get_trial(key).number

    def note(self, number: int, key: str, value: object) -> None:
        """Set an attribute of a trial unless it has ended."""
        with contextlib.suppress(UpdateFinishedTrialError):
            self._storage.set_trial_user_attr(self._trial_id(number), key, value)

    def complete(self, number: int, value: float, **attributes: object) -> bool:
        """Complete a trial, attributes first; False if another worker has ended it."""
        with contextlib.suppress(UpdateFinishedTrialError):
            for key, attribute in attributes.items():
                self._storage.set_trial_user_attr(self._trial_id(number), key, attribute)
            self._storage.set_trial_state_values(
                self._trial_id(number), TrialState.COMPLETE, [value]
            )
            return True
        return False

    def fail(self, number: int) -> None:
        """Fail a trial unless another worker has ended it."""
        with contextlib.suppress(UpdateFinishedTrialError):
            self._storage.set_trial_state_values(self._trial_id(number), TrialState.FAIL)

    def persist(self, action: Callable[[], Result], *, once: bool = False) -> Result:
        """Run an action on the database, again while it does not respond.

        Args:
            action: is idempotent, for a database may have done what it did not confirm.
            once: do not run it again.

        Raises:
            OutputError: the file cannot be written.
            PlanUnreadableError: the file is damaged.
            StudyError: the file stays locked, or the server away.
        """
        failed_s: list[float] = []
        while True:
            try:
                return action()
            except _database_errors() as error:
                if once or not _error_name(error).startswith(self.place.transient):
                    raise self.place.refusal(error) from error
                failed_s.append(time.monotonic())
                reason = f"({self.place.line(error)})"
                if failed_s[-1] - failed_s[0] > PATIENCE_S:
                    raise StudyError(
                        f"{self.place.name} did not respond for {format_s(PATIENCE_S)}"
                        f" {reason}; run the same command again when it does"
                    ) from error
                if len(failed_s) == 1:
                    self._on_message(f"{self.place.name} does not respond {reason}; retrying")
                time.sleep(PAUSE_S)

    def close(self) -> None:
        """Release the connections."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)


def open_study(
    where: Path | str,
    *,
    study_name: str,
    former: Sequence[FrozenTrial] = (),
    on_message: Callable[[str], None],
) -> StudyDatabase:
    """Open a study, or begin one.

    Args:
        where: a file of SQLite, or the URL `postgresql://user@host:port/database`.
        study_name: of the study in the database.
        former: trials that a new study begins with, by number.
        on_message: gets a line when the database does not respond.

    Raises:
        SpecError: the URL is not of PostgreSQL.
        EnvironmentMissingError: its driver is not installed.
        OutputError: the file cannot be written.
        PlanUnreadableError: the tables do not hold this study.
        StudyError: the file cannot be locked, or the server refuses or does not respond.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if isinstance(where, Path):
        place, storage = _open_file(where, study_name, former)
    else:
        place, storage = _open_server(where, study_name, former)
    try:
        return StudyDatabase(storage, place, study_name=study_name, on_message=on_message)
    except _database_errors() as error:
        raise place.refusal(error) from error


def _open_file(
    file: Path, study_name: str, former: Sequence[FrozenTrial]
) -> tuple[StudyPlace, RDBStorage]:
    from sqlalchemy import QueuePool, event

    place = StudyPlace(
        name=str(file),
        remedy=f"move {file.name}* away and go on with --resume, which makes it from the records",
        transient=UNLOCKED,
    )
    for suffix in ("", "-journal", "-wal", "-shm"):
        _require_file(file.with_name(f"{file.name}{suffix}"), place)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _begin(file, study_name, former)
        # Connect by a creator, not by the URL, in which Optuna replaces braces.
        with place.readable():
            storage = RDBStorage(
                "sqlite://",
                engine_kwargs={"creator": lambda: _connected(file), "poolclass": QueuePool},
                skip_table_creation=True,
            )
        event.listen(storage.engine, "begin", _begin_immediately)
    except OSError as error:
        raise OutputError(f"{file.parent}: {error.strerror}") from error
    except _database_errors() as error:
        raise place.refusal(error) from error
    return place, storage


def _open_server(
    url: str, study_name: str, former: Sequence[FrozenTrial]
) -> tuple[StudyPlace, RDBStorage]:
    from sqlalchemy import NullPool, create_engine, text
    from sqlalchemy.exc import SQLAlchemyError

    parsed = _parsed(url)
    shown = parsed.set(drivername=SCHEMES[0]).difference_update_query(SECRETS)
    query = parsed.normalized_query
    passwords = (parsed.password, *(secret for name in SECRETS for secret in query.get(name, ())))
    place = StudyPlace(
        name=shown.render_as_string(hide_password=True),
        remedy="move the folder of trials away to join that study, or use another database",
        secrets=tuple(filter(None, passwords)),
    )
    idle = f"-c idle_in_transaction_session_timeout={TRANSACTION_S}s"
    arguments = {"connect_timeout": CONNECT_S, "application_name": "moetune", "options": idle}
    if "options" in query:
        del arguments["options"]
    settings = {"pool_pre_ping": True, "connect_args": arguments}
    plain = parsed.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    try:
        # Without a pool, a connection closes at the end of its transaction.
        with create_engine(parsed, poolclass=NullPool, **settings).begin() as connection:
            connection.execute(text(f"SELECT pg_advisory_xact_lock({CREATION_KEY})"))
            storage = RDBStorage(plain, engine_kwargs=settings)
            study = optuna.create_study(study_name=study_name, storage=storage, load_if_exists=True)
            trials = study.get_trials(deepcopy=False)
            begun = former[: len(trials)]
            # A worker may have been killed while it added them.
            if list(map(_content, trials)) == list(map(_content, begun)):
                study.add_trials(former[len(begun) :])
    except ImportError as error:
        raise EnvironmentMissingError(
            "--storage needs a driver of PostgreSQL: pip install 'moetune[postgres]'"
        ) from error
    except (SQLAlchemyError, OptunaError, RuntimeError) as error:
        raise StudyError(f"{place.name}: {place.line(error)}") from error
    except (ValueError, TypeError) as error:
        # The driver takes the parameters of a URL as they are.
        raise SpecError(f"--storage: {place.line(error)}; {_MALFORMED}") from error
    return place, storage


def _content(trial: FrozenTrial) -> tuple[object, ...]:
    return trial.state, trial.values, trial.user_attrs


def _begin(file: Path, study_name: str, former: Sequence[FrozenTrial]) -> None:
    """Write a new study into a file without tables, in one transaction.

    Its size does not tell: a kill in the transaction leaves pages, which its journal takes back.
    """
    with closing(_connected(file)) as disk:
        disk.execute("BEGIN IMMEDIATE")
        if disk.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            for line in _statements(study_name, former):
                disk.execute(line)
        disk.execute("COMMIT")


def _statements(study_name: str, former: Sequence[FrozenTrial]) -> list[str]:
    """Return the statements that write a new study."""
    memory = RDBStorage("sqlite://", skip_compatibility_check=True)
    optuna.create_study(study_name=study_name, storage=memory).add_trials(former)
    with memory.engine.connect() as connection:
        source = connection.connection.driver_connection
        if source is None:
            raise StudyError(f"{study_name}: no connection")
        # The first and the last line are the transaction's.
        lines = list(source.iterdump())[1:-1]
    memory.engine.dispose()
    return lines


def _connected(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        file, timeout=TRANSACTION_S, isolation_level=None, check_same_thread=False
    )
    # Triggers and views of a file that others wrote call no functions with side effects.
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def _begin_immediately(connection: "Connection") -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _require_file(path: Path, place: StudyPlace) -> None:
    """Refuse files that would block or never end, and those that make SQLite change others."""
    try:
        require_regular(path, most_bytes=MOST_BYTES)
        is_journal = path.name.endswith("-journal")
        leads_away = is_journal and read_bounded(path, most_bytes=MOST_BYTES).endswith(
            SUPER_JOURNAL
        )
    except FileNotFoundError:
        leads_away = False
    except OSError as error:
        raise PlanUnreadableError(f"{path}: {error.strerror}; {place.remedy}") from error
    # SQLite writes through links, and looks for the journal beside their targets.
    if leads_away or path.is_symlink():
        raise PlanUnreadableError(f"{path}: names another file; {place.remedy}")


def _cause(error: BaseException) -> BaseException:
    """Return the driver's error behind one of Optuna or SQLAlchemy."""
    cause = error.__cause__ if isinstance(error, OptunaError) and error.__cause__ else error
    return getattr(cause, "orig", None) or cause


def _error_name(error: BaseException) -> str:
    """Return SQLite's name of an error; text that cannot be decoded has none."""
    return getattr(_cause(error), "sqlite_errorname", "")


def _database_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a database that does not do what it should."""
    from sqlalchemy.exc import SQLAlchemyError

    return SQLAlchemyError, StorageInternalError, sqlite3.Error


def _parsed(url: str) -> "URL":
    """Read a URL; errors do not print it, for it may contain a password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        scheme = urlsplit(url).scheme
        if scheme.partition("+")[0] not in SCHEMES:
            raise SpecError(
                f"--storage of kind {scheme or 'file'!r}: a study is shared through"
                " postgresql://user@host/database, or, without --storage, through the plan's own"
                " folder"
            )
        return make_url(url).set(drivername="postgresql+psycopg")
    except (ArgumentError, ValueError) as error:
        raise SpecError(f"--storage: {_MALFORMED}") from error
