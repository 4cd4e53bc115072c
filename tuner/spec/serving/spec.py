"""Spec of a deployment: its file, and what it is with the model read and the engines found."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from profilers.records import Record
from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.spec.cluster import Cluster
from tuner.spec.fields import FilePath, Name, one_or_many
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import Mode, ServeGoal

Targets = Annotated[tuple[Name, ...], BeforeValidator(one_or_many)]


class ServeSpecFile(Record):
    """The YAML file of a deployment; paths are relative to it."""

    schema_version: Literal[1]
    """Version of this layout."""
    model: FilePath
    """A Hugging Face `config.json`, or the folder that holds it."""
    cluster: Cluster
    goal: ServeGoal
    emit: Targets = ()
    """Names of the targets to write launch files for; an empty list writes the plan only."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServeSpec:
    """A deployment's spec with its model loaded and the releases of its engines."""

    path: Path
    model_path: Path
    model: ModelSpec
    cluster: Cluster
    goal: ServeGoal
    emit: tuple[str, ...]
    releases: Mapping[str, ServingCapabilities]
    """Described release that serves on each pool, by the pool's name."""
    target_refusals: Mapping[Mode, tuple[str, ...]]
    """A line for every target of `emit` that does not start a mode, by mode."""
    release: str = ""
    """Release of the engine that the spec states, where it is not described."""

    @property
    def main_release(self) -> ServingCapabilities:
        """The release of the first pool, where one name for all is needed."""
        return self.releases[self.cluster.pools[0].name]

    @property
    def modes(self) -> frozenset[str]:
        """The modes that the release of at least one pool has."""
        return frozenset[str]().union(*(release.modes for release in self.releases.values()))
