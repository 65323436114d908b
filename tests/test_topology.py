"""Topology as data: declarations, their order, refused values, and mismatches."""

from __future__ import annotations

import copy
import enum
import pickle
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliable_mq.errors import ConfigurationError
from reliable_mq.topology import DEFAULT, Binding, Exchange, Queue, declarations, mismatch_from_reply
from reliable_mq.topology.arguments import Arguments

V3_9, V3_13, V4_0, V4_3 = (3, 9, 0), (3, 13, 7), (4, 0, 5), (4, 3, 6)

QUORUM = {"x-queue-type": "quorum", "x-delivery-limit": -1}
DEAD_LETTERS = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q.dead"}
AT_LEAST_ONCE = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}


def names(topology: Any) -> list[str]:
    return [item.name for item in declarations(topology) if not isinstance(item, Binding)]


class Name(str, enum.Enum):  # noqa: UP042  # the older kind, which users have
    ORDERS = "orders"
    AUDIT = "audit"


def test_a_name_may_be_a_member_of_an_enum() -> None:
    """Names that are made of it, for example of a delay queue, have its value."""
    queue = Queue(Name.ORDERS, dead_letter=Name.AUDIT)
    exchange = Exchange(Name.ORDERS, alternate_exchange=Name.AUDIT)
    binding = Binding(Name.ORDERS, Name.AUDIT, Name.ORDERS)
    given = (queue.name, queue.dead_letter, exchange.name, exchange.alternate_exchange)
    assert [f"{one}" for one in given] == ["orders", "audit", "orders", "audit"]
    assert f"{binding.source} {binding.destination} {binding.routing_key}" == "orders audit orders"


# -- declarations of queues --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [V4_0, V4_3, (4,)])
def test_a_quorum_queue_declares_the_design_arguments_and_a_dlq(version: tuple[int, ...]) -> None:
    queue = Queue("q")
    assert queue.arguments_for(version) == QUORUM | DEAD_LETTERS | AT_LEAST_ONCE
    dead = Queue("q.dead", dead_letter=None)
    assert dead.arguments_for(version) == QUORUM
    assert declarations([queue]) == [dead, queue]
    assert (queue.dead_letter_queue, queue.dead_letter_name) == (dead, "q.dead")
    for each in (queue, dead):
        assert (each.durable, each.exclusive, each.auto_delete) == (True, False, False)


def test_without_dead_letters_only_type_and_limit_are_declared() -> None:
    queue = Queue("q", dead_letter=None)
    assert queue.arguments_for(V4_3) == QUORUM
    assert declarations([queue]) == [queue]
    assert (queue.dead_letter_queue, queue.dead_letter_name) == (None, None)


def test_a_classic_queue_declares_its_type_and_its_dead_letters() -> None:
    queue = Queue("q", type="classic")
    assert queue.arguments_for(V4_3) == {"x-queue-type": "classic", **DEAD_LETTERS}
    assert declarations([queue]) == [Queue("q.dead", dead_letter=None), queue]


def test_a_stream_never_has_a_dead_letter_queue() -> None:
    queue = Queue("q", type="stream", max_age=3600, max_length_bytes=10**9)
    expected = {"x-queue-type": "stream", "x-max-age": "3600s", "x-max-length-bytes": 10**9}
    assert queue.arguments_for(V4_3) == expected
    assert declarations([queue]) == [queue]


@pytest.mark.parametrize("options", [{"exclusive": True}, {"auto_delete": True}])
def test_a_temporary_queue_declares_no_dead_letter_queue(options: dict[str, Any]) -> None:
    queue = Queue("q", type="classic", **options)
    assert queue.arguments_for(V4_3) == {"x-queue-type": "classic"}
    assert queue.dead_letter_queue is None
    assert Queue("q", type="classic", dead_letter="d", **options).dead_letter_name == "d"


def test_an_older_broker_is_not_sent_what_it_does_not_know() -> None:
    assert Queue("q").arguments_for(V3_13) == {"x-queue-type": "quorum"} | DEAD_LETTERS | AT_LEAST_ONCE
    old = {"x-queue-type": "quorum", "x-overflow": "reject-publish"} | DEAD_LETTERS
    assert Queue("q").arguments_for(V3_9) == old
    assert Queue("q").arguments_for(()) == old
    assert Queue("q", arguments={"x-delivery-limit": -1}).arguments_for(V3_9) == old | {"x-delivery-limit": -1}


