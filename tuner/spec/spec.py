"""A training spec: the file (SpecFile), and with everything loaded (Spec)."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, InstanceOf, model_validator

from profilers.records import Record
from tuner.catalog.programs import Programs
from tuner.spec.cluster import Cluster
from tuner.spec.documents import Documents
from tuner.spec.failure_log import FailureLog
from tuner.spec.fields import FilePath, Name, one_or_many
from tuner.spec.goal import StatedTrainGoal, TrainGoal
from tuner.spec.model import ModelSpec
from tuner.spec.routing import RoutingRecord
from tuner.spec.search import Search
from tuner.units import format_bytes

Targets = Annotated[tuple[Name, ...], Field(min_length=1), BeforeValidator(one_or_many)]


class SpecFile(Record):
    """The YAML file; paths are relative to it."""

    schema_version: Literal[1]
    # 1: first release.
    """Version of this layout."""
    model: FilePath
    """An unmodified Hugging Face `config.json`, or the folder that holds it."""
    cluster: Cluster
    goal: StatedTrainGoal
    search: Search = Search()
    emit: Targets = ("reference",)
    """Names of the targets to write launch files for; they also limit the search."""

    @model_validator(mode="after")
    def _hosts_agree(self) -> "SpecFile":
        stated = self.goal.reliability
        copies = None if stated is None else stated.checkpoint.host_memory
        for pool in self.cluster.pools:
            limit_bytes = pool.host_limit_bytes(None)
            if copies is not None and limit_bytes is not None and copies > limit_bytes:
                raise ValueError(
                    f"goal.reliability.checkpoint.host_memory {format_bytes(copies)} is more than"
                    f" the {format_bytes(limit_bytes)} that cluster.pools.{pool.name}.host leaves,"
                    " which is its name now; leave host_memory out"
                )
        return self


class Spec(Record):
    """A spec with its model, recorded routing and failure log loaded."""

    path: Path
    """Path of the file that the spec was read from."""
    model_path: Path
    model: ModelSpec
    cluster: Cluster
    goal: TrainGoal
    documents: InstanceOf[Documents] | None = None
    """The documents of `goal.sequence_lengths` as they are trained; None: every sequence is one."""
    routing: RoutingRecord | None = None
    """The recording in `goal.routing`; None assumes balanced experts."""
    failures: FailureLog | None = None
    """The log in `goal.reliability`, whose rates the goal then states."""
    search: Search = Search()
    programs: InstanceOf[Programs]
    """Programs of the targets that are named, which limit the search."""

    @property
    def emit(self) -> tuple[str, ...]:
        """Names of the targets to write launch files for."""
        return self.programs.names

    @property
    def num_devices(self) -> int:
        """Devices of all pools."""
        return self.cluster.num_devices
