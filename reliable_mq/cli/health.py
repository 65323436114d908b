"""The command ``reliable-mq health``: query a probe, for exec probes and by hand.

Invariant: the response of a foreign server is limited in size, and shown without control characters.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from reliable_mq.cli.terminal import escaped, hide_logs
from reliable_mq.errors import BrokerUnavailable, ConfigurationError

_MOST_BYTES: Final = 1024 * 1024  # of a response
_ANSWERS: Final = (200, 503)
_STATES: Final = ("live", "ready", "progressing")


def health(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="The probe, such as http://127.0.0.1:8080/livez. Without a path: /readyz.",
        ),
    ],
    *,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for the response.")
    ] = 3.0,
) -> None:
    """Query the probe of a running program (`reliable_mq.health`).

    The exit status is 0 if the program is well, and 1 if it is not, or does not respond. Each line is one publisher or
    consumer, with the reason.
    """
    hide_logs()
    status, report = _ask(url, timeout)
    for part in report["parts"]:
        print(escaped(_line(part)))
    raise typer.Exit(status != _ANSWERS[0])


def _line(part: dict[str, Any]) -> str:
    state = ", ".join(name if part[name] else f"not {name}" for name in _STATES if name in part)
    reason = f": {part['reason']}" if part.get("reason") else ""
    return f"{part.get('part')}: {state} since {part.get('since')}{reason}"


def _ask(url: str, timeout: float) -> tuple[int, dict[str, Any]]:
    """Return the status and the report of a probe. Refuse other responses."""
    import http.client
    from contextlib import closing
    from urllib.parse import urlsplit

    from reliable_mq._util.threads import DaemonExecutor
    from reliable_mq._util.validation import decode_json, is_host, seconds

    seconds("--timeout", timeout)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"the URL of the probe is invalid: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigurationError("the URL of a probe begins with http:// or https://, such as http://127.0.0.1:8080")
    if not is_host(host):
        raise ConfigurationError("the URL of the probe has a host with no character, or more than 63, between its dots")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port, timeout=timeout)

    def get(_: object) -> tuple[int, str, bytes]:
        with closing(connection):
            connection.request("GET", parts.path.rstrip("/") or "/readyz", headers={"Connection": "close"})
            response = connection.getresponse()
            return response.status, response.reason, response.read(_MOST_BYTES)

    # A socket's timeout applies to each read: a server that trickles would block the probe forever.
    try:
        status, reason, body = DaemonExecutor("probe", 1).call(get, timeout)
    except UnicodeError:
        raise ConfigurationError(
            "the URL of the probe holds a character that is not ASCII: percent-encode it"
        ) from None
    except TimeoutError:  # from the call or the socket
        raise BrokerUnavailable(f"no response from {host}: not complete within {timeout:g} s") from None
    except Exception as error:
        raise BrokerUnavailable(f"no response from {host}: {str(error) or type(error).__name__}") from error
    if status not in _ANSWERS:
        raise ConfigurationError(f"{host} responded with {status} {reason}: is this the URL of a probe?")
    try:
        report = decode_json(body)
        report["parts"][0]["live"]
        [part.keys() for part in report["parts"]]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ConfigurationError(f"{host} did not respond like a probe: is this the URL of one?") from None
    return status, report
