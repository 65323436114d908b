"""The asyncio API, on aiormq, the protocol layer of aio-pika.

It runs on the event loop only. Threads are used for calls that may block.
"""
