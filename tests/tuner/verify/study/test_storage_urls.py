"""A URL that is none is refused in one line that does not hold its password."""

import pytest

from tuner.errors import SpecError, StudyError
from tuner.verify.study.postgres import PostgresStore


def test_malformed_urls_are_one_line_without_the_password() -> None:
    for url in (
        "postgresql://[",
        "postgresql://[::1:secret",
        "postgresql://u:secret@h:port/db",
        "postgresql://u:secret@[x]/db",
        "postgresql:secret",
        "postgresql://u:secret@h/db?plugin=none",
        "sqlite:///secret.db",
        "",
        "postgresql",
    ):
        with pytest.raises((SpecError, StudyError)) as raised:
            PostgresStore(url, study_name="x", on_message=print)
        message = str(raised.value)
        assert "secret" not in message, url
        assert "\n" not in message
