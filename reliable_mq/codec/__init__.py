"""The AMQP codec: properties, tables, content frames, and methods of channels.

The drivers do the handshake, heartbeats and flow control. The codec uses no driver, no socket and no clock.
"""

from __future__ import annotations

from reliable_mq.codec.frames import (
    append_publish,
    encode_ack,
    encode_get,
    encode_nack,
    encode_reject,
    header_frame_size,
    publish_head,
)
from reliable_mq.codec.properties import (
    BASIC_PROPERTIES,
    Properties,
    encode_properties,
    encode_property,
    encode_values,
    find_header,
    integer_header,
    join_properties,
    plain_message_id,
    plain_properties,
    plain_properties_head,
    rewrite_properties,
    split_properties,
    stream_offset,
)
from reliable_mq.codec.reader import LARGEST_BODY, ChannelSink, InboundReader, RawDelivery
from reliable_mq.codec.tables import CodecError, FieldValue, decode_table, encode_table

__all__ = [
    "BASIC_PROPERTIES",
    "LARGEST_BODY",
    "ChannelSink",
    "CodecError",
    "FieldValue",
    "InboundReader",
    "Properties",
    "RawDelivery",
    "append_publish",
    "decode_table",
    "encode_ack",
    "encode_get",
    "encode_nack",
    "encode_properties",
    "encode_property",
    "encode_reject",
    "encode_table",
    "encode_values",
    "find_header",
    "header_frame_size",
    "integer_header",
    "join_properties",
    "plain_message_id",
    "plain_properties",
    "plain_properties_head",
    "publish_head",
    "rewrite_properties",
    "split_properties",
    "stream_offset",
]
