"""Figures of plans for people: names, and numbers with units."""

from typing import Final

from tuner.units import format_bytes, format_number, format_ratio, format_s

FIGURES: Final = {
    "step_time_s": "step time",
    "tokens_per_s": "tokens/s",
    "fastest_step_time_s": "fastest step found",
    "tokens_per_s_per_device": "tokens/s per device",
    "peak_memory_bytes": "peak memory",
    "mfu_ratio": "MFU",
    "run_s": "whole run",
    "run_cost": "cost of the run",
    "num_devices": "devices",
    "requests_per_s": "requests/s",
    "goodput_per_device": "goodput per device",
    "ttft_mean_s": "TTFT mean",
    "ttft_p90_s": "TTFT P90",
    "tpot_mean_s": "TPOT mean",
    "tpot_p90_s": "TPOT P90",
    "cost_per_hour": "cost per hour",
    "cost_per_million_input_tokens": "cost per million input tokens",
    "cost_per_million_output_tokens": "cost per million output tokens",
    "objective": "objective",
    "busiest_rank_ratio": "load of the most-loaded ranks",
}
"""Names of the figures that plans are compared by (tuner/goals/goal.py)."""


def figure_text(name: str, value: float) -> str:
    """Write a figure by the unit in its name."""
    if name.endswith("_s") and not name.endswith("_per_s"):
        return format_s(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_ratio"):
        return format_ratio(value)
    return format_number(value)
