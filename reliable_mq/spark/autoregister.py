"""The top-level module ``pyspark_reliable_mq`` of the wheel.

Spark imports every module named ``pyspark_*`` and registers its ``DefaultSource``. An error in this module would break
all data sources of the session, so an unsupported PySpark or a missing PyArrow only causes a warning.
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
except ImportError as error:  # an old Spark may have no metadata for the version check
    warnings.warn(
        f"format('rabbitmq') is not registered: {error}; pip install 'reliable-mq[spark]' there", stacklevel=2
    )
else:
    __all__ = ["DefaultSource"]
