"""What decides: no socket, no clock, no thread, no logging. The shells in `sync` and `aio` carry out."""
