"""The asyncio face: on aiormq, the protocol layer of aio-pika. Event loop only; no thread but for what may block."""
