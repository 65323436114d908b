"""The steps of set-ups and their order, and the errors for refused steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reliable_mq.codec.methods import (
    Bind,
    Cancel,
    CheckExchange,
    CheckQueue,
    ConfirmSelect,
    Consume,
    DeclareExchange,
    DeclareQueue,
    DeleteQueue,
    SetPrefetch,
    Step,
)
from reliable_mq.core.channel_setup import (
    Pipeline,
    ServerInfo,
    StepRefused,
    consumer_setup,
    declare,
    is_a_stream,
    is_missing,
    is_out_of_reach,
    lacks_permission,
    parse_version,
    publisher_setup,
    pull_setup,
    reconnect_reason,
    refusal,
    round_trip,
)
from reliable_mq.core.reconnect import is_permanent
from reliable_mq.errors import BrokerUnavailable, ReliableMQError, TopologyMismatch
from reliable_mq.topology import Binding, Exchange, Queue
from tests.core.steps import granted, sent_by, steps_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from reliable_mq.topology.queue import QueueType

NEWEST = (4, 3, 6)
OLD = (3, 12, 0)
EXPIRED = (
    "refused for user 'guest', backend rabbit_auth_backend_oauth2 returned an error: "
    '"Provided JWT token has expired at timestamp 1795730978 (validated at 1795730978)"'
)


def test_a_publisher_declares_in_order_and_then_selects_confirms() -> None:
    events = Exchange("events", type="topic", auto_delete=True, internal=True, arguments={"x": 1})
    audit = Exchange("audit")
    orders = Queue("orders", dead_letter=None)
    topology = [
        Binding(events, orders, "order.*", arguments={"y": 2}),
        Binding("amq.topic", audit, "#"),
        Binding(events, "existing"),
    ]
    assert steps_of(publisher_setup(topology, NEWEST)) == [
        DeclareExchange("events", "topic", auto_delete=True, internal=True, arguments={"x": 1}),
        DeclareExchange("audit", "direct"),
        DeclareQueue("orders", arguments=orders.arguments_for(NEWEST)),
        Bind("queue", "orders", "events", "order.*", {"y": 2}),
        Bind("exchange", "audit", "amq.topic", "#"),
        Bind("queue", "existing", "events", ""),
        ConfirmSelect(),
    ]


def test_a_dead_letter_queue_is_declared_before_its_queue() -> None:
    declared = [step.name for step in steps_of(publisher_setup([Queue("q")], NEWEST)) if isinstance(step, DeclareQueue)]
    assert declared == ["q.dead", "q"]


def test_the_properties_of_a_queue_are_declared() -> None:
    queue = Queue("q", type="classic", durable=False, exclusive=True, auto_delete=True, dead_letter=None)
    (step, _) = steps_of(publisher_setup([queue], NEWEST))
    assert step == DeclareQueue("q", False, True, True, queue.arguments_for(NEWEST))


def test_the_arguments_fit_the_version_of_the_broker() -> None:
    queue = Queue("q", dead_letter=None)
    (old, _), (new, _) = (steps_of(publisher_setup([queue], version)) for version in (OLD, NEWEST))
    assert isinstance(old, DeclareQueue)
    assert isinstance(new, DeclareQueue)
    assert old.arguments == queue.arguments_for(OLD)
    assert new.arguments == queue.arguments_for(NEWEST)


def test_a_queue_consumer_declares_sets_prefetch_and_consumes() -> None:
    queue = Queue("q", dead_letter=None)
    setup = consumer_setup(queue, [Exchange("e")], NEWEST, Consume("q", "tag"), prefetch=200)
    assert steps_of(setup) == [
        DeclareExchange("e"),
        DeclareQueue("q", arguments=queue.arguments_for(NEWEST)),
        SetPrefetch(200),
        Consume("q", "tag"),
    ]


def test_a_consumer_of_a_name_checks_it_after_its_declarations() -> None:
    consume = Consume("q", "tag", automatic_ack=True, exclusive=True, arguments={"x-priority": 5})
    setup = consumer_setup("q", [Exchange("e")], NEWEST, consume, prefetch=0)
    assert steps_of(setup) == [DeclareExchange("e"), CheckQueue("q"), SetPrefetch(0), consume]


def test_getting_from_a_queue_needs_the_queue_and_no_more() -> None:
    queue = Queue("q", dead_letter=None)
    declared = DeclareQueue("q", arguments=queue.arguments_for(NEWEST))
    assert steps_of(pull_setup(queue, [Exchange("e")], NEWEST)) == [DeclareExchange("e"), declared]
    assert steps_of(pull_setup("q", [], NEWEST)) == [CheckQueue("q")]


def test_a_set_up_never_selects_transactions() -> None:
    """No step selects transactions, so no channel is transactional and confirming."""
    steps = {*Step.__args__}  # type: ignore[attr-defined]
    queues, exchanges = {DeclareQueue, CheckQueue, DeleteQueue}, {DeclareExchange, CheckExchange, Bind}
    assert steps == {*queues, *exchanges, SetPrefetch, Consume, Cancel, ConfirmSelect}


def test_a_round_trip_asks_what_changes_nothing() -> None:
    assert sent_by(round_trip()) == [Pipeline((ConfirmSelect(),))]


def test_a_refusal_belongs_to_the_step_that_was_yielded_last() -> None:
    setup = consumer_setup("missing", [], NEWEST, Consume("missing", "tag"), prefetch=1)
    assert setup.send(None) == CheckQueue("missing")
    with pytest.raises(TopologyMismatch, match="'missing'") as caught:
        setup.throw(StepRefused(404, "NOT_FOUND - no queue 'missing' in vhost '/'"))
    assert caught.value.kind == "queue"
    assert caught.value.name == "missing"
    assert isinstance(caught.value.__cause__, StepRefused)
    assert is_permanent(caught.value)


def test_declarations_take_one_round_trip() -> None:
    sent = sent_by(publisher_setup([Exchange("e"), Queue("q"), Binding("e", "q")], NEWEST))
    assert [type(step) for step in sent] == [Pipeline, ConfirmSelect]
    assert sent_by(publisher_setup([], NEWEST)) == [ConfirmSelect()]


def test_a_refusal_in_a_pipeline_is_of_the_first_unanswered_step() -> None:
    setup = publisher_setup([Exchange("e"), Queue("one", dead_letter=None), Queue("two", dead_letter=None)], NEWEST)
    (exchange, one, _) = setup.send(None).steps  # type: ignore[union-attr]
    with pytest.raises(TopologyMismatch) as caught:
        setup.throw(StepRefused(406, INEQUIVALENT, answered=(granted(exchange), granted(one))))
    assert caught.value.name == "two"


class Noted:
    """A listener that notes the new queues."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[str]]] = []

    def begin(self, names: Collection[str]) -> None:
        self.told.append(("begin", list(names)))

    def end(self, names: Collection[str]) -> None:
        self.told.append(("end", list(names)))


