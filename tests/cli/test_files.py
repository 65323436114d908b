"""A file is replaced only when the new one is on the disk."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from reliable_mq.cli.files import whole_file


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_has_all_of_it_at_the_end_and_the_old_until_then(tmp_path: Path) -> None:
    path = tmp_path / "dead.jsonl"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert names(tmp_path) == ["dead.jsonl"]


@pytest.mark.parametrize("error", [OSError("no broker"), KeyboardInterrupt()])
def test_an_error_leaves_the_old_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "dead.jsonl"
    path.write_bytes(b"old")

    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["dead.jsonl"]


def test_a_new_file_has_the_mode_that_any_file_would_have(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with whole_file(tmp_path / "new"):
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_link_stays_one(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to(target)
    with whole_file(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with whole_file(pipe) as file:
        file.write(b"new")
    reader.join(10)
    assert read == [b"new"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_pipe_that_has_no_name_is_written_as_it_is() -> None:
    """As in ``dlq export URL q >(gzip > f)``, or to ``/dev/stdout`` in a pipeline."""
    reading, writing = os.pipe()
    try:
        with whole_file(Path(f"/dev/fd/{writing}")) as file:
            file.write(b"new")
        assert os.read(reading, 10) == b"new"
    finally:
        os.close(reading)
        os.close(writing)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), whole_file(tmp_path):
        pass


def test_a_place_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "no" / "file"
    with pytest.raises(FileNotFoundError, match="no file can be created in its directory") as caught, whole_file(path):
        pass
    assert caught.value.filename == str(path)


def test_a_long_name_of_other_letters_is_written(tmp_path: Path) -> None:
    """A name has 255 bytes at most, and the unfinished file has a longer name."""
    path = tmp_path / ("\u65e5" * 85)
    with whole_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
