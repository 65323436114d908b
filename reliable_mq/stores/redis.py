"""Idempotency stores in Redis or Valkey, the fastest for several machines.

A call is one Lua script per thousand keys, all sent in one write. A record is a string,
``1|state|token|holder|attempts|lease ends``. The first number is the format. The state is ``f`` (free, after failed
attempts), ``c`` (claimed) or ``d`` (done). The end of the lease is in microseconds since 1970. Redis deletes the record
when its time to live is over.

Invariants:

- an attempt at a call ends within the timeout, and there are at most two: the second follows at once, in the name of
  the same holder, and only if the connection broke or the server answered with an error;
- when the server has answered with an error, the idle connections of the client are closed, also of a user's own: the
  server may have become a replica, or lost its replicas, and its name or the Sentinels may lead to the new primary;
- all times are by the server's clock, so the clients' clocks do not matter;
- a claim that finds its own holder keeps the token, so a script that was delayed and then repeated does no harm;
- a token is greater than the key's previous one and not below the time, so it is not used again after the record is
  deleted;
- a record of another format is neither changed nor interpreted.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from reliable_mq._util.validation import Duration, is_text, seconds
from reliable_mq.core.idempotency import ClaimStatus
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError
from reliable_mq.stores.base import DAY, AsyncStore, ClaimAnswer, Held, Queries, StoreBase, SyncStore, microseconds

T = TypeVar("T")
_KEYS_PER_SCRIPT: Final = 1000  # at most; Lua's stack holds only about 8000 values

_PARSE: Final = """
local found = redis.call('MGET', unpack(KEYS))
local function parse(record)
  return string.match(record, '^1|(%a)|(%d+)|(%d+)|(%d+)|(%d+)$')
end
"""

#: Arguments: the lease in microseconds, the retention in milliseconds, a holder per key. Reply: status, token and
#: attempts per key.
CLAIM: Final = (
    _PARSE
    + """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ends = string.format('%.0f', now + ARGV[1])
