"""The console: one static page for people who decide approvals and look at turns. It talks to the same API as everybody."""