def test_dead_letters_may_go_to_a_declared_or_existing_queue() -> None:
    failed = Queue("failed", type="stream")
    queue = Queue("q", dead_letter=failed)
    assert queue.arguments_for(V4_3)["x-dead-letter-routing-key"] == "failed"
    assert declarations([queue]) == [failed, queue]
    existing = Queue("q", dead_letter="failed")
    assert existing.arguments_for(V4_3)["x-dead-letter-routing-key"] == "failed"
    assert declarations([existing]) == [existing]
    assert names([Queue("q", dead_letter=Queue("failed"))]) == ["failed.dead", "failed", "q"]


def test_limits_are_sent_under_their_names_and_in_their_units() -> None:
    queue = Queue(
        "q",
        type="classic",
        dead_letter=None,
        max_length=3,
        max_length_bytes=100,
        message_ttl=1.5,
        single_active_consumer=True,
    )
    assert queue.arguments_for(V4_3) == {
        "x-queue-type": "classic",
        "x-overflow": "reject-publish",
        "x-max-length": 3,
        "x-max-length-bytes": 100,
        "x-message-ttl": 1500,
        "x-single-active-consumer": True,
    }
    assert Queue("q", type="classic", max_priority=9).arguments_for(V4_3)["x-max-priority"] == 9
    assert Queue("q", message_ttl=timedelta(minutes=1)).arguments_for(V4_3)["x-message-ttl"] == 60_000
    assert Queue("q", message_ttl=0).arguments_for(V4_3)["x-message-ttl"] == 0
    assert Queue("q", message_ttl=0.0004).arguments_for(V4_3)["x-message-ttl"] == 1, "0 would expire it at once"
    age = Queue("q", type="stream", max_age=timedelta(days=1)).arguments_for(V4_3)["x-max-age"]
    assert age == "86400s"


@pytest.mark.parametrize("kind", ["quorum", "classic"])
@pytest.mark.parametrize("limit", ["max_length", "max_length_bytes"])
def test_a_queue_with_a_length_limit_rejects_publishes_when_full(kind: Any, limit: str) -> None:
    queue = Queue("q", type=kind, dead_letter=None, **{limit: 1})
    assert queue.arguments_for(V4_3)["x-overflow"] == "reject-publish"
    dropping = Queue("q", type=kind, dead_letter=None, arguments={"x-overflow": "drop-head"}, **{limit: 1})
    assert dropping.arguments_for(V4_3)["x-overflow"] == "drop-head"


# -- arguments of the user ---------------------------------------------------------------------------------------------


def test_a_users_arguments_win_over_ours_and_none_leaves_one_out() -> None:
    given_arguments = {"x-delivery-limit": 5, "x-quorum-initial-group-size": 3}
    queue = Queue("q", arguments=given_arguments)
    assert queue.arguments_for(V4_3) == QUORUM | DEAD_LETTERS | AT_LEAST_ONCE | given_arguments
    without = Queue("q", dead_letter=None, arguments={"x-delivery-limit": None})
    assert without.arguments_for(V4_3) == {"x-queue-type": "quorum"}
    loose = {"x-overflow": "drop-head", "x-dead-letter-strategy": "at-most-once"}
    assert Queue("q", arguments=loose).arguments_for(V4_3) == QUORUM | DEAD_LETTERS | loose


def test_a_users_dead_letter_exchange_takes_the_place_of_ours() -> None:
    queue = Queue("q", arguments={"x-dead-letter-exchange": "dlx"})
    assert queue.arguments_for(V4_3) == QUORUM | AT_LEAST_ONCE | {"x-dead-letter-exchange": "dlx"}
    assert declarations([queue]) == [queue]
    assert queue.dead_letter_name is None
    both = {"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": "k"}
    classic = Queue("q", type="classic", arguments=both)
    assert classic.arguments_for(V4_3) == {"x-queue-type": "classic", **both}


