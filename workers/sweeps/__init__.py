"""Looks for what was left behind: one thread of every worker that consumes `control`, one leader among them at a time."""
