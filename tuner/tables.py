"""Tables as data frames, which is how users meet them.

pandas takes half a second to import, so it is imported by whoever makes a table.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from profilers.records import Record

if TYPE_CHECKING:
    import pandas as pd

RecordT = TypeVar("RecordT", bound=Record)


def typed_table(
    rows: Iterable[Mapping[str, object] | Sequence[object]], types: Mapping[str, str]
) -> "pd.DataFrame":
    """Return the columns that `types` names, each of its type, with or without a row."""
    import pandas as pd

    table = pd.DataFrame(list(rows), columns=list(types), dtype=object)
    return table.astype(dict(types))


class Rows(tuple[RecordT, ...]):
    """Records of one kind. Called, they are a data frame.

    A field of a record within is a column such as `decision.zero_stage`; a band is two, such as
    `band_low` and `band_high`.
    """

    def __call__(self) -> "pd.DataFrame":
        """Return a data frame, a row a record."""
        import pandas as pd

        table = pd.json_normalize([row.model_dump(mode="json") for row in self])
        for name in map(str, table.columns):
            if name.endswith("band"):
                edges = [band or (None, None) for band in table.pop(name)]
                table[[f"{name}_low", f"{name}_high"]] = pd.DataFrame(edges, dtype=float)
        return table

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        records = handler(GenericAlias(tuple, (*get_args(source), ...)))
        return core_schema.no_info_after_validator_function(cls, records)
