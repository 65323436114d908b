"""The blocking face: everything here runs on pika, with one I/O thread per connection."""
