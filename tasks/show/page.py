"""What one reads first of a run: what it does, or what it died of and what follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.show.elsewhere import places_of
from tasks.show.failure import card_of, facts_of, remedy_of
from tasks.show.markdown import block, code, link, text
from tasks.show.view import RunView, Shown, moment, seconds

#: Of a log.
_LINES = 12
#: Of a message, on a card.
_CARD_LINES = 5
#: A line so short stands beside the state: older pages show the first one only.
_BESIDE = 40


def summary_of(view: RunView) -> Shown:
    """The story so far."""
    said, why = _state(view)
    # Why it failed stands below, among the other answers.
    failed = _failed(view)
    parts = [f"### {_title(said)}"]
    if why and failed is None:
        parts.append(block(why) if "\n" in why else text(why))
    if said == "failed" and failed is None and (remedy := remedy_of(why)):
        parts.append(f"**What to do**: {text(remedy)}")
    parts.append("\n".join(_facts(view)))
    if failed is not None:
        parts += _failure(view, failed)
    if places := places_of(view):
        parts.append("**Elsewhere**")
        parts.append(
            "\n".join(
                f"- {link(one.name, one.url) if one.url else text(one.name)}"
                + (f": {text(one.what)}" if one.what else "")
                for one in places
            )
        )
    parts.append(f"As of {moment(view.at)}.")
    return Shown(headline=_headline(view, said, why), data="\n\n".join(filter(None, parts)))


def _state(view: RunView) -> tuple[str, str]:
    """The state in a word, and what is to be said of it in a line."""
    failed = _failed(view)
    why = f"{failed['failure']['kind']}: {failed['failure']['message']}" if failed else ""
    match view.state:
        case "failed":
            return "failed", why or view.message
        case "completed" | "cancelled":
            return view.state, view.message
        case "pending_resources":
            return "waiting", view.doing.removeprefix("waiting: ") or "for its gang of GPUs"
        case "queued" | "admitted":
            return "about to start", view.doing
        case _:
            return view.state, view.doing.removeprefix(f"{view.state}: ")


def _title(said: str) -> str:
    return said[:1].upper() + said[1:]


def _headline(view: RunView, said: str, why: str) -> str:
    failed = _failed(view)
    lines = [f"**{said}**"]
    if failed is None:
        first, *more = why.splitlines()[:_CARD_LINES] or [""]
        if len(first) <= _BESIDE:
            lines[0] += f": {text(first)}" if first else ""
        else:
            more = [first, *more]
        lines += map(text, more)
    else:
        lines[0] += f": {text(failed['failure']['kind'])}"
        lines += map(text, card_of(failed))
    if step := _step(view):
        lines.append("" if step == why else text(step))
    return "\n\n".join(filter(None, lines))


def _step(view: RunView) -> str:
    progress = view.spec.progress
    if view.step is None or progress is None:
        return ""
    return f"step {view.step:g}{f' of {progress.total}' if progress.total else ''}"


def _facts(view: RunView) -> Iterator[str]:
    record, attempt = view.record, view.attempt
    began, ended = record.get("started_at"), record.get("ended_at")
    if began:
        lasts = seconds((ended or view.at) - began)
        yield f"- **Since**: {moment(began)}, {lasts}{'' if ended else ' by now'}"
    if attempt is not None:
        count = len(view.attempts)
        earlier = f", after {count - 1} that failed" if count > 1 else ""
        started_from = attempt.get("resume_from")
        resumed = f", from {code(started_from)}" if started_from else ""
        yield f"- **Attempt**: {attempt['number']}{earlier}{resumed}"
    if step := _step(view):
        yield f"- **Progress**: {text(step)}"
    yield f"- **Record**: {code(view.place.record)}"


def _failed(view: RunView) -> Mapping[str, Any] | None:
    """The last attempt, where it failed and nothing else has begun since."""
    attempt = view.attempt
    return attempt if attempt is not None and attempt["failure"] else None


def _failure(view: RunView, attempt: Mapping[str, Any]) -> Iterator[str]:
    many = len(view.attempts) > 1
    yield f"**What went wrong in attempt {attempt['number']}**" if many else "**What went wrong**"
    yield "\n".join(
        f"- **{_title(fact.asked)}**: {code(fact.said) if fact.is_code else text(fact.said)}"
        for fact in facts_of(view.place, attempt)
    )
    failure = attempt["failure"]
    if tail := failure.get("log_tail"):
        yield f"The last lines of {text(failure['component'] or 'the log')}:"
        yield block("\n".join(tail.splitlines()[-_LINES:]))
