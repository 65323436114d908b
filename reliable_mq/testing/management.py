"""A client of RabbitMQ's management API, for tests.

The counts of the API lag by the statistics interval (1 s in the lab). `VirtualHost.live_counts` does not lag.
"""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
from typing import Any, Final
from urllib.parse import quote

from reliable_mq.errors import LabError

_DIRECTLY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without the proxy of `http_proxy`


class ManagementAPIError(LabError):
    """An error status from the management API.

    Attributes:
        status: The HTTP status, such as 404.
        text: The body of the response.
    """

    def __init__(self, message: str, *, status: int, text: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.text = text


class Management:
    """The management API of one broker. Thread-safe. Each call opens one connection.

    Args:
        url: The URL of the API, without ``/api``.
        user: The name of the user.
        password: The password of the user.
        timeout: The timeout of each call, in seconds.
    """

    def __init__(self, url: str, *, user: str = "guest", password: str = "guest", timeout: float = 15.0) -> None:  # noqa: S107  # a fresh broker's own
        self.url = url
        self._timeout = timeout
        self._authorization = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    def call(self, method: str, *segments: str, body: Any = None, query: str = "") -> Any:
        """Call ``/api/<segments>``. Return the decoded response, or None if it is empty.

        Args:
            method: The HTTP method.
            segments: The segments of the path. Each is percent-encoded.
            body: A value to send as JSON, or None for no body.
            query: The query of the URL, with its question mark.

        Raises:
            ManagementAPIError: If the status is 400 or above.
            LabError: If the broker does not answer.
        """
        path = "/api/" + "/".join(quote(segment, safe="") for segment in segments) + query
        request = urllib.request.Request(  # noqa: S310  # the URL is the lab's own
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": self._authorization, "Content-Type": "application/json"},
        )
        try:
            with _DIRECTLY.open(request, timeout=self._timeout) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            raise ManagementAPIError(
                f"{method} {path}: {error.code} {text[:300]}", status=error.code, text=text
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise LabError(
                f"{method} {path}: no management API answers at {self.url} ({error}): "
                "start the broker, or take an image with the management plugin"
            ) from error
        return json.loads(content) if content else None

    def alarms(self) -> set[str]:
        """Return the alarms in effect on this node: ``"memory"``, ``"disk"``."""
        try:
            self.call("GET", "health", "checks", "local-alarms")
        except ManagementAPIError as error:
            if error.status != 503:
                raise
            return {each["resource"].split()[0] for each in json.loads(error.text)["alarms"]}  # "disk space"
        return set()

    def connections(self, virtual_host: str) -> list[dict[str, Any]]:
        """Return the connections to a virtual host, according to the lagging statistics."""
        return [each for each in self.call("GET", "connections") if each.get("vhost") == virtual_host]
