"""A serving machine that notes which measured tables its prices are looked up in."""

from dataclasses import dataclass, fields

from tuner.devices.datasheet import Generation
from tuner.prices.lookups import Lookups
from tuner.prices.ops import Op
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.machine import ServingMachine
from tuner.prices.serve.profiled import grouped_experts


@dataclass(frozen=True, kw_only=True, eq=False)
class NotedMachine(ServingMachine):
    """One system, and a note of what was looked up.

    A share of its devices (multiplexing.py) notes nothing: its steps look up what whole ones do.
    """

    lookups: Lookups

    def measured_s(self, op: Op) -> Floats | None:
        """Wall time as measured; None where no table holds the shape."""
        is_profiled = op.operation == "moe" and self.sheet.generation is Generation.PROCESSOR
        self.lookups.note(grouped_experts(op) if is_profiled else op)
        return super().measured_s(op)

    def deepep_s(
        self, tokens_Q: Floats, *, hidden: int, top_k: float, ranks: int
    ) -> tuple[Floats | None, Floats | None]:
        """Dispatch and combine by DeepEP's kernels, which are imported only."""
        self.lookups.unmeasured.add("expert_all_to_all")
        return super().deepep_s(tokens_Q, hidden=hidden, top_k=top_k, ranks=ranks)


def noting(machine: ServingMachine, lookups: Lookups) -> NotedMachine:
    """Return a machine that notes what is looked up."""
    known = {
        field.name: getattr(machine, field.name) for field in fields(ServingMachine) if field.init
    }
    return NotedMachine(lookups=lookups, **known)
