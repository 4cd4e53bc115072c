"""Storage of a study: the interface of the journal file and the database."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from tuner.verify.study.worker import WorkerHeartbeat

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

Result = TypeVar("Result")


class Store(Protocol):
    """A study, a lock over all of its workers, and their heartbeats."""

    @property
    def name(self) -> str:
        """Name for messages; never with a password."""
        ...

    @property
    def is_beside_records(self) -> bool:
        """Whether all workers share the folder of records, so that a deletion is global."""
        ...

    def opened(
        self,
        *,
        space: Mapping[str, "BaseDistribution"],
        sampler: "BaseSampler",
        is_only_worker: Callable[[], bool],
    ) -> "Study":
        """Open or create the study; call exclusively.

        Args:
            space: search space of the trials.
            sampler: proposes them.
            is_only_worker: whether no other worker runs, so that a damaged study may be replaced.
        """
        ...

    def exclusively(self, action: Callable[[], Result]) -> Result:
        """Run an action while no other worker runs one; the lock ends with the process.

        An action may be retried after a broken connection and must be idempotent.
        """
        ...

    def trial(self, number: int) -> "FrozenTrial":
        """Return the current state of a trial."""
        ...

    def note(self, number: int, key: str, value: object) -> None:
        """Write an attribute of a running trial, as JSON."""
        ...

    def watch(self, tokens: Collection[str]) -> None:
        """Read the heartbeats of these workers by name from now on, because they hold claims."""
        ...

    def heartbeats(self) -> Mapping[str, WorkerHeartbeat]:
        """Return the last heartbeat of every registered worker, by token."""
        ...

    def heartbeat(self, heartbeat: WorkerHeartbeat) -> Mapping[str, WorkerHeartbeat] | None:
        """Send a heartbeat, the first of which registers, and return all; None if that fails."""
        ...

    def forget(self, token: str) -> None:
        """Remove a dead worker; if it was only suspended, its next heartbeat registers it again."""
        ...

    def leave(self, token: str) -> None:
        """Deregister, and release the study."""
        ...
