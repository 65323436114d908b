"""What both faces share above their drivers: one connection with one data channel, kept. No driver, no thread of ours.

It runs on an event loop that it is given, pika's or asyncio's, and is told what a link of that loop's driver meets.
"""
