"""Where else a run is shown: its tracker, as far as its spec or its logs name one, and Ray."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from tasks.show.view import RunView
from tasks.spec.run import RunSpec

_WANDB = "https://wandb.ai"
#: How much of the beginning of a log is looked at for an address that a tracker prints there.
_LOOKED_AT_BYTES = 262_144
#: `wandb: 🚀 View run at https://wandb.ai/team/project/runs/abc`, `View run NAME at: URL`.
_PRINTED = re.compile(r"View run\b[^\n]{0,200}?(https?://[^\s\x1b]+/runs/[^\s\x1b]+)")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
#: Overrides of verl, and of what is configured like it.
_OVERRIDE = re.compile(r"^\+{0,2}trainer\.(logger|project_name|experiment_name)=(.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Somewhere to look."""

    name: str
    #: Empty where only the name is known.
    url: str
    #: Of what is there: `project muster, run abc`.
    what: str = ""


def places_of(view: RunView) -> tuple[Place, ...]:
    """In the order of how much they show of a run."""
    found = [*_trackers(view.spec, [*_logs(view)]), *_ray(view)]
    return tuple(dict.fromkeys(found))


def _trackers(spec: RunSpec, logs: list[Path]) -> Iterator[Place]:
    for name in spec.components:
        env = _env(spec, name)
        component = spec.processes.get(name)
        settings = _settings(component.command if component else ())
        has_wandb = "wandb" in settings.get("logger", "") or "WANDB_PROJECT" in env
        if has_wandb and env.get("WANDB_MODE") not in ("disabled", "offline"):
            yield _wandb(env, settings, logs)
        if (uri := env.get("MLFLOW_TRACKING_URI", "")).startswith(("http://", "https://")):
            experiment = env.get("MLFLOW_EXPERIMENT_NAME", "")
            what = f"experiment {experiment}" if experiment else ""
            yield Place(name="MLflow", url=_without_user(uri), what=what)


def _wandb(env: Mapping[str, str], settings: Mapping[str, str], logs: list[Path]) -> Place:
    project = env.get("WANDB_PROJECT") or settings.get("project_name", "")
    entity, run_id = env.get("WANDB_ENTITY", ""), env.get("WANDB_RUN_ID", "")
    name = env.get("WANDB_NAME") or settings.get("experiment_name", "") or run_id
    named = [("project", project), ("run", name)]
    what = ", ".join(f"{kind} {value}" for kind, value in named if value)
    base = env.get("WANDB_BASE_URL", _WANDB).rstrip("/")
    # What is asked there is answered for people here.
    base = _WANDB if base == "https://api.wandb.ai" else _without_user(base)
    # Who the entity is by default, only the tracker knows; it prints the address.
    if printed := next(filter(None, map(_printed_in, logs)), ""):
        url = printed
    elif entity and project:
        url = f"{base}/{quote(entity, safe='')}/{quote(project, safe='')}"
        url += f"/runs/{quote(run_id, safe='')}" if run_id else ""
    else:
        url = base
    return Place(name="Weights & Biases", url=url, what=what)


def _ray(view: RunView) -> Iterator[Place]:
    if view.spec.ray is None:
        return
    address = _without_user(view.spec.ray.address.rstrip("/"))
    ray = view.attempt["ray"] if view.attempt else {}
    jobs = [job for job in (ray, *(ray.get("others") or {}).values()) if job.get("submission_id")]
    for job in jobs:
        id = job["submission_id"]
        yield Place(name="Ray dashboard", url=f"{address}/#/jobs/{quote(id)}", what=f"job {id}")
    if not jobs:
        yield Place(name="Ray dashboard", url=address)


def _logs(view: RunView) -> Iterator[Path]:
    for name in reversed([*view.spec.components]):
        if (log := view.log(name)) is not None:
            yield log


def _printed_in(log: Path) -> str:
    try:
        with log.open("rb") as f:
            said = f.read(_LOOKED_AT_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    found = _PRINTED.search(_COLORS.sub("", said))
    return found[1].rstrip(".,)") if found else ""


def _env(spec: RunSpec, name: str) -> dict[str, str]:
    return {**spec.env, **spec.components[name].env}


def _settings(command: tuple[str, ...]) -> dict[str, str]:
    found = (_OVERRIDE.match(word) for word in command)
    return {match[1]: match[2].strip("'\"") for match in found if match}


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
