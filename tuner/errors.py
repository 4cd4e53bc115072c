"""Errors that a user can meet, as a tree.

TunerError
├── SpecError              the spec, a model config or another input file is unusable
├── UnknownTargetError     an emit target that does not exist
├── UnsuitedPlacementError an engine cannot take a placement
├── UnknownDeviceError     a device that no shipped description has as name or alias
├── OutsideProfileError    no measurement supports a requested cost
├── PlanUnreadableError    a stored plan or trial record is missing or damaged
├── OutputError            a directory or file cannot be written
├── SchedulerError         a scheduler refuses a job, or does not answer
├── StudyError             a study that is shared cannot be reached or locked
└── EnvironmentMissingError   a program or library that is needed is absent
"""


class TunerError(Exception):
    """One line for the user: the value, the rule and what to do."""

    exit_code = 2
    """Exit code of the command line: 2 for unusable input, 3 for the environment."""


class SpecError(TunerError):
    """An input file names something impossible; the message starts with the field's path."""


class UnknownTargetError(TunerError):
    """The emit target is not in the registry; the message lists those that are."""


class UnsuitedPlacementError(TunerError):
    """An engine cannot take this placement; the message has the nearest that it can."""


class UnknownDeviceError(TunerError):
    """No device description has this name; the message lists those that exist."""


class OutsideProfileError(TunerError):
    """No measurement of the operation exists, so no number can be given."""


class PlanUnreadableError(TunerError):
    """A stored plan or trial record is missing or damaged."""


class OutputError(TunerError):
    """The output cannot be written to the requested place."""

    exit_code = 3


class SchedulerError(TunerError):
    """A scheduler refuses a job, does not answer, or lets it wait too long."""

    exit_code = 3


class StudyError(TunerError):
    """A study that several processes share cannot be reached, locked or trusted."""

    exit_code = 3


class EnvironmentMissingError(TunerError):
    """A program or library is missing; the message has the command that installs it."""

    exit_code = 3
