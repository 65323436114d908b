"""Programs that tests run as processes of their own."""

from tests.new_queues import treat_new_queues_as_old

treat_new_queues_as_old()