A, B, C = (Queue(name, dead_letter=None) for name in "abc")
NOT_FOUND = StepRefused(404, "NOT_FOUND - no queue", answered=(granted(CheckQueue("a")),))


def test_quorum_queues_and_streams_are_checked_in_one_round_trip() -> None:
    noted = Noted()
    passing = Queue("p", type="classic", exclusive=True)
    topology = [Exchange("e"), A, Queue("s", type="stream"), Queue("t", type="classic", dead_letter=None), passing, B]
    sent = sent_by(publisher_setup(topology, NEWEST, noted))
    assert sent[0] == Pipeline((CheckQueue("a"), CheckQueue("s"), CheckQueue("b")))
    assert [type(step) for step in sent] == [Pipeline, Pipeline, ConfirmSelect]
    assert noted.told == [], "all of them exist"


@pytest.mark.parametrize("topology", [[], [Exchange("e")], [Queue("q", type="classic", dead_letter=None)]])
def test_nothing_is_checked_without_a_quorum_queue_or_stream(topology: list[Exchange | Queue]) -> None:
    noted = Noted()
    assert not any(isinstance(step, CheckQueue) for step in steps_of(publisher_setup(topology, NEWEST, noted)))
    assert noted.told == []


def test_missing_and_unreported_queues_are_treated_as_new() -> None:
    noted = Noted()
    setup = publisher_setup([A, B, C], NEWEST, noted)
    assert setup.send(None) == Pipeline((CheckQueue("a"), CheckQueue("b"), CheckQueue("c")))
    declared = setup.throw(NOT_FOUND)
    assert [step.name for step in declared.steps] == ["a", "b", "c"]  # type: ignore[union-attr]
    assert noted.told == [("begin", ["b", "c"])], "told before they are declared"
    assert setup.send((None, None, None)) == ConfirmSelect()
    assert noted.told == [("begin", ["b", "c"]), ("end", ["b", "c"])]


