"""The fault matrix's checker: the lab's account, under the name that the tests here know it by."""

from __future__ import annotations

from reliable_mq.testing import Audit as Checker

__all__ = ["Checker"]
