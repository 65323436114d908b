"""Pickle sources, readers and writers so that a failed import is explained.

Pickle refers to a class by its module. If that module is not installed in the other Python, a user sees only "No module
named ...", deep in Spark's code. Therefore the source's class, which goes to the workers of the driver or of a Spark
Connect server, and the objects that go to executors are shipped with a function that is pickled by value, including its
code. The function imports the module, or raises an error that explains the problem.

Invariant: the function needs only the standard library.
"""

from __future__ import annotations

import copyreg
import pickle
from abc import ABCMeta
from typing import Any


class PicklableByNameMeta(ABCMeta):
    """A metaclass for a class that Spark pickles."""


class PicklableByName:
    def __reduce__(self) -> tuple[Any, tuple[str, str, bytes]]:
        state = self.__getstate__()  # type: ignore[misc,operator,unused-ignore]
        return _unpacked, (type(self).__module__, type(self).__qualname__, pickle.dumps(state))


def _reduce_class(cls: type) -> tuple[Any, tuple[str, str, None]]:
    return _unpacked, (cls.__module__, cls.__qualname__, None)


def _unpacked(module: str, name: str, state: bytes | None) -> object:
    """Return the class, or an instance of it if ``state`` is given."""
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


_unpacked.__module__ = "__main__"  # so that cloudpickle pickles the function by value
copyreg.pickle(PicklableByNameMeta, _reduce_class)
