"""Idempotency stores in Redis (or Valkey), for fleets: the fastest that processes on several machines can share.

Invariants: a question is one script per thousand keys, all sent in one write; each attempt at it ends within the
timeout, and there are two at most, the second at once and only where a connection broke; both ask in the name of the
same holder.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from reliable_mq.durations import Duration, seconds
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError
from reliable_mq.stores.questions import (
    DAY,
    Doubts,
    claims_in_order,
    held_by,
    microseconds,
    stored_key,
    taken_in_order,
    the_one_loop,
    unique,
)
from reliable_mq.stores.redis_script import CLAIM, COMPLETE, RELEASE, RESET, TOGETHER, answers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reliable_mq.core.claims import Claim

__all__ = ["AsyncRedisStore", "RedisStore"]

_PREFIX: Final = "{reliable-mq}:claim:"  # in braces: in a cluster, all keys of a script must be in one slot
_BROKEN: Final = (redis.ConnectionError, OSError)  # also where a server that was restarted has closed a connection

Script = tuple[list[str], list[object]]


class _Questions:
    """What both faces ask, and how they read the answers."""

    def __init__(self, where: str, retention: Duration, timeout: Duration, prefix: str) -> None:
        self._where = where
        self._retention = max(int(seconds("retention", retention, positive=True) * 1000), 1)
        self._timeout = seconds("timeout", timeout, positive=True)
        if not isinstance(prefix, str):
            raise ConfigurationError(f"prefix must be text, not {prefix!r}")
        self._prefix = prefix
        self._doubts = Doubts()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self._where}>"

    def _claims(self, holders: Mapping[str, int], lease: float) -> list[Script]:
        settings = [microseconds(lease), self._retention]
        return [(names, [*settings, *(holders[name] for name in names)]) for names in _parts(list(holders))]

    def _settlements(self, held: Sequence[tuple[str, int]], *settings: object) -> list[Script]:
        return [([key for key, _ in part], [*settings, *(token for _, token in part)]) for part in _parts(held)]

    def _fill(self, pipeline: Any, script: Any, scripts: list[Script]) -> None:
        """By their digest: a script that is given a pipeline asks first, in a round trip more, whether it is there."""
        for names, arguments in scripts:
            pipeline.evalsha(script.sha, len(names), *self._keys(names), *arguments)

    def _keys(self, names: Sequence[str]) -> list[str]:
        return [self._prefix + name for name in names]

    def _failed(self, error: Exception) -> IdempotencyStoreError:
        return IdempotencyStoreError(f"{self!r} failed: {type(error).__name__}: {error}")


def _parts(items: Sequence[Any]) -> Iterator[Any]:
    for start in range(0, len(items), TOGETHER):
        yield items[start : start + TOGETHER]


def _claimed(
    keys: Sequence[str], stored: Mapping[str, str], holders: Mapping[str, int], replies: list[Any]
) -> list[Claim]:
    found = dict(zip(holders, (answer for reply in replies for answer in answers(reply)), strict=True))
    return claims_in_order(keys, {key: found[name].claim(key) for key, name in stored.items()})


def _taken(items: Sequence[Any], replies: list[Any]) -> set[Any]:
    marks = (mark for reply in replies for mark in reply)
    return {item for item, mark in zip(items, marks, strict=True) if mark}


class RedisStore(_Questions):
    """Deduplicates among all processes that use the same Redis. Thread-safe; a question costs one round trip.

    Connects at the first question. Redis 6 or newer, with ``maxmemory-policy noeviction``; what Redis forgets, by
    eviction, by a restart without persistence or by a failover to a replica that is behind, takes effect again.

    Args:
        url: ``redis://[user:password@]host[:port][/database]``, ``rediss://`` for TLS or ``unix://``; or a
            ``redis.Redis`` of your own (from a ``Sentinel``, say), which must have a ``socket_timeout``.
        retention: seconds for which a done key is remembered, and the failures of one that is not.
        timeout: seconds that Redis may take to connect, or to answer; where the connection breaks, it is asked again
            once. Of a client of your own, its ``socket_timeout`` holds instead.
        prefix: what the keys begin with, in Redis; keep braces in it in a cluster.
        options: further arguments of ``redis.Redis``, such as ``ssl_ca_certs``.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    def __init__(
        self,
        url: str | redis.Redis,
        *,
        retention: Duration = DAY,
        timeout: Duration = 5.0,
        prefix: str = _PREFIX,
        **options: Any,
    ) -> None:
        super().__init__(_where(url), retention, timeout, prefix)
        self._own = isinstance(url, str)
        if isinstance(url, str):
            self._redis: Any = _from_url(redis.Redis, url, self._timeout, Retry(NoBackoff(), 0), options)
        elif isinstance(url, redis.Redis):
            _check_client(url, options)
            self._redis = url
        else:
            raise ConfigurationError(f"url must be a URL or a redis.Redis, not {type(url).__name__}")
        self._claim, self._complete, self._release, self._reset = (
            self._redis.register_script(script) for script in (CLAIM, COMPLETE, RELEASE, RESET)
        )

    def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """See `IdempotencyStore.claim_many`.

        Raises:
            IdempotencyStoreError: Redis cannot be reached, does not answer in time, or answers with an error.
        """
        stored = unique(keys)
        holders = self._doubts.holders(stored.values())
        try:
            replies = self._run(self._claim, self._claims(holders, lease))
        except BaseException:
            self._doubts.unanswered(holders)
            raise
        return _claimed(keys, stored, holders, replies)

    def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """See `IdempotencyStore.complete_many`. Errors as for `claim_many`."""
        held = held_by(claims)
        replies = self._run(self._complete, self._settlements(held, self._retention))
        return taken_in_order(claims, _taken(held, replies))

    def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """See `IdempotencyStore.release_many`. Errors as for `claim_many`."""
        held = held_by(claims)
        replies = self._run(self._release, self._settlements(held, self._retention, int(failed)))
        return taken_in_order(claims, _taken(held, replies))

    def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """See `ResettableStore.reset_many`. Errors as for `claim_many`."""
        names = list(unique(keys).values())
        reset = _taken(names, self._run(self._reset, [(part, []) for part in _parts(names)]))
        return [stored_key(key) in reset for key in keys]

    def close(self) -> None:
        """Close the connections. Another question opens some again. A client of your own is left as it is."""
        if self._own:
            self._redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, script: Any, scripts: list[Script]) -> list[Any]:
        try:
            try:
                return self._run_once(script, scripts)
            except _BROKEN:
                return self._run_once(script, scripts)
        except (redis.RedisError, OSError) as error:
            raise self._failed(error) from error

    def _run_once(self, script: Any, scripts: list[Script]) -> list[Any]:
        if len(scripts) < 2:
            return [script(keys=self._keys(names), args=arguments) for names, arguments in scripts]
        try:
            return self._run_together(script, scripts)
        except redis.exceptions.NoScriptError:
            self._redis.script_load(script.script)
            return self._run_together(script, scripts)

    def _run_together(self, script: Any, scripts: list[Script]) -> list[Any]:
        with self._redis.pipeline(transaction=False) as pipeline:
            self._fill(pipeline, script, scripts)
            replies: list[Any] = pipeline.execute()
            return replies


