"""One writer of a folder at a time, and nothing left in it."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from profilers.errors import ProfileUnwritableError
from profilers.session import measure_profile
from profilers.sole_writer import sole_writer
from tests.expect import present


def test_the_second_writer_is_refused_and_the_lock_goes_with_its_holder(tmp_path: Path) -> None:
    with sole_writer(tmp_path, what="`moetune profile`"):
        with (
            pytest.raises(ProfileUnwritableError, match="another `moetune profile` writes there"),
            sole_writer(tmp_path, what="`moetune profile`"),
        ):
            pass
        with pytest.raises(ProfileUnwritableError, match="wait for it") as raised:
            measure_profile(tmp_path, suites=("storage",), budget_s=1.0)
    assert raised.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []
    with sole_writer(tmp_path, what="x"):
        pass


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from profilers.sole_writer import sole_writer\n"
        "with sole_writer(Path(sys.argv[1]), what='x'):\n    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as holder:
        assert present(holder.stdout).readline() == "held\n"
        with pytest.raises(ProfileUnwritableError), sole_writer(tmp_path, what="x"):
            pass
        holder.kill()
    with sole_writer(tmp_path, what="x"):
        pass


def test_a_file_system_without_locks_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(_descriptor: int, _operation: int) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with sole_writer(tmp_path, what="x"), sole_writer(tmp_path, what="x"):
        pass
