"""The contenders, one module for each way to publish or to consume.

A module defines ``CONTENDERS``, and may define ``BARS``, the limits for its contenders. It runs as a program,
``python -m integration.bench.contenders.<module> <contender> <options of Job>``, in a fresh interpreter, so that the
process loads only the module's own imports.
"""