class AsyncRedisStore(_Questions):
    """The same for ``AsyncConsumer``, on ``redis.asyncio``, with the arguments of `RedisStore`.

    To be used by one event loop. The timeout is that of a whole question.
    """

    def __init__(
        self,
        url: str | redis.asyncio.Redis,
        *,
        retention: Duration = DAY,
        timeout: Duration = 5.0,
        prefix: str = _PREFIX,
        **options: Any,
    ) -> None:
        super().__init__(_where(url), retention, timeout, prefix)
        self._own = isinstance(url, str)
        if isinstance(url, str):
            self._redis: Any = _from_url(redis.asyncio.Redis, url, self._timeout, AsyncRetry(NoBackoff(), 0), options)
        elif isinstance(url, redis.asyncio.Redis):
            _check_client(url, options)
            self._redis = url
        else:
            raise ConfigurationError(f"url must be a URL or a redis.asyncio.Redis, not {type(url).__name__}")
        self._claim, self._complete, self._release, self._reset = (
            self._redis.register_script(script) for script in (CLAIM, COMPLETE, RELEASE, RESET)
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    async def claim_many(self, keys: Sequence[str], lease: float) -> list[Claim]:
        """See `RedisStore.claim_many`."""
        stored = unique(keys)
        holders = self._doubts.holders(stored.values())
        try:
            replies = await self._run(self._claim, self._claims(holders, lease))
        except BaseException:
            self._doubts.unanswered(holders)
            raise
        return _claimed(keys, stored, holders, replies)

    async def complete_many(self, claims: Sequence[Claim]) -> list[bool]:
        """See `RedisStore.complete_many`."""
        held = held_by(claims)
        replies = await self._run(self._complete, self._settlements(held, self._retention))
        return taken_in_order(claims, _taken(held, replies))

    async def release_many(self, claims: Sequence[Claim], *, failed: bool) -> list[bool]:
        """See `RedisStore.release_many`."""
        held = held_by(claims)
        replies = await self._run(self._release, self._settlements(held, self._retention, int(failed)))
        return taken_in_order(claims, _taken(held, replies))

    async def reset_many(self, keys: Sequence[str]) -> list[bool]:
        """See `RedisStore.reset_many`."""
        names = list(unique(keys).values())
        reset = _taken(names, await self._run(self._reset, [(part, []) for part in _parts(names)]))
        return [stored_key(key) in reset for key in keys]

    async def close(self) -> None:
        """See `RedisStore.close`."""
        if self._own:
            await self._redis.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _run(self, script: Any, scripts: list[Script]) -> list[Any]:
        self._loop = the_one_loop(self, self._loop)
        try:
            async with asyncio.timeout(self._timeout):
                try:
                    return await self._run_once(script, scripts)
                except _BROKEN:
                    return await self._run_once(script, scripts)
        except (redis.RedisError, OSError) as error:
            raise self._failed(error) from error

    async def _run_once(self, script: Any, scripts: list[Script]) -> list[Any]:
        if len(scripts) < 2:
            return [await script(keys=self._keys(names), args=arguments) for names, arguments in scripts]
        try:
            return await self._run_together(script, scripts)
        except redis.exceptions.NoScriptError:
            await self._redis.script_load(script.script)
            return await self._run_together(script, scripts)

    async def _run_together(self, script: Any, scripts: list[Script]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            self._fill(pipeline, script, scripts)
            replies: list[Any] = await pipeline.execute()
            return replies


def _where(url: object) -> str:
    """Return where the server is, without what is secret."""
    if not isinstance(url, str):
        return "a client of yours"
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError:
        parts, port = None, 0
    if parts is None or "@" in parts.path + parts.query + parts.fragment:
        # What urlsplit says shows the text, and so maybe the password: its beginning may be taken for a port.
        raise ConfigurationError(
            "url is none of Redis's, redis://[user:password@]host[:port][/database]: its port is no number, or its "
            "password holds '/', '?', '#', '[' or '@': percent-encode them (%2F, %3F, %23, %5B, %40)"
        )
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or "localhost"
    return parts.path if parts.scheme == "unix" else f"{host}:{port}"


def _from_url(kind: Any, url: str, timeout: float, retry: object, options: dict[str, Any]) -> Any:
    settings = {"socket_timeout": timeout, "socket_connect_timeout": timeout, "retry": retry, **options}
    try:
        return kind.from_url(url, **settings)
    except ValueError as error:
        raise ConfigurationError(f"url is none of Redis's: {error}") from error


def _check_client(client: Any, options: dict[str, Any]) -> None:
    if options:
        raise ConfigurationError(f"{', '.join(options)}: to be given to the client of your own")
    if client.get_connection_kwargs().get("socket_timeout") is None:
        raise ConfigurationError("the client must have a socket_timeout, or a Redis that hangs would hang the consumer")
