"""The top-level module ``pyspark_reliable_mq`` of the wheel.

Spark imports every module that is called ``pyspark_*`` and registers its ``DefaultSource``. An error in it would
break all of the session's data sources, so an unfit PySpark, or a missing PyArrow, leaves a warning instead.
"""

from __future__ import annotations

import warnings

from reliable_mq.errors import UsageError
from reliable_mq.spark import check_version

try:
    check_version()
    from reliable_mq.spark.datasource import RabbitMQDataSource as DefaultSource
except UsageError as error:
    warnings.warn(str(error), stacklevel=2)
except ImportError as error:  # a Spark that is too old may have no metadata to tell
    warnings.warn(
        f"format('rabbitmq') is not registered: {error}; pip install 'reliable-mq[spark]' there", stacklevel=2
    )
else:
    __all__ = ["DefaultSource"]
