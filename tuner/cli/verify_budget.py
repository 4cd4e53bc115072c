"""`--budget` and `--max-devices` of `moetune verify`, as a budget."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.verify.budget.scheduler import Budget


def parse_budget(wall: str, max_devices: int | None) -> "Budget | None":
    """Return the requested budget; None without one.

    Raises:
        SpecError: no duration.
    """
    from tuner.errors import SpecError
    from tuner.units import parse_seconds
    from tuner.verify.budget.scheduler import Budget

    if not wall and max_devices is None:
        return None
    if not wall:
        return Budget(max_devices=max_devices)
    try:
        return Budget(wall_s=parse_seconds(wall), max_devices=max_devices)
    except ValueError as error:
        raise SpecError(f"--budget: {error}") from error
