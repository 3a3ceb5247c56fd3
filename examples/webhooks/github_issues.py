"""New issues of a GitHub repository go to an agent, and its answer becomes a comment.

In the repository's settings add a webhook for issues: `https://…/v1/webhooks/github`, content type application/json, a secret. That secret
goes into `GITHUB_WEBHOOK_SECRET`, a token that may write issues into `GITHUB_TOKEN`.
"""

from __future__ import annotations

import os
from typing import Any

import httpx

from orchestration import Agent, GitHubWebhooks, OpenAIChatModel, Webhook, WebhookAnswer, WebhookRequest

triage = Agent(
    "triage",
    OpenAIChatModel(os.environ.get("TURNMILL_DEMO_MODEL", "gpt-4o-mini"), api_key_env="OPENAI_API_KEY"),
    system="You read a new issue and answer with what is missing in it, if anything is. Be brief and kind.",
)


def to_turn(request: WebhookRequest) -> dict[str, Any] | None:
    """A turn for each issue that was opened, one conversation an issue."""
    if request.headers.get("x-github-event") != "issues" or request.json["action"] != "opened":
        return None
    issue, repository = request.json["issue"], request.json["repository"]["full_name"]
    return {
        "conversation_id": f"{repository}#{issue['number']}",
        "input": f"{issue['title']}\n\n{issue['body'] or ''}",
        "metadata": {"repository": repository, "number": issue["number"]},
    }


def comment(answer: WebhookAnswer) -> None:
    """Comment on the issue; raising has it tried again later."""
    if not answer.answer:
        return
    place = f"/repos/{answer.metadata['repository']}/issues/{answer.metadata['number']}/comments"
    url = os.environ.get("GITHUB_API_URL", "https://api.github.com") + place
    headers = {"Authorization": f"Bearer {os.environ['GITHUB_TOKEN']}", "Accept": "application/vnd.github+json"}
    httpx.post(url, json={"body": answer.answer}, headers=headers, timeout=20).raise_for_status()


github = Webhook(
    "github",
    agent="triage",
    scheme=GitHubWebhooks("GITHUB_WEBHOOK_SECRET"),
    principal="github",
    tenant="shop",
    to_turn=to_turn,
    on_answer=comment,
)
