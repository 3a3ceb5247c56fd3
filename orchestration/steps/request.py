"""One request to a model: which tools and which messages it carries, the shorter view of a conversation that has grown too long,
and what the answer cost."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from orchestration.core.accounts import needs_price
from orchestration.core.agent import Agent
from orchestration.core.catalogue import Catalogue, catalogue_of, of_wishes
from orchestration.core.compaction import View, after_overflow, checked, due, overflow_part, size_of, trimmed
from orchestration.core.conversation import Entry
from orchestration.core.errors import CompactionError, Fenced, Misconfigured, ModelError
from orchestration.core.frames import FrameKind, frame
from orchestration.core.limits import NOTHING, Spent, price_of
from orchestration.core.local_calls import loaded_so_far
from orchestration.core.model import Message, Model, ModelFault, ModelReply
from orchestration.core.round import is_closing
from orchestration.core.safe_json import clean
from orchestration.core.tool import Discover, ToolSpec, attached_tools, demanded, owned
from orchestration.core.turn import TurnRequest
from orchestration.models.calling import call_model
from orchestration.models.loop_thread import loop_thread
from orchestration.models.metering import metered
from orchestration.state.journal import Claim, TurnSoFar
from orchestration.steps.token_frames import TokenFrames
from orchestration.wiring import Ports

log = logging.getLogger("turnmill.steps")


def model_of(agent: Agent, request: TurnRequest) -> Model:
    """The model to be asked. What a submission chose is for the agent that it was addressed to; another one may not know it."""
    known = request.agent == agent.name or request.model in agent.models
    return agent.model_named(request.model if known else "")


def round_catalogue(
    agent: Agent, request: TurnRequest, ports: Ports, round_: int, entries: Sequence[Entry] = (), *, sure: bool = False
) -> Catalogue:
    """The round's tools: the agent's own, those that discovery finds now, those attached to this turn. With deferred loading, the
    log's `entries` tell which of them the conversation has loaded.

    Raises:
        CatalogueError: two tools would have one name.
        MeshUnavailable: `sure` was wanted, and what the mesh has is not known yet.
    """
    described = {name: other.description for name, other in ports.project.agents.items()}
    if is_closing(agent, agent.limits, round_):
        return catalogue_of(agent, (), closing=True)
    attached = attached_tools(request.tools)
    wishes = [*agent.discoveries(), *(Discover((spec.prefix,)) for spec in (*agent.of_others(), *attached))]
    found = ports.mesh.discover(wishes, sure=sure) if wishes else []
    owners = {spec.prefix: spec for spec in found}
    declared = [_described(demanded(spec, owners.get(spec.prefix)), described) for spec in agent.known_tools()]
    declared += [owned(spec, owners.get(spec.prefix)) for spec in attached]
    loaded = loaded_so_far(entries) if agent.tool_loading == "deferred" else ()
    return catalogue_of(agent, declared, of_wishes(agent.discoveries(), found), loaded=loaded, described=described)


def _described(spec: ToolSpec, described: dict[str, str]) -> ToolSpec:
    if not spec.agent or spec.description:
        return spec
    return replace(spec, description=described.get(spec.agent) or f"Ask the agent {spec.agent}.")


def compact_when_due(claim: Claim, turn: TurnSoFar, agent: Agent, ports: Ports) -> TurnSoFar:
    """The turn with a shorter view of its conversation, where a compaction is due.

    Raises:
        ModelError: the compactor asked a model, which did not answer.
        CompactionError: the compactor returned what cannot be sent.
        Fenced: the step is no longer ours.
    """
    upto = due(
        turn.entries,
        turn.view,
        compact_after=agent.compact_after,
        keep_rounds=agent.keep_recent_rounds,
        last_input_tokens=turn.last_input_tokens,
    )
    return _compact(claim, turn, agent, ports, upto) if upto else turn


def ask(
    claim: Claim, turn: TurnSoFar, agent: Agent, catalogue: Catalogue, ports: Ports, tokens: TokenFrames
) -> tuple[ModelReply, TurnSoFar]:
    """The model's reply, and the turn with the view of its conversation that the model was sent.

    When the model says that the messages are too long, they are made shorter and it is asked once more.

    Raises:
        ModelError: the model did not answer.
        CompactionError: the compactor returned what cannot be sent; the model was not asked.
        Fenced: the step is no longer ours.
    """
    try:
        return _complete(turn, agent, catalogue, tokens), turn
    except ModelError as error:
        if error.kind != ModelFault.CONTEXT_OVERFLOW:
            raise
    tokens.void()
    most = agent.limits.max_tool_result_chars
    before = size_of(turn.view.over(turn.entries, max_result_chars=most))
    upto = overflow_part(turn.entries, turn.view, agent.keep_recent_rounds)
    turn = _compact(
        claim, turn, agent, ports, upto, lambda view: after_overflow(turn.entries, view, size_before=before, max_result_chars=most)
    )
    return _complete(turn, agent, catalogue, tokens), turn


def _complete(turn: TurnSoFar, agent: Agent, catalogue: Catalogue, tokens: TokenFrames) -> ModelReply:
    system = agent.system_for(turn.request.brief)
    shown = trimmed(turn.view.over(turn.entries, max_result_chars=agent.limits.max_tool_result_chars), agent.max_history_messages)
    sent: list[Message] = [{"role": "system", "content": system}, *shown] if system else shown
    return call_model(model_of(agent, turn.request), sent, tools=list(catalogue.definitions) or None, sink=tokens)


def _compact(
    claim: Claim, turn: TurnSoFar, agent: Agent, ports: Ports, upto: int, then: Callable[[View], View] = lambda view: view
) -> TurnSoFar:
    """The turn with the view of the log up to entry `upto` that the agent's compactor makes, and `then` of it. The view is kept, and
    what models have used for it is counted, before anything is sent."""
    with metered() as replies:
        view = then(_compacted(turn, agent, upto))
    used = NOTHING
    for reply in replies:
        used += replace(_priced(reply, [reply.model], agent, turn.request, ports), rounds=0)  # no round of the turn
    _keep(claim, turn, view, ports, agent.limits.max_tool_result_chars, used)
    return replace(turn.with_spent(used), view=view, usage=sum((reply.usage for reply in replies), turn.usage))


def _compacted(turn: TurnSoFar, agent: Agent, upto: int) -> View:
    """The view of the log up to entry `upto` that the agent's compactor makes."""
    older = [*turn.view.messages, *turn.view.rest(turn.entries, upto, max_result_chars=agent.limits.max_tool_result_chars)]
    if not older:
        return turn.view
    compact: Any = getattr(agent.compactor, "compact", agent.compactor)
    try:
        made = compact(cast("list[Message]", clean(older)))  # a copy: it may do with it what it likes
        if inspect.isawaitable(made):
            made = loop_thread.submit(made).result()
    except (ModelError, CompactionError):
        raise
    except Exception as error:
        raise CompactionError(f"the compactor raised {type(error).__name__}; nothing was sent") from error
    return View(upto, checked(made), turn.view.max_result_chars)


