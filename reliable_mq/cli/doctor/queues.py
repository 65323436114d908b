"""Check queues and their delay, quarantine and dead-letter queues.

The checks are pure functions from a snapshot to findings. A problem loses confirmed messages while everything works as
configured. A warning loses them when something fails, or may be intended.

A delay queue of this package is named ``<queue>.retry.<milliseconds>``. Its messages expire back into its queue, at
least once. A queue of another program with such a name has neither that time to live nor that guarantee.
``<queue>.quarantine`` holds messages that may have killed their consumer, which handles them one at a time. A
dead-letter queue is one that another queue dead-letters into and that is not the work queue of a delay queue.

A quorum queue and a stream work while more than half of their members are online. A queue's members are chosen when it
is declared: a node that joins the cluster later holds no copy until a member is added on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from reliable_mq.cli.doctor.finding import Finding, Status
from reliable_mq.cli.doctor.management import QueueView, Route, Snapshot
from reliable_mq.core.consumer.quarantine import QUARANTINE_SUFFIX
from reliable_mq.core.retry.delay_queues import DelayQueue
from reliable_mq.topology import DEAD_SUFFIX
from reliable_mq.topology.arguments import ARGUMENTS, DEAD_LETTER_STRATEGY, REPLICATED, lint_arguments

_COPIES: Final = 3  # enough copies to lose one
_WAITING: Final = re.compile(r"delay|retry|wait|backoff", re.IGNORECASE)
_AFRESH: Final = "Wait until it is empty, then delete it. A consumer declares it correctly when it connects next."


def _warning(queue: QueueView, check: str, text: str, fix: str) -> Finding:
    return Finding(Status.WARNING, f"queue {queue.name!r}", check, text, fix)


def _problem(queue: QueueView, check: str, text: str, fix: str) -> Finding:
    return Finding(Status.PROBLEM, f"queue {queue.name!r}", check, text, fix)


def _of_policy(argument: str) -> str:
    """Return the fix for an argument that a policy overrides."""
    return f"Remove {argument} from the policy that matches this queue: it overrides x-{argument}."


def _delay_queue(queue: QueueView) -> DelayQueue | None:
    """Return the decoded name of a delay queue of this package; else None."""
    name, arguments = DelayQueue.of(queue.name), queue.raw.get("arguments") or {}
    if name is None:
        return None
    at_least_once = arguments.get(DEAD_LETTER_STRATEGY) == "at-least-once"
    return name if at_least_once or arguments.get("x-message-ttl") == name.milliseconds else None


def waits_to_come_back(snapshot: Snapshot, queue: QueueView) -> bool:
    """Return whether the queue only delays messages, for this package or another."""
    if _delay_queue(queue) is not None:
        return True
    return queue.argument("message-ttl") is not None and not snapshot.consumers_of(queue)


def dead_letter_queues(snapshot: Snapshot, routes: Mapping[str, Route | None]) -> frozenset[str]:
    """Return the queues that receive the dead letters of others."""
    return frozenset(
        target
        for name, route in routes.items()
        if route is not None and not waits_to_come_back(snapshot, snapshot.queues[name])
        for target in route.targets
    )


def examine_copies(snapshot: Snapshot, queue: QueueView) -> Iterator[Finding]:
    """Check the number of nodes with a copy of a queue, and whether they are online."""
    nodes = len(snapshot.nodes or ())
    if nodes < 2:
        return
    if queue.type == "classic":
        if queue.raw.get("durable", True) and not queue.raw.get("exclusive") and not queue.raw.get("auto_delete"):
            text = (
                f"a classic queue, with its only copy on {queue.node or 'one node'} of {nodes}: while that node is "
                "down, the queue is unavailable, and if its disk is lost, so are the messages"
            )
            yield _warning(queue, "copies", text, 'Declare a quorum queue: Queue(..., type="quorum").')
        return
    members, online = queue.members, queue.online
    if queue.type not in REPLICATED or not members:
        return
    if len(members) < min(_COPIES, nodes):
        means = (
            "if one of them dies, the queue stops" if len(members) > 1 else "if its disk is lost, so are the messages"
        )
        text = f"{len(members)} of {nodes} nodes {'has' if len(members) == 1 else 'have'} a copy of it: {means}"
        program = "rabbitmq-queues add_member" if queue.type == "quorum" else "rabbitmq-streams add_replica"
        yield _warning(queue, "copies", text, f"Run {program} QUEUE NODE for each node to add.")
    running = {node["name"] for node in snapshot.nodes or () if node.get("running")}
    away = sorted(members - (online & running))  # the API still counts a stream's members on nodes that have died
    if away:
        left = len(members) - len(away)
        report, consequence = _warning, "the queue works, with less redundancy"
        if 2 * left <= len(members):
            report, consequence = _problem, "no majority: nothing is confirmed or delivered"
        elif 2 * (left - 1) <= len(members):
            consequence = "if one more dies, the queue stops"
        text = f"{left} of {len(members)} members are online, {', '.join(away)} not: {consequence}"
        yield report(queue, "members", text, "Start these nodes, or replace their members by members on other nodes.")


def examine_delay_queue(snapshot: Snapshot, queue: QueueView) -> Iterator[Finding]:
    """Check a delay queue of this package, or a possible one of another package."""
    name = _delay_queue(queue)
    if name is None:
        yield from _mixed_delays(snapshot, queue)
        return
    if name.queue not in snapshot.queues:
        text = f"its messages return to queue {name.queue!r}, which does not exist: {queue.messages:,} are waiting"
        fix = f"Declare {name.queue!r} again, so that they return to it; or delete the delay queue with its messages."
        report = _problem if queue.messages else _warning
        yield report(queue, "delay queue", text, fix)
    for argument, (expected, meaning) in _expected(name).items():
        found = queue.argument(argument)
        if found != expected:
            text = f"x-{argument} is {found!r}, but must be {expected!r} on this delay queue: {meaning}"
            fix = _of_policy(argument) if queue.is_overridden(argument) else _AFRESH
            yield _problem(queue, "delay queue", text, fix)
    if snapshot.consumers_of(queue):
        text = "this delay queue has a consumer: its messages do not wait, and do not return"
        yield _problem(queue, "delay queue", text, f"Stop that consumer, and consume from {name.queue!r} instead.")
    expired = queue.raw.get("messages_dlx")
    if isinstance(expired, int) and expired:
        text = f"{expired:,} messages have expired, but queue {name.queue!r} has not accepted them yet"
        fix = f"If this continues: is {name.queue!r} full (a length limit), or are its nodes down?"
        yield _warning(queue, "delay queue", text, fix)


def _expected(name: DelayQueue) -> dict[str, tuple[object, str]]:
    return {
        "message-ttl": (name.milliseconds, "messages do not wait as long as its name says"),
        "dead-letter-exchange": ("", "messages do not return to their queue"),
        "dead-letter-routing-key": (name.queue, "messages do not return to their queue"),
        "dead-letter-strategy": ("at-least-once", "a message is lost if its queue does not accept it"),
        "overflow": ("reject-publish", "a message is lost if its queue does not accept it"),
    }


def _mixed_delays(snapshot: Snapshot, queue: QueueView) -> Iterator[Finding]:
    """Check for retries in one queue that wait by each message's expiration.

    They come back to a work queue, so a queue with a dead-letter queue of its own is none.
    """
    waiting = queue.argument("dead-letter-exchange") is not None and queue.argument("message-ttl") is None
    comes_back = queue.argument("dead-letter-routing-key") != queue.name + DEAD_SUFFIX
    unused = snapshot.consumers is not None and not snapshot.consumers_of(queue)
    if waiting and comes_back and _WAITING.search(queue.name) and unused:
        text = (
            "looks like a delay queue without x-message-ttl: messages expire only at the head of a queue, so a message "
            "with a long expiration holds up all messages behind it"
        )
        fix = "Use one queue per delay, with x-message-ttl, as a RetryPolicy does."
        yield _warning(queue, "delay queue", text, fix)


def examine_quarantine(snapshot: Snapshot, queue: QueueView) -> Iterator[Finding]:
    """Check that a quarantine with messages has a consumer."""
    owner = queue.name.removesuffix(QUARANTINE_SUFFIX)
    if owner == queue.name or not queue.messages or snapshot.consumers_of(queue):
        return
    text = f"{queue.messages:,} messages that may have killed their consumer are waiting, and no consumer handles them"
    if owner not in snapshot.queues:
        text += f"; queue {owner!r}, whose consumer would, does not exist"
    fix = (
        f"Run a Consumer of {owner!r} that is given a Queue, not just a name: it handles these messages one at a time."
    )
    yield _warning(queue, "quarantine", text, fix)


def examine_dead_letters(
    snapshot: Snapshot, queue: QueueView, dead: frozenset[str], version: tuple[int, ...]
) -> Iterator[Finding]:
    """Check that letters are kept in a dead-letter queue, and report waiting ones."""
    if queue.name not in dead and not queue.name.endswith(DEAD_SUFFIX):
        return
    ttl = queue.argument("message-ttl")
    if ttl is not None and queue.argument("dead-letter-exchange") is None:
        text = f"dead letters are dropped after {int(ttl) / 1000:g} s (message TTL)"
        yield _warning(queue, "dead letters kept", text, "Remove x-message-ttl, unless this is intended.")
    limit = queue.delivery_limit(version)
    if queue.type == "quorum" and limit is not None and version < (4, 3):
        text = (
            f"a delivery limit of {limit}: up to RabbitMQ 4.2, each browse of dead letters (reliable-mq dlq, the "
            f"management UI) counts, and after {limit + 1} of them the messages are dropped"
        )
        fix = "Set delivery-limit to -1 where it is set: by its policy, or in the declaration of a new queue."
        yield _warning(queue, "dead letters kept", text, fix)
    if not queue.messages:
        return
    text = f"a dead-letter queue that holds {queue.messages:,} messages"
    if queue.growth > 0:
        text += f" and grows by {queue.growth:g} messages per second"
    origin = queue.name.removesuffix(DEAD_SUFFIX)
    if queue.name not in dead and origin not in snapshot.queues:
        text += f"; queue {origin!r}, their probable origin, does not exist"
    fix = (
        f"reliable-mq dlq stats URL {queue.name} shows why and when they died. Fix the cause, then use dlq replay or "
        "dlq purge."
    )
    yield _warning(queue, "dead letters wait", text, fix)


def examine_queues(snapshot: Snapshot, names: Sequence[str], version: tuple[int, ...]) -> list[Finding]:
    """Check the named queues, or all. Without names, report only queues with findings."""
    routes = {name: snapshot.dead_letter_route(queue) for name, queue in snapshot.queues.items()}
    dead = dead_letter_queues(snapshot, routes)
    findings: list[Finding] = []
    quiet = 0
    for name in names or sorted(snapshot.queues):
        queue = snapshot.queues.get(name)
        if queue is None:
            fix = "Declare it, or look for a typing error; names are case-sensitive."
            findings.append(Finding(Status.PROBLEM, f"queue {name!r}", "exists", "there is no such queue", fix))
            continue
        found = list(_examine(snapshot, queue, routes[name], dead, version))
        findings += found
        if not found and names:
            findings.append(_sound(queue, routes[name]))
        quiet += not found
    # Queues around a named queue are checked too.
    for name in sorted(_around(snapshot, names, routes) - set(names)):
        findings += examine_dead_letters(snapshot, snapshot.queues[name], dead, version)
        findings += examine_delay_queue(snapshot, snapshot.queues[name])
        findings += examine_quarantine(snapshot, snapshot.queues[name])
    if not names:
        text = f"{quiet} of {len(snapshot.queues)} queues: no messages are lost because of their arguments or consumers"
        findings.append(Finding(Status.OK, "queues", "arguments", text))
    return findings


def _examine(
    snapshot: Snapshot, queue: QueueView, route: Route | None, dead: frozenset[str], version: tuple[int, ...]
) -> Iterator[Finding]:
    yield from _durability(queue)
    yield from examine_copies(snapshot, queue)
    if queue.type != "stream":  # a stream drops by age and size, as configured, and keeps consumed messages
        yield from _delivery_limit(queue, route, version)
        yield from _dead_lettering(queue, route)
        yield from _length(queue, route)
        yield from _expiry(queue, route)
        yield from _consumers(snapshot, queue)
    yield from _arguments(queue, version)
    yield from examine_delay_queue(snapshot, queue)
    yield from examine_quarantine(snapshot, queue)
    yield from examine_dead_letters(snapshot, queue, dead, version)


def _around(snapshot: Snapshot, names: Sequence[str], routes: Mapping[str, Route | None]) -> set[str]:
    """Return the dead-letter queues, delay queues and quarantines of some queues."""
    targets = {target for name in names if (route := routes.get(name)) for target in route.targets}
    delays = {
        name for name, queue in snapshot.queues.items() if (delay := _delay_queue(queue)) and delay.queue in names
    }
    by_name = {f"{name}{suffix}" for name in names for suffix in (DEAD_SUFFIX, QUARANTINE_SUFFIX)}
    return (targets | delays | by_name) & snapshot.queues.keys()


def _arguments(queue: QueueView, version: tuple[int, ...]) -> Iterator[Finding]:
    """Report the linter's problems, except those that depend on policies."""
    if queue.type not in ARGUMENTS["x-queue-type"].values:
        return  # a plugin's queue, such as an MQTT subscription
    for problem in lint_arguments(queue.raw.get("arguments") or {}, queue.type, version):
        argument = ARGUMENTS.get(problem.argument)
        if argument is None or not argument.with_policies:
            fix = f"{problem.fix[0].upper()}{problem.fix[1:]}; the existing queue must be deleted and declared again."
            yield _warning(queue, "arguments", f"{problem.argument} {problem.text}", fix)


