"""What ``doctor`` looks at, one module each: hosts, permissions, the broker, queues. Each gives a list of findings.

Invariants:

- A check changes nothing on the broker: no queue, no message, no delivery count.
- What cannot be seen is reported as not checked, with what to do about it; nothing is guessed.
- No text of a finding holds a password.
"""
