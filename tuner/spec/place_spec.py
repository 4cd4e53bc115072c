"""Spec of a placement: its file, and what it is with all files loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from profilers.records import Record
from profilers.routing.recording import Recording
from solvers.placement.ranks import Placement, Ranks
from tuner.catalog.place_rules import PlaceTarget
from tuner.spec.cluster import Cluster
from tuner.spec.fields import FilePath, Name, one_or_many
from tuner.spec.model import ModelSpec
from tuner.spec.place import PlaceGoal

Targets = Annotated[tuple[Name, ...], BeforeValidator(one_or_many)]


class PlaceSpecFile(Record):
    """The YAML file of a placement; paths are relative to it."""

    schema_version: Literal[1]
    """Version of this layout."""
    model: FilePath | None = None
    """A Hugging Face `config.json`; needed to price time."""
    cluster: Cluster | None = None
    """Needed to price time; its first pool has the ranks."""
    goal: PlaceGoal
    emit: Targets = ("eplb",)
    """Names of the engines to write the placement for; an empty list writes the plan only."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaceSpec:
    """A placement's spec with its model, recordings and current placement loaded."""

    path: Path
    model_path: Path | None
    model: ModelSpec | None
    cluster: Cluster | None
    goal: PlaceGoal
    recordings: Mapping[str, Recording]
    """Recordings by workload, in the order of the spec; all of the same layers and experts."""
    num_layers: int | None
    """Decoder layers of the model, dense ones included; None if not known."""
    ranks: Ranks
    current: Placement
    """The current placement; experts in order if the spec names none."""
    current_ranks: Ranks
    """Ranks with the slots of the current placement."""
    emit: tuple[str, ...]
    targets: Mapping[str, PlaceTarget]
    """Engines to write the placement for, by name, in the order of `emit`."""
    main_target: PlaceTarget
    """The first of them; EPLB where there is none."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Indices of the placed decoder layers."""
        return next(iter(self.recordings.values())).layer_ids

    @property
    def num_experts(self) -> int:
        """Logical experts of a layer."""
        return next(iter(self.recordings.values())).num_experts
