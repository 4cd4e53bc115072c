"""Errors of measuring, as a tree.

ProfilerError
├── ProfileUnreadableError     a stored profile is missing, damaged or of another schema version
├── RecordingUnreadableError   a recording of routing, stored or another tool's, cannot be used
├── ProfileUnwritableError     the directory, or the disk below it, does not take the profile
├── MachineMismatchError       two profiles, or a profile and this machine, are not comparable
├── UnknownNameError           a suite or operation that does not exist
├── MissingLibraryError        torch (or another optional package) is needed and absent
└── RankError                  a rank died, hung or disagrees with its peers
    └── LostPeersError         this rank works, but others no longer respond
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class ProfilerError(Exception):
    """Base of all errors that users see; the message is one line with a way out."""

    exit_code = 2
    """Exit code of the command line: 2 unusable input, 3 environment."""


class ProfileUnreadableError(ProfilerError):
    """A stored profile cannot be trusted as it lies on disk."""


class RecordingUnreadableError(ProfilerError):
    """A recording of routing is missing, damaged, or says what routing cannot be."""


class ProfileUnwritableError(ProfilerError):
    """The profile cannot be written where it should lie."""

    exit_code = 3


class MachineMismatchError(ProfilerError):
    """The machines differ; the message names how."""


class UnknownNameError(ProfilerError):
    """The name is not in the registry; the message lists the names that are."""


class MissingLibraryError(ProfilerError):
    """An optional library is needed for this; the message holds the command that adds it."""

    exit_code = 3


class RankError(ProfilerError):
    """A rank of the measuring job failed; the message names it."""

    exit_code = 3


class LostPeersError(RankError):
    """The other ranks no longer answer; one of them is to blame."""


NOBODYS_FAULT: Mapping[str, type[ProfilerError]] = {
    kind.__name__: kind
    for kind in (
        ProfileUnreadableError,
        ProfileUnwritableError,
        MachineMismatchError,
        UnknownNameError,
        MissingLibraryError,
    )
}
"""Error classes by name that would occur without ranks as well, so that no rank is to blame."""


def first_problem(error: "ValidationError") -> str:
    """Describe the first error of a stored file in one line: the field's path, the rule."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    rule = " ".join(first["msg"].removeprefix("Value error, ").split())[:200]
    return f"{field}: {rule}" if field else rule
