"""Errors of solving, as a tree.

SolverError
├── UnknownSolverError      a name that is not in the registry
├── BackendFailedError      a backend's program is missing or broke down
└── RejectedClaimError      a backend claimed something that the independent checker refutes
"""


class SolverError(Exception):
    """Base of all solver errors; the message is one line with a way out."""

    exit_code = 2


class UnknownSolverError(SolverError):
    """The name is not in the registry; the message lists the names that are."""


class BackendFailedError(SolverError):
    """A backend's program is missing or broke down; the message names another method."""

    exit_code = 3


class RejectedClaimError(SolverError):
    """A backend's claim failed its check: a defect of the backend, never of the input."""

    exit_code = 3