@pytest.mark.parametrize("end", ["refused", "dropped"])
def test_a_queue_with_an_unanswered_declaration_may_exist(end: str) -> None:
    noted = Noted()
    setup = publisher_setup([A, B], NEWEST, noted)
    setup.send(None)
    setup.throw(NOT_FOUND)
    if end == "refused":
        with pytest.raises(TopologyMismatch):
            setup.throw(StepRefused(406, INEQUIVALENT))
    else:
        setup.close()
    assert noted.told[-1] == ("end", ["b"])


def test_a_look_that_costs_the_connection_ends_the_attempt() -> None:
    setup = publisher_setup([A, B], NEWEST, Noted())
    setup.send(None)
    with pytest.raises(BrokerUnavailable, match="find queue 'b'"):
        setup.throw(StepRefused(541, "INTERNAL_ERROR", answered=(granted(CheckQueue("a")),), connection=True))


def test_a_consumer_looks_for_its_queue_and_its_topology() -> None:
    setup = consumer_setup(A, [B], NEWEST, Consume("a", "tag"), prefetch=1, listener=Noted())
    assert sent_by(setup)[0] == Pipeline((CheckQueue("b"), CheckQueue("a")))
    assert sent_by(pull_setup(A, [B], NEWEST, Noted()))[0] == Pipeline((CheckQueue("b"), CheckQueue("a")))
    assert sent_by(pull_setup("a", [B], NEWEST, Noted()))[0] == Pipeline((CheckQueue("b"),))


@pytest.mark.parametrize(("kind", "new"), [("quorum", True), ("classic", False)])
def test_a_queue_declared_on_a_channel_in_use_counts_as_made(kind: QueueType, new: bool) -> None:
    """A check would close the channel if the queue were missing."""
    noted = Noted()
    steps = declare(Queue("q", type=kind, dead_letter=None), NEWEST, noted)
    assert isinstance(next(steps), DeclareQueue)
    assert noted.told == [("begin", ["q"])] * new
    with pytest.raises(StopIteration):
        steps.send(None)
    assert noted.told == [("begin", ["q"]), ("end", ["q"])][: 2 * new]


INEQUIVALENT = (
    "PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue 'q' in vhost '/': "
    "received the value 'quorum' of type 'longstr' but current is the value 'classic' of type 'longstr'"
)


def test_a_differing_queue_is_a_mismatch_with_both_values() -> None:
    error = refusal(DeclareQueue("q"), StepRefused(406, INEQUIVALENT))
    assert isinstance(error, TopologyMismatch)
    assert (error.kind, error.name, error.argument) == ("queue", "q", "x-queue-type")
    assert (error.declared, error.existing) == ("quorum", "classic")


def test_an_unknown_exchange_type_is_a_mismatch_despite_a_503() -> None:
    error = refusal(DeclareExchange("e", "x-odd"), StepRefused(503, "COMMAND_INVALID - unknown exchange type 'x-odd'"))
    assert isinstance(error, TopologyMismatch)
    assert (error.kind, error.name, error.declared) == ("exchange", "e", "x-odd")


@pytest.mark.parametrize(
    ("step", "code", "text", "kind"),
    [
        (CheckQueue("q"), 404, "NOT_FOUND - no queue 'q' in vhost '/'", "queue"),
        (Consume("q", "tag"), 404, "NOT_FOUND - no queue 'q' in vhost '/'", "queue"),
        (Bind("queue", "q", "e", "k"), 404, "NOT_FOUND - no exchange 'e' in vhost '/'", "binding"),
        (Bind("exchange", "x", "e", "k"), 404, "NOT_FOUND - no exchange 'e' in vhost '/'", "binding"),
    ],
)
def test_what_is_named_and_missing_is_a_mismatch(step: Step, code: int, text: str, kind: str) -> None:
    error = refusal(step, StepRefused(code, text))
    assert isinstance(error, TopologyMismatch)
    assert error.kind == kind
    assert text in str(error)


NO_REPLICA = "PRECONDITION_FAILED - stream queue '{}' in vhost '/' does not have a running replica on the local node"
HOME_NODE_DOWN = "NOT_FOUND - home node 'rabbit@a' of durable queue '{}' in vhost '/' is down or inaccessible"


