"""Properties of an engine's worker for NVIDIA Dynamo's launcher."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from tuner.engines.files import EmittedFile
from tuner.engines.serving.shape import GroupShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoWorker:
    """`DYNAMO` of an engine's write.py: its worker, beside the options of its own command."""

    image: str
    """Runtime image, without `-runtime`."""
    model_option: str = "--model"
    options_name: Callable[[GroupShape], str] | None = None
    """Name of the file of options that it reads, in the folder of files."""
    names_role: bool = True
    """The option `--disaggregation-mode` states the role, which the engine's own command does
    not."""
    event_options: tuple[str, ...]
    """Options with which prefill publishes its cache contents to the frontend."""
    placement_package: tuple[EmittedFile, ...] = ()
    """Files that make a placement's file a package on PYTHONPATH."""


def cache_events(**settings: object) -> tuple[str, ...]:
    """Return the option that publishes KV events; data-parallel ranks use the ports after it."""
    shared = {"publisher": "zmq", "topic": "kv-events", "endpoint": "tcp://*:20080"}
    return ("--kv-events-config", json.dumps({**shared, **settings}))
