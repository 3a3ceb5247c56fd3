"""Webhooks in: signed requests of other services that become turns; a file per signature scheme."""