@pytest.mark.parametrize(
    ("step", "code", "text"),
    [
        (DeclareQueue("q"), 403, "ACCESS_REFUSED - configure access to queue 'q' refused for user 'u'"),
        (CheckQueue("q"), 403, "ACCESS_REFUSED"),
        (DeleteQueue("q"), 403, "ACCESS_REFUSED"),
        (DeclareExchange("e"), 403, "ACCESS_REFUSED"),
        (CheckExchange("e"), 403, "ACCESS_REFUSED"),
        (DeclareQueue("amq.q"), 530, "NOT_ALLOWED"),
        (SetPrefetch(1), 540, "NOT_IMPLEMENTED - prefetch_size!=0"),
        (Consume("q", "t"), 406, "PRECONDITION_FAILED - consumer prefetch count is not set for stream 'q'"),
        (Bind("queue", "q", "e"), 406, "PRECONDITION_FAILED"),
        (ConfirmSelect(), 406, "PRECONDITION_FAILED - cannot switch from tx to confirm mode"),
        (ConfirmSelect(), 404, "NOT_FOUND"),
        (Cancel("t"), 403, "ACCESS_REFUSED"),
    ],
)
def test_refusals_that_time_does_not_heal(step: Step, code: int, text: str) -> None:
    error = refusal(step, StepRefused(code, text))
    assert isinstance(error, BrokerUnavailable)
    assert error.permanent
    assert f"{code} {text}" in str(error)


@pytest.mark.parametrize(
    ("step", "code", "text"),
    [
        (DeclareQueue("q"), 405, "RESOURCE_LOCKED - cannot obtain exclusive access to locked queue 'q' in vhost '/'"),
        (Consume("q", "t", exclusive=True), 403, "ACCESS_REFUSED - queue 'q' in vhost '/' in exclusive use"),
        (DeclareQueue("q"), 541, "INTERNAL_ERROR"),
    ],
)
def test_refusals_that_time_heals(step: Step, code: int, text: str) -> None:
    error = refusal(step, StepRefused(code, text))
    assert isinstance(error, BrokerUnavailable)
    assert not error.permanent


def cut(text: str) -> str:
    """Return a text as RabbitMQ sends it, with 255 characters at most."""
    return text if len(text) <= 255 else f"{text[:252]}..."


@pytest.mark.parametrize("name", ["q", "q" * 200], ids=["whole", "cut"])
@pytest.mark.parametrize(
    ("code", "text"),
    [
        (404, HOME_NODE_DOWN),
        (404, "NOT_FOUND - failed to perform operation on queue '{}' in vhost '/' due to timeout"),
        (404, "NOT_FOUND - failed to perform operation on queue '{}': its leader <9.0.1> may be stopping or ..."),
        (404, "NOT_FOUND - queue '{}' in vhost '/' process is stopped by supervisor"),
        (404, "NOT_FOUND - queue '{}' in vhost '/' has crashed and failed to restart"),
        (406, NO_REPLICA),
    ],
)
def test_a_queue_that_does_not_run_is_waited_for(code: int, text: str, name: str) -> None:
    steps = [CheckQueue(name), Consume(name, "t")]
    for step in [*steps, DeclareQueue(name)] if code == 404 else steps:  # a declaration asks for no replica
        error = refusal(step, StepRefused(code, cut(text.format(name))))
        assert isinstance(error, BrokerUnavailable)
        assert not error.permanent


@pytest.mark.parametrize(
    ("code", "text", "undecided"),
    [
        (403, f"write access to exchange 'amq.default' in vhost '/' {EXPIRED}", True),
        (403, f"configure access to queue 'q' in vhost '/' {EXPIRED}"[:120] + "...", True),
        (403, "write access to exchange 'amq.default' in vhost '/' refused for user 'guest'", False),
        (403, "write access to topic 'a', backend ' in exchange 'x' in vhost '/' refused for user 'guest'", False),
        (406, f"write access to exchange 'amq.default' in vhost '/' {EXPIRED}", False),
    ],
)
def test_what_the_broker_cannot_decide_is_told_from_a_refusal(code: int, text: str, undecided: bool) -> None:
    """An expired token, or an authorization backend that failed."""
    reason = reconnect_reason(code, f"ACCESS_REFUSED - {text}")
    assert reason.startswith("the broker cannot check a permission: ") is undecided


