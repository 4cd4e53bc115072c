"""Help of a command with many options: plain text, in groups.

Typer draws the panels that options name with rich, which takes longer to import than the help may
take. Here the same names become headings. Options without a panel come first.
"""

from typing import Any

from typer.core import TyperCommand

FIRST = "Options"


class PanelCommand(TyperCommand):
    """A command whose options are listed by their `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then every group of options under its heading."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], FIRST: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            default = FIRST if param.param_type_name == "option" else "Arguments"
            groups.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