local kept = string.format('%.0f', math.ceil(ARGV[1] / 1000) + ARGV[2])
local replies = {}
for i, key in ipairs(KEYS) do
  local record, holder = found[i], ARGV[2 + i]
  local status, state, token, held_by, attempts, lease_ends = 'n', 'f', 0, '0', '0', 0
  if record then
    state, token, held_by, attempts, lease_ends = parse(record)
    if not state then
      status = 'u'
    elseif state == 'd' then
      status = 'd'
    elseif state == 'c' and held_by ~= holder and tonumber(lease_ends) > now then
      status = 'p'
    end
  end
  if status == 'n' then
    if not (state == 'c' and held_by == holder) then
      token = string.format('%.0f', math.max(token + 1, now))
    end
    redis.call('SET', key, table.concat({'1', 'c', token, holder, attempts, ends}, '|'), 'PX', kept)
  end
  replies[#replies + 1] = status
  replies[#replies + 1] = status == 'n' and token or '0'
  replies[#replies + 1] = attempts or '0'
end
return replies
"""
)


def _for_each_record(change: str) -> str:
    """Return a script that changes the records that can be read.

    It replies 1 or 0 per key. ``change`` is Lua code for one record. It sets ``replies[i]`` to 1 if it applies.
    """
    return f"""{_PARSE}
local replies = {{}}
for i, key in ipairs(KEYS) do
  replies[i] = 0
  local state, token, holder, attempts, ends
  if found[i] then
    state, token, holder, attempts, ends = parse(found[i])
  end
  if state then{change}  end
end
return replies
"""


#: Arguments: the retention in milliseconds, a token per key.
COMPLETE: Final = _for_each_record("""
    if state ~= 'f' and token == ARGV[1 + i] then
      if state == 'c' then
        redis.call('SET', key, table.concat({'1', 'd', token, '0', attempts, '0'}, '|'), 'PX', ARGV[1])
      end
      replies[i] = 1
    end
""")

#: Arguments: the retention in milliseconds, 1 or 0 for a failed attempt, a token per key.
RELEASE: Final = _for_each_record("""
    if state == 'c' and token == ARGV[2 + i] then
      local counted = string.format('%d', attempts + ARGV[2])
      redis.call('SET', key, table.concat({'1', 'f', token, '0', counted, '0'}, '|'), 'PX', ARGV[1])
      replies[i] = 1
    end
""")

#: No arguments.
RESET: Final = _for_each_record("""
    if state ~= 'd' and attempts ~= '0' then
      redis.call('SET', key, table.concat({'1', state, token, holder, '0', ends}, '|'), 'KEEPTTL')
      replies[i] = 1
    end
""")

_SHA1: Final = {
    script: hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    for script in (CLAIM, COMPLETE, RELEASE, RESET)
}

_STATUS: Final = {
    b"n": ClaimStatus.NEW,
    b"p": ClaimStatus.IN_PROGRESS,
    b"d": ClaimStatus.DONE,
    b"u": ClaimStatus.UNREADABLE,
}
_PREFIX: Final = "{reliable-mq}:claim:"  # with braces, as all keys of a script must be in one slot of a cluster
# Errors that end a connection, which a restart of the server may also have closed.
_BROKEN: Final = (redis.ConnectionError, redis.ResponseError, OSError)


class _RedisBase(StoreBase):
    """The scripts of the calls. A query is a list of commands and gets their replies."""

    def __init__(self, where: str, retention: Duration, timeout: Duration, prefix: str) -> None:
        super().__init__()
        self._where = where
        self._retention = max(int(seconds("retention", retention, positive=True) * 1000), 1)
        self._timeout = seconds("timeout", timeout, positive=True)
        if not is_text(prefix):
            raise ConfigurationError(f"prefix must be text that can be encoded, not {prefix!r}")
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self._where}>"

    def _claim(self, holders: Mapping[str, int], lease: float) -> Queries[dict[str, ClaimAnswer]]:
        settings = [microseconds(lease), self._retention]
        reply = yield from self._evaluate(CLAIM, list(holders), settings, list(holders.values()))
        fields = [field.encode() if isinstance(field, str) else field for field in reply]
        answers = zip(fields[::3], fields[1::3], fields[2::3], strict=True)
        return {
            key: ClaimAnswer(_STATUS[status], int(token), int(attempts))
            for key, (status, token, attempts) in zip(holders, answers, strict=True)
        }

    def _complete(self, held: Sequence[Held]) -> Queries[set[Held]]:
        return self._settle(COMPLETE, held, [self._retention])

    def _release(self, held: Sequence[Held], failed: bool) -> Queries[set[Held]]:
        return self._settle(RELEASE, held, [self._retention, int(failed)])

    def _settle(self, script: str, held: Sequence[Held], settings: list[int]) -> Queries[set[Held]]:
        keys, tokens = [key for key, _ in held], [token for _, token in held]
        reply = yield from self._evaluate(script, keys, settings, tokens)
        return {item for item, changed in zip(held, reply, strict=True) if changed}

    def _reset(self, keys: Sequence[str]) -> Queries[set[str]]:
        reply = yield from self._evaluate(RESET, keys, [], [])
        return {key for key, changed in zip(keys, reply, strict=True) if changed}

    def _evaluate(
        self, script: str, keys: Sequence[str], settings: list[int], values: Sequence[int]
    ) -> Queries[list[Any]]:
        """Run a script on keys and their values; return its replies as one list."""
        commands = []
        for start in range(0, len(keys), _KEYS_PER_SCRIPT):
            part = slice(start, start + _KEYS_PER_SCRIPT)
            names = [self._prefix + key for key in keys[part]]
            commands.append(("EVALSHA", _SHA1[script], len(names), *names, *settings, *values[part]))
        try:
            try:
                replies = yield from _load_and_send(script, commands)
            except _BROKEN:
                replies = yield from _load_and_send(script, commands)
        except (redis.RedisError, OSError) as error:
            raise self._failed(error) from error
        return [field for reply in replies for field in reply]

    def _failed(self, error: Exception) -> IdempotencyStoreError:
        hint = ""
        if isinstance(error, redis.exceptions.MovedError):
            hint = "; the keys of the store are on another node of this cluster: use the URL of a single server"
        return IdempotencyStoreError(f"{self!r} failed: {type(error).__name__}: {error}{hint}")


def _load_and_send(script: str, commands: list[tuple[Any, ...]]) -> Queries[list[Any]]:
    """Send commands that name a script by digest; load it if the server lacks it."""
    try:
        replies: list[Any] = yield commands
    except redis.exceptions.NoScriptError:
        yield [("SCRIPT LOAD", script)]
        replies = yield commands
    return replies


class RedisStore(_RedisBase, SyncStore):
    """An idempotency store for all processes that use the same Redis.

    Thread-safe. Connects at the first call. A call costs one round trip. Requires Redis 6 or newer with
    ``maxmemory-policy noeviction``. If Redis loses the record of a message, by eviction, by a restart without
    persistence or by a failover to a replica that is behind, a duplicate of the message takes effect again. To lose
    none over restarts, it needs ``appendonly yes`` and ``appendfsync always``: with ``everysec``, a crash of its
    machine loses the last second.

    Args:
        url: A URL, ``redis://[user:password@]host[:port][/database]``, ``rediss://`` for TLS or ``unix://``. Or your
            own ``redis.Redis``, which must have a ``socket_timeout`` and no retries of its own
            (``retry=Retry(NoBackoff(), 0)``, from ``redis.retry`` and ``redis.backoff``). If it is from a ``Sentinel``,
            the connections to the Sentinels need a timeout and no retries, too, as ``sentinel_kwargs={"socket_timeout":
            1, "socket_connect_timeout": 1, "retry": Retry(NoBackoff(), 0)}``.
        retention: The time for which done keys, and the failed attempts of other keys, are remembered, in seconds.
        timeout: The time that Redis may take to connect, and to reply, in seconds. If the connection breaks, or Redis
            answers with an error, the call is repeated once on a new connection. The ``socket_timeout`` of your own
            client takes precedence.
        prefix: The prefix of the keys in Redis. With braces in it, a cluster has all keys on one node, but the store
            does not follow the redirection of another node.
        options: Further arguments of ``redis.Redis``, such as ``ssl_ca_certs``.

    Raises:
        ConfigurationError: If an argument is invalid.
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
        self._redis = _client(redis.Redis, "redis.Redis", url, self._timeout, Retry(NoBackoff(), 0), options)

    def close(self) -> None:
        """Close the connections until the next call. Your own client stays open."""
        if self._own:
            self._redis.close()

    def _send(self, query: list[tuple[Any, ...]]) -> list[Any]:
        try:
            if len(query) == 1:
                return [self._redis.execute_command(*query[0])]
            with self._redis.pipeline(transaction=False) as pipeline:
                for command in query:
                    pipeline.execute_command(*command)
                replies: list[Any] = pipeline.execute()
                return replies
        except redis.ResponseError:
            self._redis.connection_pool.disconnect(inuse_connections=False)
            raise


class AsyncRedisStore(_RedisBase, AsyncStore):
    """An idempotency store like `RedisStore`, for ``AsyncConsumer``.

    The arguments are the same, for ``redis.asyncio``. A store belongs to one event loop. The timeout limits a whole
    call, and must be above the sum of the Sentinels' timeouts.
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
        retry = AsyncRetry(NoBackoff(), 0)
        self._redis = _client(redis.asyncio.Redis, "redis.asyncio.Redis", url, self._timeout, retry, options)

    async def close(self) -> None:
        if self._own:
            await self._redis.aclose()

    async def _run(self, queries: Queries[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                return await super()._run(queries)
        except TimeoutError as error:
            raise self._failed(TimeoutError(f"no answer within {self._timeout:g} s")) from error

    async def _send(self, query: list[tuple[Any, ...]]) -> list[Any]:
        try:
            if len(query) == 1:
                return [await self._redis.execute_command(*query[0])]
            async with self._redis.pipeline(transaction=False) as pipeline:
                for command in query:
                    pipeline.execute_command(*command)
                replies: list[Any] = await pipeline.execute()
                return replies
        except redis.ResponseError:
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            raise


def _where(url: object) -> str:
    """Return the address of the server without secrets."""
    if not isinstance(url, str):
        return "a client of yours"
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
    except ValueError:
        parts, port = None, 0
    if parts is None or "@" in parts.path + parts.query + parts.fragment:
        # The error of urlsplit may show the beginning of the password, which it takes for a port.
        raise ConfigurationError(
            "url is not a Redis URL, redis://[user:password@]host[:port][/database]: its port is not a number, or its "
            "password holds '/', '?', '#', '[' or '@': percent-encode them (%2F, %3F, %23, %5B, %40)"
        )
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or "localhost"
    return parts.path if parts.scheme == "unix" else f"{host}:{port}"


def _client(kind: Any, name: str, url: object, timeout: float, retry: object, options: dict[str, Any]) -> Any:
    """Return a client for a URL, or the user's own client after a check."""
    if isinstance(url, str):
        settings = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": retry,
            "max_connections": 2**31 - 1,  # at its limit, redis-py does not wait but raises an error
            **options,
        }
        try:
            client = kind.from_url(url, **settings)
            _connection(client)  # checks its arguments
        except ValueError as error:
            raise ConfigurationError(f"url is not a Redis URL: {error}") from error
        except TypeError as error:
            raise ConfigurationError(f"an option, here or in the URL, is not an option of {name}: {error}") from error
    elif not isinstance(url, kind):
        raise ConfigurationError(f"url must be a URL or a {name}, not {type(url).__name__}")
    elif options:
        raise ConfigurationError(f"{', '.join(options)}: to be given to the client of your own")
    else:
        client = url
    connection = _connection(client)
    if connection.socket_timeout is None:
        raise ConfigurationError("the client must have a socket_timeout, or a Redis that hangs would hang the consumer")
    retries = _retries(connection)
    if retries and kind is redis.Redis:
        raise ConfigurationError(
            f"the client repeats a call up to {retries} times, each for its socket_timeout: give it "
            "retry=Retry(NoBackoff(), 0), because the store repeats calls itself"
        )
    manager = getattr(client.connection_pool, "sentinel_manager", None)
    if manager is not None:
        _check_sentinels([_connection(one) for one in manager.sentinels], None if kind is redis.Redis else timeout)
    return client


def _check_sentinels(connections: Sequence[Any], timeout: float | None) -> None:
    """Check that Sentinels that do not answer delay a call only a little.

    They are asked one after the other. A call that is cancelled after the timeout does not change their order, so later
    calls would begin with the same Sentinels, and never get to the others.
    """
    settings = 'sentinel_kwargs={"socket_timeout": 1, "socket_connect_timeout": 1, "retry": Retry(NoBackoff(), 0)}'
    waits = [max(one.socket_timeout or inf, one.socket_connect_timeout or inf) for one in connections]
    if inf in waits or any(map(_retries, connections)):
        raise ConfigurationError(
            "each Sentinel of the client must have a socket_timeout and no retries, or one that hangs would delay each "
            f"call: Sentinel(..., {settings})"
        )
    if timeout is not None and sum(waits) >= timeout:
        raise ConfigurationError(
            f"the {len(waits)} Sentinels of the client may take {sum(waits):g} s together, which must be below the "
            f"timeout of the store, {timeout:g} s: Sentinel(..., {settings})"
        )


def _connection(client: Any) -> Any:
    """Return a new connection of a client, without connecting."""
    pool = client.connection_pool
    return pool.connection_class(**pool.connection_kwargs)


def _retries(connection: Any) -> int:
    """Return how often redis-py repeats a call on a connection.

    Before redis-py 6, nobody can ask for the number, and a client has no retries by default.
    """
    retries: int = getattr(connection.retry, "get_retries", lambda: 0)()
    return retries