def test_arguments_are_a_copy_that_cannot_be_changed() -> None:
    nested: dict[str, Any] = {"a": [1, {"b": "c"}], "t": (1, 2)}
    queue = Queue("q", arguments=nested)
    nested["a"][1]["b"] = "changed"
    nested["z"] = 1
    assert queue.arguments == {"a": [1, {"b": "c"}], "t": [1, 2]}
    assert repr(queue.arguments) == "{'a': [1, {'b': 'c'}], 't': [1, 2]}"
    assert len(queue.arguments) == 2
    with pytest.raises(TypeError):
        queue.arguments["x"] = 1


@pytest.mark.parametrize(
    "item",
    [
        Queue("q", arguments={"a": [1]}),
        Exchange("e", arguments={"a": {"b": b"c"}}, alternate_exchange=Exchange("f")),
        Binding("e", Queue("q"), "k", arguments={"a": None}),
    ],
)
def test_declarations_can_be_hashed_copied_and_pickled(item: Any) -> None:
    for same in (copy.copy(item), copy.deepcopy(item), pickle.loads(pickle.dumps(item))):
        assert same == item
        assert hash(same) == hash(item)
        assert repr(same) == repr(item)
    assert pickle.loads(pickle.dumps(DEFAULT)) is DEFAULT


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abé", max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abé", min_size=1, max_size=3), values, max_size=4))
def test_arguments_arrive_as_they_were_given(arguments: dict[str, Any]) -> None:
    assert Binding("e", "q", arguments=arguments).arguments == arguments
    sent = Exchange("e", arguments=arguments).arguments_for(V4_3)
    assert sent == {name: value for name, value in arguments.items() if value is not None}


# -- refused values ----------------------------------------------------------------------------------------------------

