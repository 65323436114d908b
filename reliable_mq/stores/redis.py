"""Idempotency stores in Redis (or Valkey), for fleets: the fastest that processes on several machines can share.

Invariants: a question is one script per thousand keys, all sent in one write; each attempt at it ends within the
timeout, and there are two at most, the second at once and only where a connection broke; both ask in the name of the
same holder.

The transitions of a store in Redis, each a Lua script that is given all keys of a question at once.

A record is a string, ``1|state|token|holder|attempts|lease ends``, where the first number is the format, the state is
``f`` (free, with failures behind it), ``c`` (claimed) or ``d`` (done), and the lease ends at a number of microseconds
since 1970. Redis itself forgets the record when its time to live is over.

Invariants:

- the clock is that of the server, so that those of the clients do not matter;
- a claim that finds its own holder changes no token: a question that was delayed and then asked again does no harm;
- a token is greater than that of the key before, and not below the time: it does not come again after the record is
  gone;
- a record of another format is neither changed nor understood.
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

from reliable_mq._util.validation import Duration, seconds
from reliable_mq.core.idempotency import ClaimStatus
from reliable_mq.errors import ConfigurationError, IdempotencyStoreError
from reliable_mq.stores.keys import (
    DAY,
    ClaimAnswer,
    UnansweredClaims,
    claims_in_order,
    held_by,
    microseconds,
    stored_key,
    taken_in_order,
    the_one_loop,
    unique,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reliable_mq.core.idempotency import Claim

__all__ = ["CLAIM", "COMPLETE", "RELEASE", "RESET", "TOGETHER", "AsyncRedisStore", "RedisStore", "answers"]

TOGETHER: Final = 1000  # keys given to a script at once, at most: Lua's stack holds no more than some 8000

_PARSE: Final = """
local found = redis.call('MGET', unpack(KEYS))
local function parse(record)
  return string.match(record, '^1|(%a)|(%d+)|(%d+)|(%d+)|(%d+)$')
end
"""

#: The lease in microseconds, the retention in milliseconds, then a holder per key; answers with status, token and
#: attempts per key.
CLAIM: Final = (
    _PARSE
    + """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ends = string.format('%.0f', now + ARGV[1])
local kept = string.format('%.0f', math.ceil(ARGV[1] / 1000) + ARGV[2])
local answers = {}
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
  answers[#answers + 1] = status
  answers[#answers + 1] = status == 'n' and token or '0'
  answers[#answers + 1] = attempts or '0'
end
return answers
"""
)

#: The retention in milliseconds, then a token per key; answers with 1 or 0 per key.
COMPLETE: Final = (
    _PARSE
    + """
local answers = {}
for i, key in ipairs(KEYS) do
  answers[i] = 0
  if found[i] then
    local state, token, _, attempts = parse(found[i])
    if state and state ~= 'f' and token == ARGV[1 + i] then
      if state == 'c' then
        redis.call('SET', key, table.concat({'1', 'd', token, '0', attempts, '0'}, '|'), 'PX', ARGV[1])
      end
      answers[i] = 1
    end
  end
end
return answers
"""
)

#: The retention in milliseconds, 1 or 0 for a failed attempt, then a token per key; answers with 1 or 0 per key.
RELEASE: Final = (
    _PARSE
    + """
local answers = {}
for i, key in ipairs(KEYS) do
  answers[i] = 0
  if found[i] then
    local state, token, _, attempts = parse(found[i])
    if state == 'c' and token == ARGV[2 + i] then
      local counted = string.format('%d', attempts + ARGV[2])
      redis.call('SET', key, table.concat({'1', 'f', token, '0', counted, '0'}, '|'), 'PX', ARGV[1])
      answers[i] = 1
    end
  end
end
return answers
"""
)

#: No arguments; answers with 1 or 0 per key.
RESET: Final = (
    _PARSE
    + """
local answers = {}
for i, key in ipairs(KEYS) do
  answers[i] = 0
  if found[i] then
    local state, token, holder, attempts, ends = parse(found[i])
    if state and state ~= 'd' and attempts ~= '0' then
      redis.call('SET', key, table.concat({'1', state, token, holder, '0', ends}, '|'), 'KEEPTTL')
      answers[i] = 1
    end
  end
end
return answers
"""
)

_STATUS: Final = {
    b"n": ClaimStatus.NEW,
    b"p": ClaimStatus.IN_PROGRESS,
    b"d": ClaimStatus.DONE,
    b"u": ClaimStatus.UNREADABLE,
}


def answers(reply: Sequence[bytes | str]) -> list[ClaimAnswer]:
    """Read what `CLAIM` answered."""
    fields = [field.encode() if isinstance(field, str) else field for field in reply]
    return [
        ClaimAnswer(_STATUS[status], int(token), int(attempts))
        for status, token, attempts in zip(fields[::3], fields[1::3], fields[2::3], strict=True)
    ]


_PREFIX: Final = "{reliable-mq}:claim:"  # in braces: in a cluster, all keys of a script must be in one slot
_BROKEN: Final = (redis.ConnectionError, OSError)  # also where a server that was restarted has closed a connection

Script = tuple[list[str], list[object]]


class _RedisStoreBase:
    """What both faces ask, and how they read the answers."""

    def __init__(self, where: str, retention: Duration, timeout: Duration, prefix: str) -> None:
        self._where = where
        self._retention = max(int(seconds("retention", retention, positive=True) * 1000), 1)
        self._timeout = seconds("timeout", timeout, positive=True)
        if not isinstance(prefix, str):
            raise ConfigurationError(f"prefix must be text, not {prefix!r}")
        self._prefix = prefix
        self._doubts = UnansweredClaims()

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


class RedisStore(_RedisStoreBase):
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


class AsyncRedisStore(_RedisStoreBase):
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
