"""Programs that tests run in separate processes."""

from tests.new_queues import treat_new_queues_as_old

treat_new_queues_as_old()
