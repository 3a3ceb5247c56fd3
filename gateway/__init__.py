"""The ASGI gateway: turns, approvals, conversations and webhooks over HTTP. It keeps no state; any gateway serves any turn."""
