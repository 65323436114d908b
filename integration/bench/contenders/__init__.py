"""The contenders, one module for each way to publish or to consume.

A module has ``CONTENDERS``, and may have ``BARS``, the limits that its contenders have to keep. It runs as a program,
``python -m integration.bench.contenders.<module> <contender> <options of Job>``, in a fresh interpreter, so that what
it imports at the top is what its process holds, and nothing else.
"""
