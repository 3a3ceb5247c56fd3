"""When one model cannot answer the next does, and nobody ever sees two beginnings glued together."""

from __future__ import annotations

import pytest

from orchestration.core.errors import Misconfigured, ModelError
from orchestration.core.model import Delta
from orchestration.models import Failover, ScriptedModel, Step, call_model

USER = {"role": "user", "content": "hi"}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def failing(kind: str, *, retryable: bool = True, retry_after_s: float | None = None, name: str = "first", text: str = "") -> ScriptedModel:
    error = ModelError(kind, f"{name}: {kind}", retryable=retryable, retry_after_s=retry_after_s)
    return ScriptedModel([Step(text, error=error)], model=name, repeat_last=True)


def answering(name: str = "second") -> ScriptedModel:
    return ScriptedModel(["answer"], model=name, repeat_last=True)


@pytest.mark.parametrize("kind", ["unavailable", "rate_limited", "quota", "auth", "protocol", "truncated"])
def test_the_next_answers_when_one_cannot(kind: str) -> None:
    shown: list[Delta] = []
    assert Failover(failing(kind), answering()).complete([USER], sink=shown.append).content == "answer"
    assert shown == [Delta(text="answer")]


@pytest.mark.parametrize("kind", ["context_overflow", "content_filtered", "bad_request"])
def test_a_fault_of_the_request_is_nobody_elses(kind: str) -> None:
    second = answering()
    with pytest.raises(ModelError) as caught:
        Failover(failing(kind, retryable=False), second).complete([USER])
    assert (caught.value.kind, caught.value.retryable, second.asked) == (kind, False, 0)


def test_after_pieces_were_shown_the_error_goes_up_and_the_next_attempt_is_the_nexts() -> None:
    shown: list[Delta] = []
    first, second = failing("quota", retryable=False, text="half an ans"), answering()
    model = Failover(first, second)
    with pytest.raises(ModelError) as caught:
        model.complete([USER], sink=shown.append)
    assert (caught.value.kind, caught.value.retryable) == ("quota", True)
    assert (shown, second.asked) == ([Delta(text="half an ans")], 0)
    assert model.complete([USER], sink=shown.append).content == "answer"
    assert first.asked == 1


def test_a_failed_model_rests_and_comes_back() -> None:
    clock = Clock()
    first, second = ScriptedModel([Step(error="unavailable"), "back"], model="first"), answering()
    model = Failover(first, second, rest_s=30, clock=clock)
    assert [model.complete([USER]).content for _ in range(3)] == ["answer"] * 3
    assert first.asked == 1
    clock.now += 31
    assert model.complete([USER]).content == "back"


def test_a_pause_that_was_asked_for_is_kept() -> None:
    clock = Clock()
    first = failing("rate_limited", retry_after_s=300)
    model = Failover(first, answering(), rest_s=1, clock=clock)
    model.complete([USER])
    clock.now += 299
    model.complete([USER])
    assert first.asked == 1


def test_all_failing_says_who_and_why_and_when_to_ask_again() -> None:
    model = Failover(
        failing("rate_limited", retry_after_s=9),
        failing("auth", retryable=False, name="second"),
        failing("rate_limited", retry_after_s=4, name="third"),
    )
    with pytest.raises(ModelError) as caught:
        model.complete([USER])
    assert (caught.value.retryable, caught.value.retry_after_s) == (True, 4)
    assert "first: rate_limited; second: auth; third: rate_limited" in str(caught.value)
    with pytest.raises(ModelError) as caught:
        Failover(failing("auth", retryable=False), failing("quota", retryable=False, name="second")).complete([USER])
    assert not caught.value.retryable


def test_all_are_asked_again_while_all_rest() -> None:
    model = Failover(failing("unavailable"), ScriptedModel([Step(error="unavailable"), "back"], model="second"))
    with pytest.raises(ModelError):
        model.complete([USER])
    assert model.complete([USER]).content == "back"


def test_what_the_sink_raises_is_no_fault_of_a_model() -> None:
    def stop(_: Delta) -> None:
        raise KeyError("stop")

    first, second = answering("first"), answering()
    with pytest.raises(KeyError):
        call_model(Failover(first, second), [USER], sink=stop)
    assert second.asked == 0


def test_it_is_named_after_its_models_and_needs_some() -> None:
    assert Failover(answering("a"), answering("b")).model == "a > b"
    with pytest.raises(Misconfigured):
        Failover()
    with pytest.raises(Misconfigured):
        Failover("gpt")  # type: ignore[arg-type]
