"""The sync API, on pika, with one I/O thread for each connection."""
