"""Registration of the format, and the versions of PySpark that it accepts."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import subprocess
import sys
from typing import Any

import pytest

from reliable_mq.errors import UsageError
from reliable_mq.spark import autoregister, check_version, register
from reliable_mq.spark.datasource import RabbitMQDataSource


class Session:
    """A session that only records registered sources."""

    def __init__(self, **settings: str) -> None:
        self.registered: list[type] = []
        self.conf = {name.replace("_", "."): value for name, value in settings.items()}

    @property
    def dataSource(self) -> Session:  # noqa: N802
        return self

    def register(self, source: Any) -> None:
        self.registered.append(source)


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_the_format_is_called_rabbitmq() -> None:
    """This holds for an explicit registration and for Spark's own discovery."""
    session: Any = Session()
    register(session)
    assert [source.name() for source in session.registered] == ["rabbitmq"]
    assert autoregister.DefaultSource is RabbitMQDataSource


@pytest.mark.parametrize(("setting", "warned"), [("true", True), ("false", False)])
def test_speculation_is_warned_of(caplog: pytest.LogCaptureFixture, setting: str, warned: bool) -> None:
    """`register` logs the warning; the guarantees of the sink are unchanged."""
    session: Any = Session(spark_speculation=setting)
    register(session)
    assert session.registered
    assert ("published twice, with the same message ids" in caplog.text) == warned


@pytest.mark.parametrize("version", ["4.1.1", "3.5.0", "4.0.0.dev1"])
def test_an_old_pyspark_is_refused_with_what_it_takes(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """The check precedes every import that an old PySpark lacks."""
    pretend(monkeypatch, pyspark=version)
    session: Any = Session()
    with pytest.raises(UsageError, match=rf"PySpark {version} is too old .* 4.2 or newer"):
        register(session)
    assert not session.registered


def test_spark_connect_or_a_missing_version_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark Connect's client is another package; an unpacked Spark has no version."""
    for versions in ({"pyspark_client": "4.2.0"}, {}):
        pretend(monkeypatch, **versions)
        check_version()


def test_an_old_pyspark_warns_and_keeps_its_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark imports the module for every session, so it only issues a warning."""
    pretend(monkeypatch, pyspark="4.1.0")
    with pytest.warns(UserWarning, match=r"PySpark 4\.1\.0 is too old"):
        found = runpy.run_path(autoregister.__file__)
    assert "DefaultSource" not in found


@pytest.mark.parametrize("missing", ["pyarrow", "pyspark.sql.streaming.datasource"])
def test_a_module_that_is_missing_leaves_the_other_sources_alone(missing: str) -> None:
    """The module is PyArrow, or one that an old Spark of unknown version lacks."""
    without = f"import runpy, sys; sys.modules[{missing!r}] = None; found = runpy.run_path({autoregister.__file__!r})"
    program = f"{without}; assert 'DefaultSource' not in found"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert re.search(rf"format\('rabbitmq'\) is not registered: .*{missing}.*; pip install", ended.stderr)
