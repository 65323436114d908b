"""Test a service that uses another library, here kombu, in the lab.

Run it with ``python -m pytest test_kombu.py``, on Linux with docker. The first test takes about 10 s longer than it
reports, because the broker starts in a container. The service is the code between the two comment lines; the rest tests
it.

Prints, at its end::

    ...== accounts ==...
    test_an_order_whose_confirm_is_lost_is_placed_again: attempted 1, confirmed 1, ... duplicated 1, ...
    test_confirmed_orders_outlive_a_killed_broker: attempted 40, confirmed 40, failed 0, drained 40 ...
    2 passed...
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from kombu import Connection, Exchange, Queue

if TYPE_CHECKING:
    from reliable_mq.testing import Audit, FaultProxyFactory, RabbitMQ, VirtualHost

pytest_plugins = ["reliable_mq.testing.fixtures"]  # in a suite: in the top-level conftest.py

# -- the service -------------------------------------------------------------------------------------------------------

ORDERS = Queue("orders", Exchange("orders", durable=True), routing_key="orders", durable=True)


class Shop:
    """Place orders, each with a publisher confirm."""

    def __init__(self, url: str) -> None:
        self._connection = Connection(url, heartbeat=10, transport_options={"confirm_publish": True})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.release()

    def place(self, order: int) -> None:
        """Publish, and publish again after each lost connection."""
        producer = self._connection.Producer()
        publish = self._connection.ensure(producer, self._publish, max_retries=30, interval_start=0.2, interval_max=1)
        publish(producer, order)

    def _publish(self, producer: object, order: int) -> None:
        producer.publish(  # type: ignore[attr-defined]
            {"order": order},
            exchange=ORDERS.exchange,
            routing_key=ORDERS.routing_key,
            declare=[ORDERS],
            message_id=str(order),
            delivery_mode=2,
            confirm_timeout=30,
        )


# -- its tests ---------------------------------------------------------------------------------------------------------


def test_confirmed_orders_outlive_a_killed_broker(rabbitmq: RabbitMQ, virtual_host: VirtualHost, audit: Audit) -> None:
    with Shop(virtual_host.url) as shop:
        for order in range(40):
            if order == 20:
                rabbitmq.kill()
                rabbitmq.start()
            audit.attempted(str(order))
            shop.place(order)
            audit.confirmed(str(order))

    audit.drain(virtual_host, ["orders"])
    audit.close()  # raises if a confirmed order is in no queue


def test_an_order_whose_confirm_is_lost_is_placed_again(
    virtual_host: VirtualHost, fault_proxy: FaultProxyFactory, audit: Audit
) -> None:
    proxy = fault_proxy(virtual_host.url)
    with Shop(proxy.url) as shop:
        audit.attempted("1")
        proxy.hold_confirms()
        with ThreadPoolExecutor() as pool:
            placing = pool.submit(shop.place, 1)
            proxy.wait_for(lambda: proxy.held_confirms == 1, timeout=30)  # the broker has it; the shop does not know
            proxy.cut()
            proxy.heal()
            placing.result(timeout=60)
        audit.confirmed("1")

    audit.drain(virtual_host, ["orders"])
    result = audit.close()
    assert result.duplicated == {"1"}  # so the handler of the orders must be idempotent
