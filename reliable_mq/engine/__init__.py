"""The parts that the sync API and the asyncio API share, driven by callbacks."""
