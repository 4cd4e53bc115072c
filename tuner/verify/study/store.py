"""Where a study lives: what a file and a database must both offer to its workers."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from tuner.verify.study.worker import Beat

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

Answer = TypeVar("Answer")


class Store(Protocol):
    """A study that can be opened, a lock over all of its workers, and their beats."""

    @property
    def name(self) -> str:
        """What people know it by; never with a password."""
        ...

    @property
    def is_beside_records(self) -> bool:
        """Whether all workers share the folder of records: one deleted there is gone for all."""
        ...

    def opened(
        self,
        *,
        space: Mapping[str, "BaseDistribution"],
        sampler: "BaseSampler",
        is_alone: Callable[[], bool],
    ) -> "Study":
        """Open the study or begin it; to be called exclusively.

        Args:
            space: what trials may be of.
            sampler: that proposes them.
            is_alone: whether nobody else works on it, so that what is damaged may be replaced.
        """
        ...

    def exclusively(self, action: Callable[[], Answer]) -> Answer:
        """Run an action while no other worker runs one; the right to ends with the process.

        An action may be run again when the connection broke; what it does must bear that.
        """
        ...

    def trial(self, number: int) -> "FrozenTrial":
        """Return a trial as it is now."""
        ...

    def note(self, number: int, key: str, value: object) -> None:
        """Write an attribute, as JSON, onto a trial that runs."""
        ...

    def watch(self, tokens: Collection[str]) -> None:
        """Ask for the signs of these workers by name from now on, for they hold claims."""
        ...

    def beats(self) -> Mapping[str, Beat]:
        """Return the last sign of every worker that has not signed off, by token."""
        ...

    def beat(self, beat: Beat) -> Mapping[str, Beat] | None:
        """Give a sign, the first of which signs on, and return everybody's; None if that fails."""
        ...

    def forget(self, token: str) -> None:
        """Strike out a worker that has gone; if it was only stopped, its next beat is a sign."""
        ...

    def leave(self, token: str) -> None:
        """Sign off, and let go of the study, which is not used any more here."""
        ...
