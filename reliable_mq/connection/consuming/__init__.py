"""What the consumers of both faces share: the subscription, which carries out what the session decides, and outlets."""
