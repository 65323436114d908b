"""The containers of a running process are no leftovers, whoever may see it in /proc."""

from __future__ import annotations

import pytest

from reliable_mq.testing import containers
from reliable_mq.testing.containers import is_orphan, owner

NO_PROCESS = 4194305  # above the largest possible process id


@pytest.mark.parametrize("hidden", [FileNotFoundError, PermissionError])  # hidepid=2, hidepid=1
def test_a_process_that_proc_hides_keeps_its_containers(hidden: type[OSError], monkeypatch: pytest.MonkeyPatch) -> None:
    label = owner()
    home, _, started = label.rsplit(":", 2)

    def hide(_: object) -> str:
        raise hidden

    monkeypatch.setattr(containers, "owner", hide)

    assert not is_orphan(label)
    assert not is_orphan(f"{home}:1:1")  # another user's, unless this is root
    assert is_orphan(f"{home}:{NO_PROCESS}:{started}")
