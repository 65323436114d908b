"""TLS: ``amqps://`` verifies the broker's certificate and its host name.

Only the code can disable this. The example needs a broker with TLS: set ``RELIABLE_MQ_URL`` to its URL and
``RELIABLE_MQ_CA_FILE`` to its certificate authority. If the broker requires a client certificate, also set
``RELIABLE_MQ_CERT_FILE`` and ``RELIABLE_MQ_KEY_FILE``.

Prints::

    published over TLS
    without the right authority: BrokerUnavailable, permanent: True
    plaintext with TLS options: ConfigurationError
"""

from __future__ import annotations

import os

from reliable_mq import BrokerUnavailable, ConfigurationError, Message, Publisher, Queue, TLSOptions

URL = os.environ.get("RELIABLE_MQ_URL", "amqps://guest:guest@localhost/")
TLS = TLSOptions(
    ca_file=os.environ.get("RELIABLE_MQ_CA_FILE"),  # None: the system's authorities
    cert_file=os.environ.get("RELIABLE_MQ_CERT_FILE"),  # files are read at every connect: renew them in place
    key_file=os.environ.get("RELIABLE_MQ_KEY_FILE"),
)

with Publisher(URL, tls=TLS, topology=[Queue("example.tls")]) as publisher:
    publisher.publish(Message(b"hello"), routing_key="example.tls")
    print("published over TLS")

try:
    Publisher(URL).connect()  # trusts the system's authorities only
except BrokerUnavailable as error:
    print(f"without the right authority: BrokerUnavailable, permanent: {error.permanent}")

try:
    Publisher("amqp://localhost/", tls=TLS)
except ConfigurationError as error:
    print(f"plaintext with TLS options: {type(error).__name__}")
