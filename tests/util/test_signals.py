"""Signal handlers that are replaced temporarily."""

from __future__ import annotations

import signal
from functools import partial

import pytest

from reliable_mq._util.signals import ReplacedHandlers


def test_a_handler_that_was_not_replaced_is_not_restored() -> None:
    def fail() -> None:
        raise NotImplementedError

    def own(*_: object) -> None: ...

    replaced = ReplacedHandlers()
    with pytest.raises(NotImplementedError):
        replaced.replace(signal.SIGUSR1, fail)
    assert not replaced.numbers
    before = signal.signal(signal.SIGUSR1, own)
    try:
        replaced.restore()
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_replacement_that_was_cut_short_is_undone() -> None:
    """The handler of another signal raises just after the new handler is set."""

    def install() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGUSR1)
    replaced = ReplacedHandlers()
    with pytest.raises(KeyboardInterrupt):
        replaced.replace(signal.SIGUSR1, install)
    replaced.restore()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_restoring_that_is_interrupted_restores_all_the_same() -> None:
    """The handler of another signal raises in the middle."""
    interruptions = iter([KeyboardInterrupt])

    def remove(_: int) -> None:
        for interruption in interruptions:
            raise interruption

    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    replaced = ReplacedHandlers()
    for number in numbers:
        replaced.replace(number, partial(signal.signal, number, signal.SIG_IGN))
    with pytest.raises(KeyboardInterrupt):
        replaced.restore(remove)
    assert [signal.getsignal(number) for number in numbers] == before
    assert not replaced.numbers
