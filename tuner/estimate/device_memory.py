"""Decides whether a configuration fits its devices: a launch, its longest samples, its changes.

A plan leaves memory for what it cannot foresee; a launch that runs needs none, so it fits where it
is likelier to run than to run out of what the devices have. A share that the spec states is kept.
"""

from typing import Final

from tuner.estimate.prices import (
    SOFTWARE_OF,
    PricedConfiguration,
    PricingSetup,
    uneven_load_bytes,
)
from tuner.search.train.memory_risk import MemoryForecast, forecast_memory

MOST_RISK: Final = 0.5
"""Probability of running out of memory up to which a launch is said to fit."""


def memory_forecast(priced: PricedConfiguration, setup: PricingSetup) -> MemoryForecast:
    """Return the chance that a configuration runs out of memory, and what that costs."""
    is_uneven = setup.expert_imbalance is None and setup.model.moe is not None
    return forecast_memory(
        priced.peak_bytes_P,
        uneven_load_bytes(priced.configuration, setup) if is_uneven else 0.0,
        capacity_bytes=setup.memory_capacity_bytes,
        software=SOFTWARE_OF[priced.configuration.engine].software,
        prices=setup.loss_prices,
    )


def leaves_reserve(priced: PricedConfiguration, setup: PricingSetup) -> bool:
    """Say whether a configuration needs no more than a plan may use."""
    return float(priced.peak_bytes_P.max()) <= setup.memory_limit_bytes


def fits_devices(priced: PricedConfiguration, setup: PricingSetup) -> bool:
    """Say whether every device has the memory that a configuration needs."""
    if leaves_reserve(priced, setup):
        return True
    is_stated = "usable_memory_ratio" in setup.pool.model_fields_set
    if is_stated or float(priced.peak_bytes_P.max()) > setup.memory_capacity_bytes:
        return False
    return memory_forecast(priced, setup).out_of_memory_probability < MOST_RISK
