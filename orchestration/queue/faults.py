"""What a broker that is away looks like from here, whatever Celery and kombu raise for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kombu.exceptions import KombuError, OperationalError

from orchestration.core.errors import StoreUnavailable
from orchestration.state.store import translated

#: What Celery and kombu raise themselves.
BROKER_ERRORS = (KombuError, OperationalError, OSError)


@contextmanager
def broker_translated() -> Iterator[None]:
    """The broker's faults as StoreUnavailable."""
    try:
        with translated():
            yield
    except BROKER_ERRORS as error:
        raise StoreUnavailable(f"the broker does not answer ({type(error).__name__})") from error
    except AttributeError as error:
        # A channel whose connection broke is closed, and may be used once more: it finds None where its connection was.
        if not _is_kombus(error):
            raise
        raise StoreUnavailable("the broker does not answer (its channel was closed)") from error


def _is_kombus(error: BaseException) -> bool:
    """Whether it was raised within kombu, not by what it was given."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and str(place.tb_frame.f_globals.get("__name__", "")).startswith("kombu.")
