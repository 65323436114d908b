"""Options of connections, and credentials providers with an import path."""

from __future__ import annotations

import pickle
import sys
from typing import TYPE_CHECKING

import pytest

from reliable_mq.errors import BrokerUnavailable, ConfigurationError
from reliable_mq.settings import Credentials
from reliable_mq.spark.connection_options import ConnectionOptions
from reliable_mq.spark.options import read_options, write_options

if TYPE_CHECKING:
    from pathlib import Path

    from reliable_mq.settings import ConnectionSettings

NOWHERE = "amqp://broker.example/"


def settings(url: str, **given: str) -> ConnectionSettings:
    options = write_options({"url": url, "routingKey": "k", **given})
    assert pickle.loads(pickle.dumps(options)) == options
    return options.connection.settings(options.url)


def test_each_option_is_taken() -> None:
    """Sources and sinks accept the options that correspond to a publisher's."""
    given = {"connection.heartbeat": "30s", "connection.timeout": "1500ms", "connection.caFile": "/ca.pem"}
    given |= {"connection.certFile": "/c.pem", "connection.keyFile": "/k.pem", "connection.serverName": "mq"}
    made = settings("amqps://u:p@broker.example/", **given)
    assert (made.heartbeat, made.connect_timeout) == (30, 1.5)
    assert made.tls is not None
    files = (made.tls.ca_file, made.tls.cert_file, made.tls.key_file, made.tls.server_name)
    assert files == ("/ca.pem", "/c.pem", "/k.pem", "mq")
    for mode in ({"queue": "q"}, {"stream": "s"}):
        read = read_options({"url": "amqps://u:p@broker.example/", **mode, **given}, streaming=True)
        assert read.connection.settings(read.url) == made


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"connection.heartbeat": "0s"}, "^connection.heartbeat must be whole seconds, 1s to 65534s, not '0s'"),
        ({"connection.heartbeat": "65535s"}, "^connection.heartbeat must be whole seconds, 1s to 65534s"),
        ({"connection.heartbeat": "1500ms"}, "connection.heartbeat must be whole seconds"),
        ({"connection.timeout": "10"}, "connection.timeout must be a time with its unit"),
        ({"connection.timeout": "0s"}, "^connection.timeout must be longer"),
        ({"connection.caFile": "/ca.pem"}, "^connection.caFile is given, .*use amqps"),
        ({"connection.keyFile": "/k.pem"}, "^connection.keyFile is given without connection.certFile"),
        ({"connection.cafiles": "/ca.pem"}, "did you mean connection.caFile"),
        ({"credentialsProvider": "os.getpid"}, "must be package.module:function"),
        ({"credentialsProvider": "no.such.module:function"}, "No module named 'no'"),
        ({"credentialsProvider": "os:no_such"}, "no attribute 'no_such'"),
        ({"credentialsProvider": "os:sep"}, "is a str, and no function"),
        ({"credentialsProvider": "os:getpid"}, "^credentialsProvider is given twice"),
    ],
)
def test_what_is_not_understood_is_refused(given: dict[str, str], says: str) -> None:
    """The error is raised on the driver before anything connects."""
    with pytest.raises(ConfigurationError, match=says):
        settings("amqp://u:p@broker.example/", **given)


@pytest.mark.parametrize(
    ("url", "given", "says"),
    [
        ("amqp://u:p@h/?heartbeat=9", {"connection.heartbeat": "9s"}, "^connection.heartbeat is given twice"),
        ("amqp://u:p@h/?heartbeat=0", {}, "^heartbeat must be"),
        ("amqp://u:p@h/?connection_timeout=900", {"connection.timeout": "9s"}, "^connection.timeout is given twice"),
        ("amqps://u:p@h/?certfile=c", {"connection.caFile": "a"}, "^certfile is in the URL beside connection.caFile:"),
        (NOWHERE, {}, "write user:password@host, or give credentialsProvider"),
    ],
)
def test_what_the_url_lacks_or_contradicts_is_refused(url: str, given: dict[str, str], says: str) -> None:
    """The error names the option if there is one, not the argument."""
    with pytest.raises(ConfigurationError, match=says):
        settings(url, **given)


def test_a_file_that_cannot_be_read_is_named_by_its_option() -> None:
    """Files are read at each connect, on the host that connects."""
    made = settings("amqps://u:p@h/", **{"connection.caFile": "/no/such.pem"})
    assert made.tls is not None
    with pytest.raises(ConfigurationError, match=r"^connection.caFile '/no/such.pem' cannot be read"):
        made.tls.build_context()


def test_a_provider_is_imported_where_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import error names the host and Python of the executor, and no secret."""
    (tmp_path / "vault.py").write_text("import reliable_mq\ndef login():\n    return ('user', 's3cret')\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = ConnectionOptions(provider="vault:login")
    made = options.settings(NOWHERE)
    assert made.resolve_credentials() == Credentials("user", "s3cret")
    assert "s3cret" not in repr((options, made))
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "vault")
    with pytest.raises(ConfigurationError, match=f"cannot be imported on host .* by {sys.executable}: No module named"):
        options.settings(NOWHERE)


@pytest.mark.parametrize("when", ["import", "call"])
def test_the_text_of_a_provider_that_fails_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Spark prints whole tracebacks, including causes."""
    failing = "raise RuntimeError('s3cret')"
    (tmp_path / "broken.py").write_text(failing if when == "import" else f"def login():\n    {failing}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises((ConfigurationError, BrokerUnavailable)) as raised:
        ConnectionOptions(provider="broken:login").settings(NOWHERE).resolve_credentials()
    errors: list[BaseException] = [raised.value]
    while (before := errors[-1].__cause__ or errors[-1].__context__) is not None:
        errors.append(before)
    assert any("RuntimeError" in str(error) for error in errors)
    assert not any("s3cret" in str(error) for error in errors)
