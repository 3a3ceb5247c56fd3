"""Telling the outside: signed calls to a turn's `callback_url`, and functions of the user's module. Each delivery is tried until it arrives
or its day is over; when, is kept in Redis (`state/outbound.py`)."""
