"""The image of a broker that is started without an image name."""

from __future__ import annotations

import pytest

from reliable_mq.testing import rabbitmq
from reliable_mq.testing.rabbitmq import RabbitMQ, default_image

OWN, OFFICIAL = "reliable-mq/rabbitmq:newest", "rabbitmq:4-management"


@pytest.mark.parametrize(("there", "taken"), [({OWN, OFFICIAL}, OWN), ({OFFICIAL}, OFFICIAL), (set(), OFFICIAL)])
def test_the_official_image_is_taken_where_docker_has_no_own_one(
    there: set[str], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rabbitmq, "has_image", there.__contains__)

    assert default_image() == taken
    assert RabbitMQ().image == taken
    assert RabbitMQ("another").image == "another"