def _keep(claim: Claim, turn: TurnSoFar, view: View, ports: Ports, most: int | None, used: Spent) -> None:
    sizes = [size_of(one.over(turn.entries, max_result_chars=most)) for one in (turn.view, view)]
    told = frame(FrameKind.COMPACTED, claim.step.turn_id, claim.step.round, chars_before=sizes[0], chars_after=sizes[1])
    if not ports.journal.keep_view(claim, view, [told], spend_of(used)):
        raise Fenced(f"step {claim.step.task_id} was passed on, or its turn has ended")


def spend_of(used: Spent) -> dict[str, int]:
    """What a step used as the journal's scripts take it."""
    spend = {"in": used.input_tokens, "out": used.output_tokens, "cost": used.cost_micros, "tools": used.tool_calls, "asked": used.rounds}
    return {name: number for name, number in spend.items() if number}


def spent_on(reply: ModelReply, agent: Agent, request: TurnRequest, ports: Ports) -> Spent:
    """What one model call used.

    Raises:
        Misconfigured: the agent, or somebody above it, bounds the cost, and the settings have no price for the model.
    """
    return _priced(reply, _priced_names(agent, request, reply.model), agent, request, ports)


def _priced(reply: ModelReply, names: Sequence[str], agent: Agent, request: TurnRequest, ports: Ports) -> Spent:
    price = price_of(ports.settings.price_list, names)
    if price is None and needs_price(agent.limits, request):
        raise Misconfigured(
            f"the cost of agent {agent.name!r} is bounded, but TURNMILL_PRICES has no price for its model, so it is not asked"
        )
    usage = reply.usage
    return Spent(1, 0, usage.input_tokens, usage.output_tokens, price.cost_micros(usage) if price else 0)


def check_price(agent: Agent, request: TurnRequest, ports: Ports) -> None:
    """Refuse to ask a model whose cost is bounded and not known; raises Misconfigured as `spent_on` does.

    Of several models in a row the one that answers is known only afterwards."""
    model: Any = model_of(agent, request)
    if needs_price(agent.limits, request) and not getattr(model, "models", None):
        spent_on(ModelReply(), agent, request, ports)


def _priced_names(agent: Agent, request: TurnRequest, answered: str) -> Sequence[str]:
    model: Any = model_of(agent, request)
    names = (answered, request.model, getattr(model, "model", ""))
    return [name for name in names if isinstance(name, str) and name]