DEEP: Any = []
for _ in range(40):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "the name of a queue must not be empty"),
        ({"name": None}, "the name of a queue must be text, not NoneType"),
        ({"name": "n" * 256}, "the name of a queue has 256 bytes"),
        ({"name": "é" * 128}, "has 256 bytes"),
        ({"name": "\ud800"}, "lone surrogate"),
        ({"name": "a\nb"}, "line end"),
        ({"name": "a\r"}, "line end"),
        ({"name": "amq.gen-1"}, "must not begin with 'amq.'"),
        ({"name": "n" * 251}, "name of queue .* leaves no room for '.dead'"),
        ({"type": "mirrored"}, "type of queue 'q' must be quorum, classic or stream, not 'mirrored'"),
        ({"type": None}, "type of queue 'q'"),
        ({"durable": 1}, "durable of queue 'q' must be True or False, not 1"),
        ({"single_active_consumer": "yes"}, "single_active_consumer of queue 'q' must be True or False"),
        ({"durable": False}, "durable of queue 'q' must be True on a quorum queue; or give type=\"classic\""),
        ({"exclusive": True}, "exclusive of queue 'q' must be False on a quorum queue"),
        ({"auto_delete": True}, "auto_delete of queue 'q' must be False on a quorum queue"),
        ({"type": "stream", "durable": False}, "durable of queue 'q' must be True on a stream queue"),
        ({"type": "stream", "exclusive": True}, "exclusive of queue 'q' must be False on a stream queue"),
        ({"type": "stream", "auto_delete": True}, "auto_delete of queue 'q' must be False on a stream queue"),
        ({"max_length": -1}, "max_length of queue 'q' must be a whole number from 0"),
        ({"max_length": 1.0}, "max_length of queue 'q'"),
        ({"max_length_bytes": True}, "max_length_bytes of queue 'q'"),
        ({"max_length_bytes": 2**63}, "max_length_bytes of queue 'q'"),
        ({"type": "classic", "max_priority": 0}, "max_priority of queue 'q' must be a whole number from 1 to 255"),
        ({"type": "classic", "max_priority": 256}, "max_priority of queue 'q'"),
        ({"max_priority": 5}, "max_priority of queue 'q' is refused by RabbitMQ on a quorum queue"),
        ({"message_ttl": -1}, "message_ttl"),
        ({"message_ttl": "1s"}, "message_ttl"),
        ({"message_ttl": 315_360_001}, "message_ttl of queue 'q' must be at most"),
        ({"max_age": 60}, "max_age of queue 'q' is refused by RabbitMQ on a quorum queue"),
        ({"type": "stream", "max_age": 1.5}, "max_age of queue 'q' must be whole seconds"),
        ({"type": "stream", "max_age": 0}, "max_age must be a number of seconds above 0"),
        ({"type": "stream", "max_length": 5}, "max_length of queue 'q' is refused by RabbitMQ on a stream queue"),
        ({"type": "stream", "message_ttl": 5}, "message_ttl of queue 'q' is refused by RabbitMQ on a stream queue"),
        ({"type": "stream", "single_active_consumer": True}, "single_active_consumer of queue 'q' is refused"),
        ({"type": "classic", "arguments": {"x-consumer-timeout": 60_000}}, "refused by RabbitMQ on a classic queue"),
        ({"type": "stream", "dead_letter": "d"}, "dead_letter of queue 'q' must be left out on a stream"),
        ({"type": "stream", "dead_letter": Queue("d")}, "dead_letter of queue 'q' must be left out on a stream"),
        ({"dead_letter": "q"}, "dead_letter of queue 'q' is the queue itself"),
        ({"dead_letter": Queue("q")}, "dead_letter of queue 'q' is the queue itself"),
        ({"dead_letter": ""}, "dead_letter of queue 'q' must not be empty"),
        ({"dead_letter": False}, "dead_letter of queue 'q' must be a Queue, a name or None, not bool"),
        ({"arguments": None}, "arguments of queue 'q' must be a mapping, not NoneType"),
        ({"arguments": [("a", 1)]}, "arguments of queue 'q' must be a mapping, not list"),
        ({"arguments": {1: 2}}, "a name in arguments of queue 'q' must be text"),
        ({"arguments": {"a" * 256: 2}}, "a name in arguments of queue 'q' has 256 bytes"),
        ({"arguments": {"a": 1.5}}, "'a' in arguments of queue 'q' is a float"),
        ({"arguments": {"a": {"b": [{1}]}}}, "'b' in 'a' in arguments of queue 'q' is a set"),
        ({"arguments": {"a": 2**63}}, "'a' in arguments of queue 'q' does not fit 64 bits"),
        ({"arguments": {"a": DEEP}}, "nested more than 32 deep"),
        ({"arguments": {"x-queue-type": "classic"}}, "argument x-queue-type of queue 'q' contradicts type='quorum'"),
        ({"arguments": {"x-max-priority": 5}}, "argument x-max-priority of queue 'q' is refused .* on a quorum queue"),
        ({"arguments": {"x-queue-mode": "lazy"}}, "argument x-queue-mode of queue 'q' is refused"),
        ({"type": "classic", "arguments": {"x-delivery-limit": 5}}, "x-delivery-limit of queue 'q' is refused"),
        ({"type": "stream", "arguments": {"x-dead-letter-exchange": ""}}, "x-dead-letter-exchange of queue 'q' is ref"),
        (
            {"max_length": 5, "arguments": {"x-max-length": 5}},
            "argument x-max-length .* given twice: also as max_length",
        ),
        (
            {"dead_letter": "d", "arguments": {"x-dead-letter-routing-key": "k"}},
            "argument x-dead-letter-routing-key of queue 'q' is given beside dead_letter",
        ),
        (
            {"dead_letter": None, "arguments": {"x-dead-letter-exchange": "x"}},
            "argument x-dead-letter-exchange of queue 'q' is given beside dead_letter",
        ),
        (
            {"arguments": {"x-dead-letter-routing-key": "k"}},
            "argument x-dead-letter-routing-key of queue 'q' needs x-dead-letter-exchange",
        ),
        ({"arguments": {"x-overflow": "drop-head"}}, "x-overflow of queue 'q' must be reject-publish"),
        ({"arguments": {"x-overflow": None}}, "x-overflow of queue 'q' must be reject-publish"),
        (
            {"arguments": {"x-dead-letter-exchange": "x", "x-overflow": "drop-head"}},
            "x-overflow of queue 'q' must be reject-publish",
        ),
    ],
)
def test_a_queue_that_rabbitmq_would_refuse_is_refused_by_field(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Queue(**{"name": "q", **options})


def test_names_up_to_the_limit_are_accepted() -> None:
    assert names([Queue("n" * 250)]) == ["n" * 250 + ".dead", "n" * 250]
    assert names([Queue("é" * 127 + "n", dead_letter=None)]) == ["é" * 127 + "n"]
    assert Queue("q", arguments={"x-queue-type": "quorum"}).arguments_for(V4_3) == Queue("q").arguments_for(V4_3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "the name of an exchange must not be empty"),
        ({"name": "amq.topic"}, "must not begin with 'amq.'"),
        ({"type": "fan-out"}, "type of exchange 'e' must be direct, topic, fanout, headers or begin with 'x-'"),
        ({"type": "x-" + "a" * 254}, "type of exchange 'e' has 256 bytes in UTF-8; AMQP carries 255 at most"),
        ({"type": None}, "type of exchange 'e'"),
        ({"durable": None}, "durable of exchange 'e' must be True or False"),
        ({"internal": 1}, "internal of exchange 'e'"),
        ({"alternate_exchange": 5}, "alternate_exchange of exchange 'e' must be text"),
        ({"alternate_exchange": ""}, "alternate_exchange of exchange 'e' must not be empty"),
        (
            {"alternate_exchange": "a", "arguments": {"alternate-exchange": "b"}},
            "argument alternate-exchange of exchange 'e' is given twice",
        ),
        ({"arguments": {"a": 1.5}}, "'a' in arguments of exchange 'e' is a float"),
    ],
)
def test_an_exchange_rabbitmq_would_refuse_is_refused_by_field(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Exchange(**{"name": "e", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": ""}, "source of a binding .the default exchange cannot be bound. must not be empty"),
        ({"source": Queue("q")}, "source of a binding .* must be text, not Queue"),
        ({"destination": ""}, "destination of a binding must not be empty"),
        ({"destination": None}, "destination of a binding must be text"),
        ({"routing_key": "k" * 256}, "routing_key of a binding has 256 bytes"),
        ({"routing_key": None}, "routing_key of a binding must be text"),
        ({"arguments": {"a": object()}}, "'a' in arguments of a binding is a object"),
    ],
)
def test_a_binding_that_cannot_be_made_is_refused_by_field(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Binding(**{"source": "e", "destination": "q", **options})


# -- exchanges, bindings, and the order --------------------------------------------------------------------------------


def test_an_exchange_declares_its_alternate_first() -> None:
    declared = Exchange("e", type="x-local-random", alternate_exchange=Exchange("f", type="fanout"))
    assert declared.arguments_for(V4_0) == {"alternate-exchange": "f"}
    assert names([declared]) == ["f", "e"]
    existing = Exchange("e", alternate_exchange="amq.fanout")
    assert existing.arguments_for(V4_0) == {"alternate-exchange": "amq.fanout"}
    assert names([existing]) == ["e"]
    assert Exchange("e", arguments={"a": None}).arguments_for(V4_0) == {}


def test_what_is_referred_to_comes_first_and_nothing_comes_twice() -> None:
    events, audit, orders = Exchange("events", type="topic"), Exchange("audit", type="fanout"), Queue("orders")
    bindings = [Binding(events, orders, "order.#"), Binding(events, audit, "#"), Binding("amq.topic", "existing", "k")]
    expected = [events, audit, Queue("orders.dead", dead_letter=None), orders, *bindings]
    assert declarations(bindings) == expected
    assert declarations([*bindings, orders, events, *bindings, Queue("orders")]) == expected
    assert declarations(iter(expected)) == expected
    assert declarations([]) == []


@pytest.mark.parametrize("values", [("1", "2"), (1, True), (b"1", "1")])
def test_bindings_that_differ_in_arguments_are_both_declared(values: tuple[object, object]) -> None:
    first, second = (Binding("amq.headers", "q", arguments={"a": value, "b": 1}) for value in values)
    again = Binding("amq.headers", "q", arguments={"b": 1, "a": values[0]})
    assert [one.arguments["a"] for one in declarations([first, second, again])] == list(values)


def test_bindings_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A headers exchange may have thousands that only differ in their arguments."""
    monkeypatch.setattr(Arguments, "__eq__", lambda *_: pytest.fail("compared"))
    bindings = [Binding("amq.headers", "q", arguments={"tenant": number}) for number in range(100)]
    assert len(declarations(bindings)) == 100


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (
            [Queue("q"), Queue("q", type="classic")],
            "queue 'q' is in the topology twice, with type 'quorum' and 'classic'",
        ),
        ([Queue("q"), Queue("q.dead")], "queue 'q.dead' is in the topology twice, with dead_letter None and DEFAULT"),
        ([Queue("q"), Queue("q", arguments={"a": 1})], "with arguments {} and {'a': 1}"),
        ([Exchange("e"), Binding(Exchange("e", type="topic"), "q")], "exchange 'e' .* with type 'direct' and 'topic'"),
        (["q"], "holds a str: .* left out"),
        ([None], "holds a NoneType"),
        ("q", "topology must be a list, not one str"),
        (Queue("q"), "topology must be a list, not one Queue"),
        (None, "topology must be a list, not one NoneType"),
    ],
)
def test_a_topology_that_contradicts_itself_is_refused(topology: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        declarations(topology)


def test_a_queue_and_an_exchange_may_share_a_name() -> None:
    assert names([Queue("same", dead_letter=None), Exchange("same")]) == ["same", "same"]


# -- errors of the broker ----------------------------------------------------------------------------------------------

IN_VHOST = "in vhost '/': received"

# As RabbitMQ 4.0.5 and 4.3.6 both sent them to pika; other clients send other integer types.
INEQUIVALENT = [
    ("queue", "x-queue-type", "quorum", "classic", "'quorum' but current is 'classic'"),
    ("queue", "x-queue-type", "classic", "quorum", "'classic' but current is 'quorum'"),
    ("queue", "x-delivery-limit", "none", "20", "none but current is the value '20' of type 'signedint'"),
    ("queue", "x-delivery-limit", "-1", "20", "'-1' but current is '20'"),
    ("queue", "x-delivery-limit", "-1", "none", "the value '-1' of type 'signedint' but current is none"),
    ("queue", "x-message-ttl", "none", "20", "none but current is the value '20' of type 'long'"),
    ("queue", "x-dead-letter-exchange", "", "dlx", "'' but current is 'dlx'"),
    ("queue", "x-dead-letter-exchange", "", "none", "the value '' of type 'longstr' but current is none"),
    ("queue", "x-dead-letter-routing-key", "b", "it's 'q'", "'b' but current is 'it's 'q''"),
    ("queue", "durable", "false", "true", "'false' but current is 'true'"),
    ("queue", "auto_delete", "true", "false", "'true' but current is 'false'"),
    ("queue", "x-single-active-consumer", "none", "true", "none but current is the value 'true' of type 'bool'"),
    ("queue", "x-single-active-consumer", "false", "true", "'false' but current is 'true'"),
    ("queue", "x-overflow", "reject-publish", "drop-head", "'reject-publish' but current is 'drop-head'"),
    ("exchange", "type", "topic", "direct", "'topic' but current is 'direct'"),
    ("exchange", "durable", "false", "true", "'false' but current is 'true'"),
    ("exchange", "internal", "true", "false", "'true' but current is 'false'"),
    ("exchange", "alternate-exchange", "other", "none", "the value 'other' of type 'longstr' but current is none"),
    ("exchange", "alternate-exchange", "two", "one", "'two' but current is 'one'"),
    ("exchange", "alternate-exchange", "none", "one", "none but current is the value 'one' of type 'longstr'"),
]
ODD_NAMES = ["q", "o'd d in vhost 'x'", "ünï: received 'a'", "' in vhost '/': received 'a' but current is 'b'"]


@pytest.mark.parametrize(("kind", "argument", "declared", "existing", "text"), INEQUIVALENT)
@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_mismatch_names_the_argument_and_both_values(
    kind: str, argument: str, declared: str, existing: str, text: str, name: str
) -> None:
    reply = f"PRECONDITION_FAILED - inequivalent arg '{argument}' for {kind} '{name}' {IN_VHOST} {text}"
    error = mismatch_from_reply(kind, name, 406, reply)
    assert (error.kind, error.name, error.argument) == (kind, name, argument)
    assert (error.declared, error.existing) == (declared, existing)
    assert f"{kind} {name!r}" in str(error)
    for part in (argument, declared, existing):
        assert part in str(error)


def test_a_mismatch_reads_well() -> None:
    text = f"PRECONDITION_FAILED - inequivalent arg 'x-delivery-limit' for queue 'q' {IN_VHOST} none but current is "
    error = mismatch_from_reply("queue", "q", 406, text + "the value '20' of type 'signedint'")
    assert str(error).startswith("queue 'q': x-delivery-limit is declared as none, but exists as '20'. RabbitMQ cannot")


def test_a_truncated_mismatch_reply_still_names_the_argument() -> None:
    name = "n" * 255
    text = f"PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue '{name}"[:252] + "..."
    error = mismatch_from_reply("queue", name, 406, text)
    assert (error.argument, error.declared, error.existing) == ("x-queue-type", None, None)
    assert "x-queue-type differs from what exists" in str(error)


@pytest.mark.parametrize(
    ("kind", "argument", "declared", "text"),
    [
        (
            "queue",
            "x-max-priority",
            None,
            "invalid arg 'x-max-priority' for queue 'q' in vhost '/' of queue type rabbit_q",
        ),
        ("queue", "non-durable", None, "invalid property 'non-durable' for queue 'q' in vhost '/'"),
        ("queue", "x-expires", None, "invalid arg 'x-expires' for queue 'q' in vhost '/': {value_zero,0}"),
        ("exchange", "type", "x-foo", "unknown exchange type 'x-foo'"),
        ("exchange", "type", "x-random", "invalid exchange type 'x-random'"),
        ("exchange", None, None, "invalid type 'signedint' for arg 'alternate-exchange' in exchange 'q' in vhost '/'"),
        ("binding", None, None, 'Invalid x-match field value <<"foo">>; expected all, any, all-with-x, or any-with-x'),
        ("queue", None, None, ""),
    ],
)
def test_other_refusals_are_handed_on_with_what_is_known(
    kind: str, argument: str | None, declared: str | None, text: str
) -> None:
    error = mismatch_from_reply(kind, "q", 406, f"PRECONDITION_FAILED - {text}")
    assert (error.kind, error.name, error.argument) == (kind, "q", argument)
    assert (error.declared, error.existing) == (declared, None)
    assert f"{kind} 'q'" in str(error)
    assert text in str(error) or (declared is not None and declared in str(error))
    assert "406" in str(error)


@given(st.text(max_size=60), st.sampled_from(["", "inequivalent arg 'a' for queue 'q' in vhost '", "invalid arg '"]))
def test_any_text_gives_a_mismatch(text: str, prefix: str) -> None:
    assert mismatch_from_reply("queue", "q", 406, prefix + text).name == "q"


def test_delayed_retry_is_three_arguments() -> None:
    """The times are in milliseconds, and only failed messages are delayed."""
    declared = Queue("orders", delayed_retry=(0.5, timedelta(minutes=1))).arguments_for((4, 3))
    assert {name: value for name, value in declared.items() if name.startswith("x-delayed")} == {
        "x-delayed-retry-type": "failed",
        "x-delayed-retry-min": 500,
        "x-delayed-retry-max": 60_000,
    }


@pytest.mark.parametrize(
    "given",
    [
        {"delayed_retry": (2, 1)},
        {"delayed_retry": (0, 1)},
        {"delayed_retry": 5},
        {"delayed_retry": (1, 2, 3)},
        {"delayed_retry": (1, "2")},
        {"delayed_retry": (1, 2), "type": "classic"},
        {"delayed_retry": (1, 2), "arguments": {"x-delayed-retry-min": 1}},
    ],
)
def test_delayed_retry_that_makes_no_sense_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="delayed_retry"):
        Queue("orders", **given)
