"""The transitions of a store in Redis, each a Lua script that is given all keys of a question at once.

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

from typing import TYPE_CHECKING, Final

from reliable_mq.core.claims import ClaimStatus
from reliable_mq.stores.questions import Answer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CLAIM", "COMPLETE", "RELEASE", "RESET", "TOGETHER", "answers"]

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


def answers(reply: Sequence[bytes | str]) -> list[Answer]:
    """Read what `CLAIM` answered."""
    fields = [field.encode() if isinstance(field, str) else field for field in reply]
    return [
        Answer(_STATUS[status], int(token), int(attempts))
        for status, token, attempts in zip(fields[::3], fields[1::3], fields[2::3], strict=True)
    ]
