"""How a reader or a writer travels to executors: so that one which cannot import it says what to do.

Pickle names a class by its module, and where that is not installed all that a user sees is "No module named ...", deep
in Spark's own code. So these are shipped as bytes and a function that is pickled itself, code and all: it imports, or
explains.

Invariant: the function stands on nothing but the standard library.
"""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["Shipped"]


class Shipped:
    """A mixin for what Spark pickles."""

    def __reduce__(self) -> tuple[Any, tuple[str, str, bytes]]:
        state = self.__getstate__()  # type: ignore[misc,operator,unused-ignore]
        return _unpacked, (type(self).__module__, type(self).__qualname__, pickle.dumps(state))


def _unpacked(module: str, name: str, state: bytes) -> object:
    import importlib  # noqa: PLC0415
    import pickle  # noqa: PLC0415
    import socket  # noqa: PLC0415
    import sys  # noqa: PLC0415

    try:
        cls = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ImportError(
            f"format('rabbitmq') cannot run on {socket.gethostname()} with {sys.executable}: {error}. The Python of "
            "the driver's workers and of every executor needs this package: pip install 'reliable-mq[spark]' there, or "
            "ship an environment that has it (spark.archives); PYSPARK_PYTHON or spark.pyspark.python names the Python"
        ) from error
    made = cls.__new__(cls)
    made.__dict__.update(pickle.loads(state))  # noqa: S301  # made by the driver
    return made


_unpacked.__module__ = "__main__"  # so that cloudpickle takes it with it
