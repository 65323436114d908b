"""The callback-driven parts that the sync API and the asyncio API share."""
