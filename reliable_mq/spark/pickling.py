"""Pickle sources, readers and writers with an explanation for a failed import.

Pickle names a class by its module. If that is not installed in the other Python, a user sees only "No module named
...", deep in Spark's own code. So the source's class, which goes to the workers of the driver or of a Spark Connect
server, and the objects that go to executors are shipped with a function that is pickled itself, code and all: it
imports the module, or raises an error that explains.

Invariant: the function needs nothing but the standard library.
"""

from __future__ import annotations

import copyreg
import pickle
from abc import ABCMeta
from typing import Any

__all__ = ["PicklableByName", "PicklableByNameMeta"]


class PicklableByNameMeta(ABCMeta):
    """A metaclass for a class that Spark pickles."""


class PicklableByName:
    def __reduce__(self) -> tuple[Any, tuple[str, str, bytes]]:
        state = self.__getstate__()  # type: ignore[misc,operator,unused-ignore]
        return _unpacked, (type(self).__module__, type(self).__qualname__, pickle.dumps(state))


def _reduce_class(cls: type) -> tuple[Any, tuple[str, str, None]]:
    return _unpacked, (cls.__module__, cls.__qualname__, None)


def _unpacked(module: str, name: str, state: bytes | None) -> object:
    """Return the class, or an object of it if there is a state."""
    import importlib  # noqa: PLC0415
    import pickle  # noqa: PLC0415
    import socket  # noqa: PLC0415
    import sys  # noqa: PLC0415

    try:
        cls = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ImportError(
            f"format('rabbitmq') cannot run on {socket.gethostname()} with {sys.executable}: {error}. The Python of "
            "the driver's workers (with Spark Connect, of the server's) and of every executor needs this package: "
            "pip install 'reliable-mq[spark]' there, or ship an environment that has it (spark.archives); "
            "PYSPARK_PYTHON or spark.pyspark.python names the Python"
        ) from error
    if state is None:
        return cls
    made = cls.__new__(cls)
    made.__dict__.update(pickle.loads(state))  # noqa: S301  # made by the driver
    return made


_unpacked.__module__ = "__main__"  # so that cloudpickle takes it with it
copyreg.pickle(PicklableByNameMeta, _reduce_class)
