"""The top-level module ``pyspark_reliable_mq`` of the wheel.

Spark imports every module that is called ``pyspark_*`` and registers its ``DefaultSource``. An error in it would
break all of the session's data sources, so an unfit PySpark leaves a warning instead.
"""

from __future__ import annotations

import warnings

from reliable_mq.errors import UsageError
from reliable_mq.spark import check_version

try:
    check_version()
except UsageError as error:
    warnings.warn(str(error), stacklevel=2)
else:
    from reliable_mq.spark.datasource import RabbitMQDataSource as DefaultSource

    __all__ = ["DefaultSource"]