def _sound(queue: QueueView, route: Route | None) -> Finding:
    held = f", {queue.messages:,} messages" if "messages" in queue.raw else ""
    text = f"{queue.type}{held}; no messages are lost because of its arguments or consumers"
    if route is not None:
        text += f"; dead letters go to {', '.join(map(repr, sorted(route.targets))) or 'an exchange'}"
    return Finding(Status.OK, f"queue {queue.name!r}", "arguments", text)


def _durability(queue: QueueView) -> Iterator[Finding]:
    if queue.raw.get("exclusive") or queue.raw.get("auto_delete"):
        if queue.raw.get("messages_persistent"):
            kind, owner = (
                ("exclusive", "connection") if queue.raw.get("exclusive") else ("auto-delete", "last consumer")
            )
            text = f"{kind}, but it holds persistent messages, which are deleted with the queue when its {owner} ends"
            yield _warning(queue, kind, text, "Use a durable queue for messages that must be kept.")
    elif not queue.raw.get("durable", True):
        text = "not durable: a restart of the broker deletes the queue with all its messages, including persistent ones"
        fix = "Declare a quorum or durable classic queue, and move the messages."
        yield _problem(queue, "durable", text, fix)
    expires = queue.argument("expires")
    if expires is not None:
        text = f"x-expires: after {int(expires) / 1000:g} s without use, the queue is deleted with all its messages"
        yield _warning(queue, "expires", text, "Use x-expires only for queues whose messages may be lost.")


