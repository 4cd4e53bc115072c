"""What a run is made to suffer, as the user writes it, and the faults that are drawn from it.

    steps: 150                # of the run
    nodes: 4                  # the ranks of the plan, in equal parts
    seed: 7
    mean_interval: 9s         # between two faults, exponential
    most: 10                  # faults of a run
    faults: {kill: 4, freeze: 1, lose_node: 3, lose_together: 1, fill_disk: 1, slow_link: 1}
    link: 2Gbit/s             # that each node sends at most; needs root
    repair: 20s               # until a lost node can be used again
    spares: 1                 # nodes that replace lost ones; absent: none
    without_spare: both       # wait for a repair, continue with fewer nodes, or both; absent: wait
    policies:                 # in steps
      - {shared: 20}
      - {shared: 40, host: 5, replicas: 1, asynchronous: true}

Without policies the run saves as the plan says. Faults are drawn once, so that every policy suffers
the same ones at the same times. Without a repair time a lost node is replaced at once.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field, model_validator

from profilers.records import Record
from tuner.faults.levels import FailureClass, SavePolicy
from tuner.spec.fields import BytesPerSecond, PositiveSeconds, Share
from tuner.spec.spec_file import read_spec_keys, validate_spec

Steps = Annotated[int, Field(ge=1, le=1_000_000)]
Weight = Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)]


class FaultKind(StrEnum):
    """What is done to the run."""

    KILL = "kill"
    """SIGKILL to a rank."""
    FREEZE = "freeze"
    """SIGSTOP to a rank, which keeps its peers waiting until the supervisor ends them."""
    LOSE_NODE = "lose_node"
    """SIGKILL to the ranks of a node, and its memory is emptied."""
    LOSE_TOGETHER = "lose_together"
    """The same of a node and those that hold its replicas."""
    FILL_DISK = "fill_disk"
    """Every file that is written fails as on a full disk, for a while."""
    SLOW_LINK = "slow_link"
    """A node sends at a share of its rate, for a while."""


CLASSES: Final = {
    FaultKind.KILL: FailureClass.PROCESS,
    FaultKind.FREEZE: FailureClass.PROCESS,
    FaultKind.LOSE_NODE: FailureClass.NODE,
    FaultKind.LOSE_TOGETHER: FailureClass.TOGETHER,
}
"""Faults that end a launch."""


class WithoutSpareAction(StrEnum):
    """What a run does when a node is lost and no spare one is left."""

    WAIT = "wait"
    """It waits until a node is repaired."""
    CONTINUE = "continue"
    """It goes on with fewer nodes, and with all after a repair."""


class StatedPolicy(Record):
    """When a run saves, in steps, and what it does without a spare node."""

    shared: Steps
    host: Steps | None = None
    replicas: Annotated[int, Field(ge=0, le=2)] = 0
    asynchronous: bool = False
    without_spare: WithoutSpareAction | None = None
    """None: as the scenario says, which says nothing where lost nodes are replaced at once."""

    @model_validator(mode="after")
    def _consistent(self) -> "StatedPolicy":
        self.policy()
        return self

    @classmethod
    def of(cls, policy: SavePolicy) -> "StatedPolicy":
        """Return a policy of the models."""
        return cls(
            shared=policy.shared_interval_steps,
            host=policy.host_interval_steps,
            replicas=policy.replicas,
            asynchronous=policy.asynchronous,
        )

    def policy(self) -> SavePolicy:
        """Return it as the models take it."""
        return SavePolicy(
            shared_interval_steps=self.shared,
            host_interval_steps=self.host,
            replicas=self.replicas,
            asynchronous=self.asynchronous,
        )

    @property
    def words(self) -> str:
        """Say it in a few words."""
        host = "" if self.host is None else f"host every {self.host}, "
        copies = f", {self.replicas} replica{'s' * (self.replicas > 1)}" * (self.replicas > 0)
        how = ", asynchronous" if self.asynchronous else ""
        short = f", {self.without_spare} without a spare" if self.without_spare else ""
        return f"{host}shared every {self.shared}{copies}{how}{short}"


class Scenario(Record):
    """A scenario of `moetune verify --faults`."""

    steps: Steps
    nodes: Annotated[int, Field(ge=1, le=250)]
    seed: Annotated[int, Field(ge=0, le=2**32)] = 0
    mean_interval: PositiveSeconds
    most: Annotated[int, Field(ge=1, le=1000)] = 10
    faults: Annotated[dict[FaultKind, Weight], Field(min_length=1)]
    policies: Annotated[tuple[StatedPolicy, ...], Field(max_length=64)] = ()
    """Empty: the plan's own."""
    disk_full: PositiveSeconds = 2.0
    """How long the disk is full each time."""
    hang: PositiveSeconds = 4.0
    """Without any event of a rank, after which the supervisor ends a launch that trains."""
    start_limit: PositiveSeconds = 120.0
    """After which it ends a launch that does not train yet."""
    link: BytesPerSecond | None = None
    """That each node sends at most, in a network of its own, which needs root; absent: ranks talk
    over loopback."""
    link_slow: PositiveSeconds = 8.0
    """How long a link is slow each time."""
    link_slow_ratio: Share = 0.1
    """Its rate by then, of the usual one."""
    repair: PositiveSeconds | None = None
    """Until a lost node can be used again; absent: it is replaced at once."""
    spares: Annotated[int, Field(ge=0, le=250)] = 0
    """Nodes that replace lost ones until these are repaired."""
    without_spare: WithoutSpareAction | Literal["both"] | None = None
    """Of policies that do not say it; absent: they wait."""

    @model_validator(mode="after")
    def _consistent(self) -> "Scenario":
        if not set(self.faults) & set(CLASSES):
            raise ValueError(
                f"faults {', '.join(self.faults)} end no launch; add one of {', '.join(CLASSES)}"
            )
        if FaultKind.SLOW_LINK in self.faults and self.link is None:
            raise ValueError("faults.slow_link needs the rate of a link, e.g. link: 2Gbit/s")
        if self.repair is None and (self.spares or self.without_spare):
            raise ValueError(
                "spares and without_spare need the time until a lost node can be used again, e.g."
                " repair: 20s"
            )
        for policy in self.policies:
            self.check(policy)
        return self

    def runs(self) -> tuple[StatedPolicy, ...]:
        """Return the policies, each with what it does without a spare node where one can lack."""
        if self.repair is None:
            return self.policies
        stated = self.without_spare or WithoutSpareAction.WAIT
        choices = tuple(WithoutSpareAction) if stated == "both" else (WithoutSpareAction(stated),)
        return tuple(
            policy.model_copy(update={"without_spare": choice})
            for policy in self.policies
            for choice in ((policy.without_spare,) if policy.without_spare else choices)
        )

    def check(self, policy: StatedPolicy) -> None:
        """Refuse a policy that does not fit the nodes.

        Raises:
            ValueError: it has more replicas than there are nodes for, or says what to do without a
                spare node where lost ones are replaced at once.
        """
        if policy.without_spare and self.repair is None:
            raise ValueError(f"{policy.words}: without_spare needs a repair time, e.g. repair: 20s")
        if policy.replicas >= self.nodes:
            raise ValueError(
                f"{policy.words}: {policy.replicas} replicas need {policy.replicas + 1} nodes,"
                f" there are {self.nodes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a run."""

    at_s: float
    """Seconds since its first step began."""
    kind: FaultKind
    node: int
    place: int
    """Of the rank in its node, where one rank is meant."""


def read_scenario(path: Path) -> Scenario:
    """Read a scenario.

    Raises:
        SpecError: the file, the field's path, its value, the rule.
    """
    return validate_spec(read_spec_keys(path), path, Scenario)


def draw_faults(scenario: Scenario, *, ranks_per_node: int) -> tuple[Fault, ...]:
    """Draw the faults of a scenario from its seed."""
    rng = np.random.default_rng(scenario.seed)
    kinds = list(scenario.faults)
    weights = np.array([scenario.faults[kind] for kind in kinds])
    at_s = np.cumsum(rng.exponential(scenario.mean_interval, size=scenario.most))
    places = rng.choice(len(kinds), size=scenario.most, p=weights / weights.sum())
    nodes = rng.integers(scenario.nodes, size=scenario.most)
    ranks = rng.integers(ranks_per_node, size=scenario.most)
    return tuple(
        Fault(at_s=float(time_s), kind=kinds[kind], node=int(node), place=int(rank))
        for time_s, kind, node, rank in zip(at_s, places, nodes, ranks, strict=True)
    )
