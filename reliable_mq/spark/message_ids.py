"""The ids of messages whose rows have none: the same at every attempt at a task, different for different rows.

A task that fails, or is slow where speculation is on, runs again and publishes its rows again; consumers tell by the
id. A retried attempt may see its rows in another order, so an id is not made of a row's number but of its content: a
digest, and how many equal rows came before. Which of two equal rows is which means nothing to anybody.

Invariants: within one partition no two rows have the same id; attempts that see the same rows, in whatever order, make
the same ids; nothing random goes in, and nothing that differs between processes (``hash`` does).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MessageIds"]

_DIGEST_BYTES: Final = 16


class MessageIds:
    """Makes the ids of one partition. It remembers some 70 bytes a row, until the task has ended.

    Args:
        prefix: what tells this partition from every other: the query and the batch, or the write, and its number.
        constant: what is the same for all rows and belongs to their content, e.g. where they are published to.
    """

    __slots__ = ("_base", "_prefix", "_repeated", "_seen")

    def __init__(self, prefix: str, constant: Sequence[object] = ()) -> None:
        self._prefix = prefix
        self._base = blake2b(repr(tuple(constant)).encode(), digest_size=_DIGEST_BYTES)
        self._seen: set[int] = set()  # the first half of each digest: 64 bits
        self._repeated: dict[int, int] = {}

    def of(self, body: bytes, values: tuple[object, ...] = ()) -> str:
        """The id of the next row.

        Args:
            body: of the message.
            values: its other columns, in a fixed order; text, numbers, None, and lists or tuples of these.
        """
        digest = self._base.copy()
        if values:
            # The length of what precedes the body tells where it begins, or two rows could have the same bytes.
            columns = repr(values).encode("utf-8", "surrogatepass")
            digest.update(len(columns).to_bytes(8))
            digest.update(columns)
        digest.update(body)
        name = digest.digest()
        key = int.from_bytes(name[:8])
        if key not in self._seen:
            self._seen.add(key)
            return f"{self._prefix}/{name.hex()}"
        count = self._repeated.get(key, 0) + 1
        self._repeated[key] = count
        return f"{self._prefix}/{name.hex()}/{count}"