def _moves_unrejected(queue: QueueView, route: Route | None) -> bool:
    """Return whether messages that expire or exceed a limit are dead-lettered.

    RabbitMQ drops a message that would return to its queue, unless it was rejected.
    """
    return route is not None and route.targets != {queue.name}


def _without(route: Route | None) -> str:
    return "no dead-letter exchange" if route is None else "no dead-letter queue except itself"


def _delivery_limit(queue: QueueView, route: Route | None, version: tuple[int, ...]) -> Iterator[Finding]:
    limit = queue.delivery_limit(version)
    if queue.type == "quorum" and limit is not None and not _moves_unrejected(queue, route):
        own = " (the broker's default)" if queue.argument("delivery-limit") is None else ""
        deliveries = f"{limit + 1} deliveries, including those" if limit else "its first delivery, even one"
        text = (
            f"delivery limit {limit}{own} and {_without(route)}: a message is dropped after {deliveries} "
            "that a lost connection ended"
        )
        fix = "Set a dead-letter exchange (a policy can), or x-delivery-limit=-1, and consume with a retry policy."
        yield _problem(queue, "delivery limit", text, fix)


def _dead_lettering(queue: QueueView, route: Route | None) -> Iterator[Finding]:
    if route is None or _delay_queue(queue) is not None:  # `examine_delay_queue` checks these
        return
    overflow = queue.argument("overflow") or ARGUMENTS["x-overflow"].default
    at_least_once = queue.type == "quorum" and queue.argument("dead-letter-strategy") == "at-least-once"
    if route.flaw:
        fix = "Declare and bind the missing queue or exchange, or correct the dead-letter exchange and routing key."
        if route.certain:
            result = "wait in this queue" if at_least_once and overflow == "reject-publish" else "are dropped"
            yield _problem(queue, "dead letters", f"{route.flaw}: dead letters {result}", fix)
        else:
            yield _warning(queue, "dead letters", route.flaw, fix)
    elif queue.name in route.targets:
        text = "dead letters return to the queue itself: a rejected message is redelivered forever"
        yield _warning(queue, "dead letters", text, "Use a separate dead-letter queue.")
    if queue.type != "quorum":
        return
    if not at_least_once:
        text = (
            "dead-lettered at most once: a message is lost if a node dies while the message is being moved, or if the "
            "dead-letter queue does not accept it"
        )
        fix = "Set x-dead-letter-strategy=at-least-once and x-overflow=reject-publish."
        yield _warning(queue, "dead letters", text, fix)
    elif overflow != "reject-publish":
        text = (
            f"at-least-once dead-lettering is set but not in effect, because the queue's overflow is {overflow}; the "
            "broker reports this only in its log"
        )
        fix = _of_policy("overflow") if queue.is_overridden("overflow") else "Also set x-overflow=reject-publish."
        yield _warning(queue, "dead letters", text, fix)


