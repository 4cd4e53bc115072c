import json

import pytest

from tests.rows import each_row
from tests.tuner.cli.refusals import output
from tuner.cli.schema import SCHEMAS

PRINTED_ONLY = ("comparison", "doctor", "profile-diff", "report")
"""No file holds them, so none has to be read by a later version."""


@each_row("name", SCHEMAS)
def test_every_schema_is_an_object_with_documented_fields(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = json.loads(output(capsys, ["schema", name]))
    assert schema["type"] == "object"
    assert "schema_version" in json.dumps(schema) or name in PRINTED_ONLY
    assert schema["additionalProperties"] is False
