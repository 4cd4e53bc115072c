"""The goal of reinforcement learning: the lengths of sequences, which no launch states."""

from typing import Literal

from profilers.records import Record
from tuner.spec.cluster import Cluster
from tuner.spec.fields import FilePath
from tuner.spec.serving.lengths import Lengths


class RlGoal(Record):
    """A step of reinforcement learning, whose launch states everything else."""

    kind: Literal["rl"]
    """Always `rl`."""
    prompt_tokens: Lengths
    """Tokens of a prompt: a number, or a distribution."""
    response_tokens: Lengths
    """Tokens of a response before the launch's limit cuts it: a number, or a distribution."""


class RlSpecFile(Record):
    """The YAML file of reinforcement learning; paths are relative to it."""

    schema_version: Literal[1]
    """Version of this layout."""
    model: FilePath
    """A Hugging Face `config.json`, or the folder that holds it."""
    cluster: Cluster
    goal: RlGoal
