"""A session with a kill switch: held deliveries, and those already dispatched."""

from __future__ import annotations

from math import inf

from reliable_mq import KillSwitch
from reliable_mq.core.consumer.handler import Failed, Skipped, SkipReason
from reliable_mq.core.consumer.settlement import LogEventKind
from tests.core.deliveries import OURS, delivery, failure
from tests.core.sessions import ISOLATED, SteppedSession, deliver, items, kinds, make

SWITCH = KillSwitch(share=0.5, window=10, minimum=2, pause=5)


def paused(*, more: int = 3) -> SteppedSession:
    session = make(kill_switch=SWITCH)
    work = deliver(session, items(2 + more))
    assert not session.take_pause()
    session.finished([Failed(item, failure(delay=100)) for item in work[:2]], 0.0)
    assert session.paused
    assert session.take_pause()
    assert not session.take_pause()
    session.postponed(work[2:])
    return session


def test_what_was_dispatched_is_recalled_and_waits_unacked() -> None:
    session = paused()
    assert LogEventKind.PAUSED in kinds(session)
    assert (session.running, session.outstanding, session.statistics.pauses) == (0, 5, 1)
    session.tick(4.9)
    assert session.take_work() == []
    assert session.deadline == 5.0


def test_the_line_about_a_pause_has_the_last_failure() -> None:
    """The lines about retries have it only at INFO, which a program may not show."""
    session = make(kill_switch=SWITCH)
    failing, fine = deliver(session, items(2))
    session.finished([Failed(failing, failure(delay=100))], 0.0)
    session.finished([fine], 1.0)
    [line] = [event for event in session.take_notices() if event.kind is LogEventKind.PAUSED]
    assert line.text == "a probe follows in 5 s; the last failure: ValueError: no"


def test_a_probe_that_succeeds_lets_everything_flow_in_its_order() -> None:
    session = paused()
    session.tick(5.0)
    [probe] = session.take_work()
    assert probe.delivery_tag == 3
    assert session.take_work() == []
    session.finished([probe], 5.0)
    assert LogEventKind.RESUMED in kinds(session)
    session.tick(5.0)
    assert [item.delivery_tag for item in session.take_work()] == [4, 5]
    assert not session.paused


def test_a_probe_that_fails_pauses_again() -> None:
    session = paused()
    session.tick(5.0)
    [probe] = session.take_work()
    session.finished([Failed(probe, failure(delay=100))], 5.0)
    session.tick(14.9)
    assert session.take_work() == []
    session.tick(15.0)
    assert len(session.take_work()) == 1
    assert session.statistics.pauses == 2


def test_work_from_before_the_pause_does_not_probe_or_end_it() -> None:
    session = make(kill_switch=SWITCH)
    *failing, slow, slower, last = deliver(session, items(5))
    session.finished([Failed(item, failure(delay=100)) for item in failing], 0.0)
    session.postponed([last])
    session.tick(5.0)
    assert session.take_work() == [last]
    session.finished([slow], 6.0)
    assert session.paused
    session.finished([Failed(slower, failure(delay=100))], 6.0)
    assert session.take_work() == [], "the probe is under way"
    session.finished([last], 7.0)
    assert not session.paused


def test_a_recalled_delivery_that_is_tried_again_stays_alone() -> None:
    session = make(kill_switch=KillSwitch(share=0.5, window=10, minimum=4, pause=5), batch=(2, 1.0))
    session.delivered(items(6), 0.0)
    culprits, failing, [fifth, sixth] = session.take_batches()
    session.finished([Failed(item, failure(), alone=False) for item in culprits], 0.0)
    alone = session.take_batches()
    assert alone == [[item] for item in culprits]
    session.finished([Failed(item, failure(delay=100)) for item in failing], 0.0)
    session.postponed([*culprits, fifth, sixth])
    session.tick(5.0)
    assert session.take_batches() == [culprits[:1]]
    session.finished(culprits[:1], 5.0)
    assert session.take_batches() == [culprits[1:], [fifth, sixth]]


