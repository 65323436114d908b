"""``python -m reliable_mq.cli``: the same as ``reliable-mq``."""

from __future__ import annotations

import sys

from reliable_mq.cli import main

sys.exit(main())
