"""What `engine_layouts.py` needs to know of an engine that trains on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedEngine:
    """Layouts of an engine and how they are launched."""

    name: str
    """As in a spec's `emit`; examples/engines has a folder of it, with dashes as underscores."""
    metrics: str
    """What `--metrics` of `moetune verify` reads its log with."""
    model: Path
    """The model's config.json."""
    goal: str
    """Lines of the spec's goal beside `kind` and `routing`."""
    layouts: Mapping[str, tuple[int, str]]
    """Ranks, and the limits of the search."""
    arguments: str
    """What follows `run.sh` on the command line; {steps} are those of a trial."""
    environment: Mapping[str, str]
    """Variables of the launch."""
    steps: int = 8
    """Optimizer steps of a launch."""

    @property
    def example(self) -> Path:
        """The folder of its example."""
        return CHECKOUT / "examples" / "engines" / self.name.replace("-", "_")

    @property
    def programs(self) -> Path:
        """The folder of the programs of its environment, which the example's setup.sh makes."""
        return CHECKOUT / f".venv-{self.name.removesuffix('-lm')}" / "bin"

    @property
    def stored(self) -> Path:
        """Its profile, routing and measured steps."""
        return CHECKOUT / "examples" / "profiles" / f"epyc-{self.name}"

    @property
    def setup(self) -> str:
        """A shell command that makes the environment, in the checkout."""
        called = self.name.removesuffix("-lm")
        return (
            f"source examples/setup.sh; source examples/engines/{self.example.name}/setup.sh;"
            f" setup_{called}"
        )
