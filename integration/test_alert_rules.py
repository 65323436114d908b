"""The alert rules under promtool: each fires under its fault, and not without.

It fires after the time in the settings.
"""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import pytest

from integration.support.command_line import run_cli
from integration.support.prometheus import promtool
from reliable_mq.monitoring.alerts import ALERTS

if TYPE_CHECKING:
    from pathlib import Path

PUBLISHER = 'instance="i",job="j",publisher="p"'
CONSUMER = 'consumer="c",instance="i",job="j",queue="q"'
DEAD_LETTERS = 'instance="i",job="j",queue="q.dead",role="dead_letters"'
EVERY = 15  # seconds between two samples
MINUTES = 60

HEALTHY = {
    f"reliable_mq_publisher_outstanding{{{PUBLISHER}}}": "100+0x200",
    f"reliable_mq_publisher_outstanding_oldest_age_seconds{{{PUBLISHER}}}": "0.5+0x200",
    f"reliable_mq_publisher_connected{{{PUBLISHER}}}": "1+0x200",
    f"reliable_mq_publisher_blocked{{{PUBLISHER}}}": "0+0x200",
    f'reliable_mq_publisher_settled_total{{{PUBLISHER},outcome="confirmed"}}': "0+1000x200",
    f'reliable_mq_publisher_settled_total{{{PUBLISHER},outcome="returned"}}': "7+0x200",
    f'reliable_mq_publisher_token_renewals_total{{{PUBLISHER},outcome="accepted"}}': "0+1x200",
    f'reliable_mq_publisher_token_renewals_total{{{PUBLISHER},outcome="refused"}}': "2+0x200",
    f'reliable_mq_publisher_token_renewals_total{{{PUBLISHER},outcome="failed"}}': "2+0x200",
    f"reliable_mq_publisher_event_loop_stalled_seconds_total{{{PUBLISHER}}}": "3+0x200",
    f"reliable_mq_outbox_oldest_age_seconds{{{PUBLISHER}}}": "0.5+0x200",
    f'reliable_mq_outbox_failures_total{{{PUBLISHER},what="store"}}': "5+0x200",
    f'reliable_mq_outbox_failures_total{{{PUBLISHER},what="relay"}}': "5+0x200",
    f"reliable_mq_outbox_unanswered_seconds{{{PUBLISHER}}}": "0.01+0x200",
    f"reliable_mq_outbox_set_aside{{{PUBLISHER}}}": "0+0x200",
    f"reliable_mq_consumer_connected{{{CONSUMER}}}": "1+0x200",
    f"reliable_mq_consumer_paused{{{CONSUMER}}}": "0+0x200",
    f"reliable_mq_consumer_pauses_total{{{CONSUMER}}}": "2+0x200",
    f"reliable_mq_consumer_rejected_total{{{CONSUMER}}}": "5+0x200",
    f"reliable_mq_consumer_dead_lettered_total{{{CONSUMER}}}": "5+0x200",
    f"reliable_mq_queue_messages{{{DEAD_LETTERS}}}": "1000-5x200",
    f"reliable_mq_consumer_overdue_total{{{CONSUMER}}}": "5+0x200",
    f"reliable_mq_consumer_store_failures_total{{{CONSUMER}}}": "5+0x200",
    f'reliable_mq_consumer_token_renewals_total{{{CONSUMER},outcome="accepted"}}': "0+1x200",
    f'reliable_mq_consumer_token_renewals_total{{{CONSUMER},outcome="refused"}}': "2+0x200",
    f'reliable_mq_consumer_token_renewals_total{{{CONSUMER},outcome="failed"}}': "2+0x200",
    f"reliable_mq_consumer_event_loop_stalled_seconds_total{{{CONSUMER}}}": "3+0x200",
}


class Fault(NamedTuple):
    """A fault that begins at 20 minutes, when the counts of the start have left the window.

    Attributes:
        alert: the alert that fires.
        series: the series of `HEALTHY` that it changes.
        quiet, fires, over: seconds after its start at which the alert is still quiet, fires, and is quiet again because
            the event has left the window (0 if it goes on firing); two minutes before `over` it still fires.
        labels: of the alert.
    """

    alert: str
    series: dict[str, str]
    quiet: float
    fires: float
    over: float
    labels: str


