"""Webhooks as their users declare them, one service a file; `TURNMILL_AGENTS=examples.webhooks.sms` runs one."""