@pytest.mark.parametrize(
    ("code", "text", "lacks"),
    [
        (403, "read access to queue 'q' in vhost '/' refused for user 'guest'", True),
        (403, f"read access to queue 'q' in vhost '/' {EXPIRED}", False),
        (403, "queue 'q' in vhost '/' in exclusive use", False),
        (404, "no queue 'q' in vhost '/'", False),
        (None, "connection reset", False),
    ],
)
def test_a_missing_permission_is_told_from_what_may_end(code: int | None, text: str, lacks: bool) -> None:
    assert lacks_permission(code, f"ACCESS_REFUSED - {text}") is lacks


@pytest.mark.parametrize(
    ("code", "text", "stream"),
    [
        (406, "PRECONDITION_FAILED - invalid arg 'x-priority' for queue 'q' in vhost '/' of queue type stream", True),
        (406, "PRECONDITION_FAILED - queue 'q' in vhost '/' has no replica", False),
        (404, "NOT_FOUND - no queue 'x-priority' in vhost '/'", False),
    ],
)
def test_a_stream_is_known_by_its_refusal_of_a_priority(code: int, text: str, stream: bool) -> None:
    refused = StepRefused(code, text)
    assert is_a_stream(refused) is stream
    error = refusal(Consume("q", "tag"), refused)
    assert (str(error) == "queue 'q' is a stream: give offset=, or Queue(..., type=\"stream\")") is stream
    assert isinstance(error, TopologyMismatch) is (stream or code == 404)


@pytest.mark.parametrize(
    ("code", "text", "lacks"),
    [
        (406, NO_REPLICA.format("q"), True),
        (406, cut(NO_REPLICA.format("q" * 200)), True),
        (406, "PRECONDITION_FAILED - consumer prefetch count is not set for stream queue 'q' in vhost '/'", False),
        (404, HOME_NODE_DOWN.format("q"), False),
    ],
)
def test_a_node_without_a_replica_is_told_from_a_refusal(code: int, text: str, lacks: bool) -> None:
    assert reconnect_reason(code, text) == (f"the stream has no replica on this node: {code} {text}" if lacks else "")


def test_a_queue_that_is_not_back_yet_is_not_missing() -> None:
    """RabbitMQ answers 404 for such a queue while it starts."""
    steps = pull_setup("orders", [], ())
    next(steps)
    with pytest.raises(BrokerUnavailable) as caught:
        steps.throw(StepRefused(404, "NOT_FOUND - queue 'orders' in vhost '/' process is stopped by supervisor"))
    assert not is_missing(caught.value)
    assert is_out_of_reach(caught.value)


@pytest.mark.parametrize(("code", "missing"), [(404, True), (406, False)])
def test_what_does_not_exist_is_told_from_what_differs(code: int, missing: bool) -> None:
    steps = pull_setup("orders", [], ())
    next(steps)
    with pytest.raises(ReliableMQError) as caught:
        steps.throw(StepRefused(code, "no"))
    assert is_missing(caught.value) is missing
    assert not is_out_of_reach(caught.value)
    assert not is_missing(BrokerUnavailable("404 of something else"))
    assert not is_out_of_reach(BrokerUnavailable("404 of something else"))


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("4.3.6", (4, 3, 6)), ("4.3.0-rc.1+5.gabc", (4, 3, 0)), ("3.13", (3, 13)), ("", ()), ("unknown", ())],
)
def test_a_version_is_compared_by_its_leading_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert parse_version(version) == numbers


def test_a_server_says_who_it_is() -> None:
    server = ServerInfo.of({"product": "RabbitMQ", "version": "4.3.6", "cluster_name": "secret-host"})
    assert repr(server) == "ServerInfo(product='RabbitMQ', version='4.3.6', version_tuple=(4, 3, 6))"
    assert server.properties["cluster_name"] == server.cluster_name == "secret-host"
    assert ServerInfo.of({}) == ServerInfo("", "", ())
    assert ServerInfo.of({}).cluster_name == ""


def test_a_name_that_is_a_nodes_own_is_none_of_the_cluster() -> None:
    """In a cluster without a configured name, each node reports another name."""
    nodes = [ServerInfo.of({"cluster_name": f"rabbit@host-{number}"}) for number in range(3)]
    assert [node.cluster_name for node in nodes] == ["", "", ""]