FAULTS = (
    Fault(
        "ReliableMQOldestOutstanding",
        {f"reliable_mq_publisher_outstanding_oldest_age_seconds{{{PUBLISHER}}}": "0+0x79 0+15x100"},
        60, 75, 0, PUBLISHER,
    ),
    Fault(
        "ReliableMQNothingConfirmed",
        {f'reliable_mq_publisher_settled_total{{{PUBLISHER},outcome="confirmed"}}': "0+1000x80 80000+0x160"},
        225, 255, 0, PUBLISHER,
    ),
    Fault(
        "ReliableMQMessagesNotConfirmed",
        {f'reliable_mq_publisher_settled_total{{{PUBLISHER},outcome="returned"}}': "7+0x79 8+0x160"},
        -15, 15, 16 * MINUTES, f'{PUBLISHER},outcome="returned"',
    ),
    Fault(
        "ReliableMQPublishingBlocked",
        {f"reliable_mq_publisher_blocked{{{PUBLISHER}}}": "0+0x79 1+0x160"}, 105, 135, 0, PUBLISHER
    ),
    Fault(
        "ReliableMQPublisherDisconnected",
        {f"reliable_mq_publisher_connected{{{PUBLISHER}}}": "1+0x79 0+0x160"}, 105, 135, 0, PUBLISHER
    ),
    Fault(
        "ReliableMQOldestInOutbox",
        {f"reliable_mq_outbox_oldest_age_seconds{{{PUBLISHER}}}": "0+0x79 0+15x100"}, 60, 75, 0, PUBLISHER
    ),
    Fault(
        "ReliableMQOutboxFailing",
        {f'reliable_mq_outbox_failures_total{{{PUBLISHER},what="store"}}': "5+0x79 6+0x160"},
        -15, 15, 16 * MINUTES, f'{PUBLISHER},what="store"',
    ),
    Fault(
        "ReliableMQRelayFailing",
        {f'reliable_mq_outbox_failures_total{{{PUBLISHER},what="relay"}}': "5+0x79 5+1x160"},
        105, 135, 0, PUBLISHER,
    ),
    Fault(
        "ReliableMQRelayFailing",
        {f"reliable_mq_outbox_unanswered_seconds{{{PUBLISHER}}}": "0.01+0x79 0+15x160"}, 105, 150, 0, PUBLISHER
    ),
    Fault(
        "ReliableMQOutboxSetAside",
        {f"reliable_mq_outbox_set_aside{{{PUBLISHER}}}": "0+0x79 1+0x160"}, -15, 15, 0, PUBLISHER
    ),
    Fault(
        "ReliableMQRejected",
        {f"reliable_mq_consumer_rejected_total{{{CONSUMER}}}": "5+0x79 6+0x160"}, -15, 15, 16 * MINUTES, CONSUMER
    ),
    Fault(
        "ReliableMQDeadLetters",
        {f"reliable_mq_consumer_dead_lettered_total{{{CONSUMER}}}": "5+0x79 6+0x160"},
        -15, 15, 16 * MINUTES, CONSUMER,
    ),
    Fault(
        "ReliableMQDeadLetterQueueGrows",
        {f"reliable_mq_queue_messages{{{DEAD_LETTERS}}}": "5+0x79 6+0x160"}, -15, 15, 16 * MINUTES,
        'job="j",queue="q.dead"',
    ),
    Fault(
        "ReliableMQConsumerPaused",
        {f"reliable_mq_consumer_pauses_total{{{CONSUMER}}}": "2+0x79 3+0x160"}, -15, 15, 16 * MINUTES, CONSUMER
    ),
    Fault(
        "ReliableMQConsumerPaused",  # by the gauge alone, as in a pause that began before the window
        {f"reliable_mq_consumer_paused{{{CONSUMER}}}": "0+0x79 1+0x160"}, -15, 15, 0, CONSUMER
    ),
    Fault(
        "ReliableMQConsumerDisconnected",
        {f"reliable_mq_consumer_connected{{{CONSUMER}}}": "1+0x79 0+0x160"}, 105, 135, 0, CONSUMER
    ),
    Fault(
        "ReliableMQHandlersOverdue",
        {f"reliable_mq_consumer_overdue_total{{{CONSUMER}}}": "5+0x79 6+0x160"}, -15, 15, 16 * MINUTES, CONSUMER
    ),
    Fault(
        "ReliableMQStoreFailing",
        {f"reliable_mq_consumer_store_failures_total{{{CONSUMER}}}": "5+0x79 5+1x160"}, 105, 135, 0, CONSUMER
    ),
    Fault(
        "ReliableMQTokensNotRenewed",
        {f'reliable_mq_consumer_token_renewals_total{{{CONSUMER},outcome="refused"}}': "2+0x79 3+0x160"},
        -15, 15, 16 * MINUTES, f'{CONSUMER},outcome="refused"',
    ),
    Fault(
        "ReliableMQTokensNotRenewed",
        {f'reliable_mq_publisher_token_renewals_total{{{PUBLISHER},outcome="failed"}}': "2+0x79 3+0x160"},
        -15, 15, 16 * MINUTES, f'{PUBLISHER},outcome="failed"',
    ),
    Fault(
        "ReliableMQEventLoopStalled",
        {f"reliable_mq_consumer_event_loop_stalled_seconds_total{{{CONSUMER}}}": "3+0x79 35+0x160"},
        -15, 15, 16 * MINUTES, CONSUMER,
    ),
    Fault(
        "ReliableMQEventLoopStalled",
        {f"reliable_mq_publisher_event_loop_stalled_seconds_total{{{PUBLISHER}}}": "3+0x79 35+0x160"},
        -15, 15, 16 * MINUTES, PUBLISHER,
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rule file that the command prints."""
    file = tmp_path_factory.mktemp("rules") / "rules.yml"
    done = run_cli("alerts", "--manual-url", "https://manual.example/")
    assert done.returncode == 0, done
    file.write_bytes(done.stdout)
    return file


def check(rules: Path, case: dict[str, object]) -> None:
    """Run one case of ``promtool test rules``."""
    file = rules.with_name("case.yml")
    file.write_text(json.dumps({"rule_files": [rules.name], "evaluation_interval": f"{EVERY}s", "tests": [case]}))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def series(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": each} for name, each in values.items()]


def test_promtool_accepts_the_rules(rules: Path) -> None:
    done = promtool("check", "rules", rules)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_each_alert_has_a_fault() -> None:
    assert {fault.alert for fault in FAULTS} == {alert.name for alert in ALERTS}


def of(job: str, text: str) -> str:
    """Return series or labels for another job."""
    return text.replace('job="j"', f'job="{job}"')


def test_each_alert_fires_under_its_fault_and_not_before(rules: Path) -> None:
    """promtool evaluates the rules once for all faults.

    Each fault has a job, with the series that the alert's expression names.
    """
    given: dict[str, str] = {}
    expected = []
    for number, fault in enumerate(FAULTS):
        job = f"j{number}"
        alert = next(alert for alert in ALERTS if alert.name == fault.alert)
        healthy = {name: values for name, values in HEALTHY.items() if name.partition("{")[0] in alert.expression}
        assert healthy.keys() >= fault.series.keys()
        given |= {of(job, name): values for name, values in (healthy | fault.series).items()}
        firing = f'alertname="{alert.name}",alertstate="firing"'
        fired = of(job, f'ALERTS{{{firing},severity="{alert.severity}",{fault.labels}}}')
        at = [
            (fault.quiet, False),
            (fault.fires, True),
            *([(fault.over - 2 * MINUTES, True), (fault.over, False)] if fault.over else []),
        ]
        expected += [
            {
                "expr": f'ALERTS{{{firing},job="{job}"}}',
                "eval_time": f"{20 * MINUTES + seconds:.0f}s",
                "exp_samples": [{"labels": fired, "value": 1}] if fires else [],
            }
            for seconds, fires in at
        ]
    check(rules, {"interval": f"{EVERY}s", "input_series": series(given), "promql_expr_test": expected})


def test_a_store_that_is_asked_once_a_minute_keeps_failing(tmp_path: Path) -> None:
    """Deliveries wait for up to a minute between two attempts, which is longer than ``--for``."""
    file = tmp_path / "rules.yml"
    file.write_bytes(run_cli("alerts", "--for", "30s").stdout)
    name = "ReliableMQStoreFailing"
    failures = {
        f"reliable_mq_consumer_store_failures_total{{{CONSUMER}}}": "0+0x39" + " 1+0x3 2+0x3 3+0x3 4+0x3" + " 5+0x40"
    }
    firing = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
    found = [{"labels": "{}", "value": 1}]
    at = [("9m45s", []), ("10m15s", []), *((f"{minute}m45s", found) for minute in (10, 11, 12, 13, 14)), ("17m", [])]
    check(
        file,
        {
            "interval": f"{EVERY}s",
            "input_series": series(failures),
            "promql_expr_test": [{"expr": firing, "eval_time": time, "exp_samples": exp} for time, exp in at],
        },
    )


def test_no_alert_fires_or_is_pending_while_all_is_well(rules: Path) -> None:
    """Counts that Prometheus finds when it begins are events until they have left the window."""
    quiet = [{"expr": "ALERTS", "eval_time": f"{minute}m", "exp_samples": []} for minute in (16, 17, 18, 20, 30, 40)]
    check(rules, {"interval": f"{EVERY}s", "input_series": series(HEALTHY), "promql_expr_test": quiet})


COUNTERS = {
    "ReliableMQOutboxFailing": f'reliable_mq_outbox_failures_total{{{PUBLISHER},what="store"}}',
    "ReliableMQRejected": f"reliable_mq_consumer_rejected_total{{{CONSUMER}}}",
    "ReliableMQDeadLetters": f"reliable_mq_consumer_dead_lettered_total{{{CONSUMER}}}",
    "ReliableMQMessagesNotConfirmed": f'reliable_mq_publisher_settled_total{{{PUBLISHER},outcome="returned"}}',
    "ReliableMQTokensNotRenewed": f'reliable_mq_consumer_token_renewals_total{{{CONSUMER},outcome="failed"}}',
}
FIRST_SEEN = {  # at 30 minutes, by job
    "of a new instance": "_x120 500+0x160",
    "after a gap in the scrapes": "0+0x10 _x109 500+0x160",
    "of an instance that was restarted": "7+0x10 _x109 500+0x160",
}


def test_events_before_the_first_scrape_count(rules: Path) -> None:
    """The first sample of them is at 30 minutes."""
    given = {of(job, counter): values for job, values in FIRST_SEEN.items() for counter in COUNTERS.values()}
    firing = 'count by (alertname, job) (ALERTS{alertstate="firing"})'
    found = [
        {"labels": f'{{alertname="{name}",job="{job}"}}', "value": 1} for job, name in product(FIRST_SEEN, COUNTERS)
    ]
    at = [("29m45s", []), ("30m", found), ("44m", found), ("46m", [])]
    check(
        rules,
        {
            "interval": f"{EVERY}s",
            "input_series": series(given),
            "promql_expr_test": [{"expr": firing, "eval_time": time, "exp_samples": exp} for time, exp in at],
        },
    )


def test_old_counts_are_no_events_after_a_gap(rules: Path) -> None:
    """Prometheus was away for 40 minutes."""
    counters = {
        name: f"{values.partition('+')[0]}+0x79 _x160 {values.partition('+')[0]}+0x200"
        for name, values in HEALTHY.items()
        if "_total" in name
    }
    quiet = [{"expr": "ALERTS", "eval_time": f"{minute}m", "exp_samples": []} for minute in (16, 61, 65, 75, 80, 100)]
    check(rules, {"interval": f"{EVERY}s", "input_series": series(counters), "promql_expr_test": quiet})


def test_a_dead_letter_queue_that_two_pods_measure_may_shrink(rules: Path) -> None:
    """The later count is always below the earlier one."""
    pods = {
        f'reliable_mq_queue_messages{{instance="{pod}",job="j",queue="q.dead",role="dead_letters"}}': values
        for pod, values in (("a", "1000+0x39 1000-5x160"), ("b", "1000+0x39 997-5x160"))
    }
    quiet = [{"expr": "ALERTS", "eval_time": f"{minute}m", "exp_samples": []} for minute in (9, 12, 15, 20, 30)]
    check(rules, {"interval": f"{EVERY}s", "input_series": series(pods), "promql_expr_test": quiet})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param("0+0x200", "0+0x39 500+0x160", id="of one name, in another virtual host"),
        pytest.param("5+0x39 stale", "_x40 6+0x160", id="while its pod is replaced"),
    ],
)
def test_a_dead_letter_queue_that_two_pods_measure_may_grow(rules: Path, one: str, other: str) -> None:
    pods = {
        f'reliable_mq_queue_messages{{instance="{pod}",job="j",queue="q.dead",role="dead_letters"}}': values
        for pod, values in (("a", one), ("b", other))
    }
    firing = 'count by (queue) (ALERTS{alertname="ReliableMQDeadLetterQueueGrows",alertstate="firing"})'
    found = [{"labels": '{queue="q.dead"}', "value": 1}]
    at = [("9m45s", []), ("10m15s", found), ("26m", [])]
    check(
        rules,
        {
            "interval": f"{EVERY}s",
            "input_series": series(pods),
            "promql_expr_test": [{"expr": firing, "eval_time": time, "exp_samples": exp} for time, exp in at],
        },
    )


def test_an_alert_names_whom_it_concerns_and_the_runbook(rules: Path) -> None:
    name = "ReliableMQOutboxSetAside"
    check(
        rules,
        {
            "interval": f"{EVERY}s",
            "input_series": series({f"reliable_mq_outbox_set_aside{{{PUBLISHER}}}": "3+0x10"}),
            "alert_rule_test": [
                {
                    "alertname": name,
                    "eval_time": "1m",
                    "exp_alerts": [
                        {
                            "exp_labels": {"severity": "warning", "instance": "i", "job": "j", "publisher": "p"},
                            "exp_annotations": {
                                "summary": "3 messages in the outbox are set aside: publisher p of j (i)",
                                "description": next(a.description for a in ALERTS if a.name == name),
                                "runbook_url": f"https://manual.example/guides/runbook.html#{name.lower()}",
                            },
                        }
                    ],
                }
            ],
        },
    )


def test_the_settings_are_those_of_the_rules(tmp_path: Path) -> None:
    """With short settings, an alert fires after those times."""
    file = tmp_path / "rules.yml"
    file.write_bytes(run_cli("alerts", "--for", "30s", "--window", "1m", "--max-age", "1m30s").stdout)
    stuck = {f"reliable_mq_publisher_outstanding_oldest_age_seconds{{{PUBLISHER}}}": "0+15x100"}
    blocked = {f"reliable_mq_publisher_blocked{{{PUBLISHER}}}": "1+0x100"}
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    both = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in ("ReliableMQPublishingBlocked",)]
    late = [*both, {"labels": '{alertname="ReliableMQOldestOutstanding"}', "value": 1}]
    check(
        file,
        {
            "interval": f"{EVERY}s",
            "input_series": series({**stuck, **blocked}),
            "promql_expr_test": [
                {"expr": firing, "eval_time": "15s", "exp_samples": []},
                {"expr": firing, "eval_time": "45s", "exp_samples": both},
                {"expr": firing, "eval_time": "90s", "exp_samples": both},
                {"expr": firing, "eval_time": "105s", "exp_samples": late},
            ],
        },
    )
    again = run_cli("alerts", "--for", "soon")
    assert again.returncode == 1
    assert b"hold (--for) must be a duration of Prometheus" in again.stderr