def _length(queue: QueueView, route: Route | None) -> Iterator[Finding]:
    limits = [name for name in ("max-length", "max-length-bytes") if queue.argument(name) is not None]
    overflow = queue.argument("overflow") or ARGUMENTS["x-overflow"].default
    if not limits or overflow != "drop-head":
        return
    moved = _moves_unrejected(queue, route)
    text = (
        f"{limits[0]} {queue.argument(limits[0])} with overflow drop-head: when the queue is full, the oldest "
        f"messages are {'dead-lettered' if moved else 'dropped'}, including confirmed ones"
    )
    fix = "Set x-overflow=reject-publish, so that a full queue nacks and the publisher knows."
    if queue.is_overridden("overflow"):
        fix = _of_policy("overflow")
    yield (_warning if moved else _problem)(queue, "length limit", text, fix)


def _expiry(queue: QueueView, route: Route | None) -> Iterator[Finding]:
    ttl = queue.argument("message-ttl")
    if ttl is not None and not _moves_unrejected(queue, route):
        text = f"message TTL of {int(ttl) / 1000:g} s and {_without(route)}: expired messages are dropped"
        fix = "Set a dead-letter exchange, unless this is intended."
        yield _warning(queue, "message TTL", text, fix)


def _consumers(snapshot: Snapshot, queue: QueueView) -> Iterator[Finding]:
    consumers = snapshot.consumers_of(queue)
    automatic = sum(not consumer.get("ack_required", True) for consumer in consumers)
    unlimited = sum(
        consumer.get("prefetch_count") == 0 and bool(consumer.get("ack_required", True)) for consumer in consumers
    )
    if automatic:
        text = (
            f"{automatic} of {len(consumers)} consumers use automatic acks: if one dies, the messages that it was "
            "handling, or that were on the way to it, are lost"
        )
        yield _warning(queue, "acks", text, "Consume with manual acks.")
    if unlimited:
        # The list of consumers has no limit of a channel, which up to RabbitMQ 4.2 a client such as Celery may set.
        text = (
            f"{unlimited} of {len(consumers)} consumers have an unlimited prefetch (0): unless its channel has a "
            "limit, such a consumer receives all messages at once, and if it dies, all of them are requeued and count "
            "as delivered"
        )
        yield _warning(queue, "prefetch", text, "Set a prefetch of 100 to 300.")