def test_recalled_batches_stay_before_newer_deliveries() -> None:
    session = make(kill_switch=KillSwitch(share=0.5, window=10, minimum=5, pause=5), batch=(5, 1.0))
    session.delivered(items(23), 0.0)
    failing, *recalled = session.take_batches()
    session.finished([Failed(item, failure(delay=100)) for item in failing], 0.0)
    session.delivered(items(4, first=24), 0.0)
    session.postponed([item for batch in recalled for item in batch])
    session.tick(5.0)
    [probe] = session.take_batches()
    session.finished(probe, 5.0)
    batches = [probe, *session.take_batches()]
    assert [item.delivery_tag for batch in batches for item in batch] == list(range(6, 28))
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 2]


def test_an_inconclusive_probe_is_followed_by_another() -> None:
    session = paused()
    session.tick(5.0)
    [probe] = session.take_work()
    session.finished([Skipped(probe, SkipReason.DUPLICATE)], 5.0)
    session.tick(5.0)
    assert len(session.take_work()) == 1


def test_a_channel_that_is_lost_takes_the_probe_with_it() -> None:
    session = paused()
    session.tick(5.0)
    assert len(session.take_work()) == 1
    session.lost(1)
    session.opened(2, 3)
    session.tick(5.0)
    assert len(deliver(session, items(3), 5.0)) == 1


def test_a_stop_requeues_what_waits() -> None:
    session = paused()
    session.stop()
    session.take_output(0.0)
    assert session.statistics.requeued == 5


def test_what_is_recalled_while_it_stops_is_requeued() -> None:
    session = make(kill_switch=SWITCH)
    work = deliver(session, items(2))
    session.stop()
    session.postponed(work)
    session.take_output(0.0)
    assert session.statistics.requeued == 2
    assert session.take_work() == []


def test_batches_and_quarantine_are_held_back_too() -> None:
    session = make(kill_switch=SWITCH, batch=(1, 1.0), quarantine=True)
    session.delivered(items(4), 0.0)
    batches = session.take_batches()
    session.finished([Failed(batch[0], failure(delay=100)) for batch in batches[:2]], 0.0)
    isolated = batches[3][0]
    isolated.consumer_tag = "c#quarantine"
    session.postponed([batches[2][0], isolated])
    session.tick(0.0)
    assert session.take_batches() == []
    assert session.take_isolated() == []
    session.tick(5.0)
    [probe] = session.take_batches()
    session.finished(probe, 5.0)
    session.tick(5.0)
    assert session.take_isolated() == [[isolated]]
    session.postponed([isolated])
    assert session.take_isolated() == [[isolated]]


def test_few_failures_pause_nothing() -> None:
    session = make(kill_switch=SWITCH)
    [item] = deliver(session, items(1))
    session.finished([item], 0.0)
    assert not session.take_pause()
    assert not session.paused


def test_after_the_pause_no_deadline_is_set_until_a_probe_comes() -> None:
    """Otherwise the shell would poll all the time.

    The failed deliveries wait elsewhere, or are dead-lettered.
    """
    session = make(kill_switch=SWITCH)
    session.finished([Failed(item, failure(verdict="no")) for item in deliver(session, items(2))], 0.0)
    for republish in session.take_republishes():
        session.published(republish, None, 0.0)
    session.take_output(0.0)
    assert session.deadline == 5.0
    session.tick(5.0)
    assert session.take_work() == []
    assert session.deadline == inf
    assert len(deliver(session, items(2, first=3), 60.0)) == 1, "the probe"


def test_a_quarantined_message_probes_where_nothing_else_does() -> None:
    """Otherwise it would wait forever.

    If it hangs, the next delivery is another probe.
    """
    session = make(kill_switch=SWITCH, quarantine=True)
    session.finished([Failed(item, failure(delay=100)) for item in deliver(session, items(2))], 0.0)
    isolated = delivery(3, message_id="m3", headers=OURS)
    isolated.consumer_tag = ISOLATED
    [plain, other] = items(2, first=4)
    session.delivered([isolated], 0.0)
    session.tick(4.9)
    assert session.take_isolated() == []
    session.tick(5.0)
    assert session.take_work() == []
    assert session.take_isolated() == [isolated]
    assert deliver(session, [plain, other], 5.0) == [plain]
    assert session.take_isolated() == []
    session.finished([plain], 6.0)
    assert not session.paused
