"""The asyncio API, on aiormq, the protocol layer of aio-pika.

It runs on the event loop alone; threads are for calls that may block.
"""
