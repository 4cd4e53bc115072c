"""The results of `moetune check`: a verdict for every scenario, with its reason.

Change          one difference from what was accepted
ScenarioResult  a scenario with its verdict
Check           all of them: what `--json` prints
"""

from enum import StrEnum
from typing import Final, Literal

from profilers.records import Record, Seconds


class ScenarioVerdict(StrEnum):
    """The result of a scenario."""

    PASS = "pass"
    """Planned as accepted."""
    BETTER = "better"
    """A better plan than the accepted one; `--update` accepts it."""
    DRIFT = "drift"
    """Changed inside the tolerance or the tie set: reported, does not fail."""
    REGRESSION = "regression"
    """Worse than accepted."""
    INCOMPARABLE = "incomparable"
    """Another spec, another machine, or no reference to compare with."""
    MISSING = "missing"
    """The scenario, its accepted plan or an earlier measurement is missing."""
    ERROR = "error"
    """The scenario could not be planned or read."""


FAILING: Final = frozenset(
    {
        ScenarioVerdict.REGRESSION,
        ScenarioVerdict.INCOMPARABLE,
        ScenarioVerdict.MISSING,
        ScenarioVerdict.ERROR,
    }
)
"""Verdicts that make the check fail; the other three are only reported."""


class AcceptedChange(Record):
    """One difference from what was accepted."""

    what: str
    """Name of the figure or part, e.g. `step_time_s` or `decision`."""
    accepted: float | str | None
    found: float | str | None
    ratio: float | None = None
    """Current over accepted, where both are numbers."""
    weight: Literal["worse", "better", "neutral"] = "neutral"


class ScenarioResult(Record):
    """A scenario with its verdict."""

    name: str
    kind: str
    """train, serve, place or profile; empty where it could not be read."""
    verdict: ScenarioVerdict
    reason: str
    """One sentence."""
    changes: tuple[AcceptedChange, ...] = ()
    cpu_s: Seconds | None = None
    """Processor time of planning; absent where nothing was planned."""
    file: str = ""
    """The file to look at, relative to how the check was called."""


class Check(Record):
    """Output of `moetune check --json`."""

    schema_version: Literal[1] = 1
    # 1: first release.
    moetune_version: str
    against: str = ""
    """Reference that the plans were compared with; empty: the accepted plans."""
    scenarios: tuple[ScenarioResult, ...]
    updated: tuple[str, ...] = ()
    """Files that `--update` wrote, relative to the folder of checks."""

    @property
    def failed(self) -> bool:
        """Return whether any scenario fails the check."""
        return any(scenario.verdict in FAILING for scenario in self.scenarios)

    def counts(self) -> dict[str, int]:
        """Count the scenarios of each verdict that occurs, in the order of `ScenarioVerdict`."""
        verdicts = [scenario.verdict for scenario in self.scenarios]
        return {
            verdict.value: verdicts.count(verdict)
            for verdict in ScenarioVerdict
            if verdict in verdicts
        }
