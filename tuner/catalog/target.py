"""Types that a training engine's capabilities.py is made of: a target, a format of launch files."""

from collections.abc import Callable
from dataclasses import dataclass

from tuner.catalog.manifest import Capabilities
from tuner.catalog.saved_bytes import SavedBytes
from tuner.spec.model import ModelSpec
from tuner.spec.serving.lengths import LengthLaw
from tuner.spec.tune import Adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A release of a training engine that users name in `emit`."""

    capabilities: Capabilities
    family: str
    """Published runs that it resembles, for its residuals (tuner/search/train/regimes.py)."""
    memory_family: str = ""
    """Family of its memory constants (tuner/costs/train/memory_constants.py); empty: `family`."""
    software: str
    """Generation of that software, as `tuner.prices.train.constants.Software` names it."""
    runs_same_layers: bool = True
    """The published runs of `family` are of its own layers, so that their band holds for it."""
    on_processors: Capabilities | None = None
    """Capabilities where the profile was measured on processors; None: the same."""
    saved_bytes: Callable[[Adapters | None, int, str], SavedBytes]
    """Function that returns bytes of a parameter in checkpoints, by what is trained, the zero_stage
    and the precision."""
    tuning_documents: Callable[[ModelSpec, Adapters | None], LengthLaw | None] | None = None
    """Function that returns the lengths of the documents that its files train on unless the goal
    states any, where the program packs them; None: its files name no documents."""
    emitter: str = "emit"
    """Function of write.py: (verified) -> tuple of EmittedFile."""

    @property
    def name(self) -> str:
        """The name that users type."""
        return self.capabilities.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFormat:
    """One format of an engine's launch files."""

    name: str
    """Name that users choose with --format."""
    suffixes: tuple[str, ...] = ()
    """Endings of files that have this format unless --format says otherwise; empty: by --format
    alone, and Megatron-LM's arguments for all other files (tuner/estimate/registry.py)."""
    reader: str = "read"
    """Function of read.py: (text, source=...) -> LaunchSettings."""
    recognised_by: str = ""
    """Function of read.py: whether a text is of this format, before its ending is looked at."""
