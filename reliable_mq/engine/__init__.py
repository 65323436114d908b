"""What the sync API and the asyncio API share, driven by callbacks."""
