"""Events about Prefect assets: the data that a run reads, and the checkpoints that it makes.

Prefect emits these events for a task with the decorator `@materialize`. Muster does not use the
decorator. It needs the keys of the assets before the task starts, but the checkpoints of a training
are known only when they are complete. Also, a task emits its events when it ends, and a training
must show its checkpoints while it runs.

So Muster builds the same events from `prefect.assets.Asset`, and sends them with its own
`Announcer`. Prefect's function `emit_event` could delay the end of the process; see `events.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid5

from prefect.assets import Asset, AssetProperties
from prefect.client.schemas.objects import FlowRun
from prefect.context import AssetContext
from prefect.events.schemas.events import Event, RelatedResource, Resource
from prefect.types.names import MAX_ASSET_KEY_LENGTH, RESTRICTED_ASSET_CHARACTERS

from tasks.record.lineage import Lineage, LineageOutput
from tasks.spec.checkpoint_urls import is_url, split_url

#: Name of the event about data that a run reads.
REFERENCED = "prefect.asset.referenced"
#: Name of the event about data that a run has made.
MATERIALIZED = "prefect.asset.materialization.succeeded"
#: Largest number of inputs in one event. The server accepts 100 related resources by default.
_MAX_INPUTS = 50
#: Length, in characters, of the hash in an asset key. A key contains a hash only if the path or URI
#: of the asset had to be changed, because Prefect does not accept every text as a key.
_HASH_LENGTH = 12
_RESTRICTED = re.compile(f"[{re.escape(''.join(RESTRICTED_ASSET_CHARACTERS))}]")


def make_asset_key(uri: str) -> str:
    """Return the key of the asset that stands for a path, a URI or the name of a data set.

    A path has the same key on all hosts, because hosts may share it through a network file system.
    Characters that Prefect does not accept are replaced, and a hash of the URI then makes the key
    unique.

    Args:
        uri: Absolute path, URI, or name of a data set such as `openai/gsm8k`.
    """
    if is_url(uri):
        protocol, path = split_url(uri)
        plain_protocol = re.sub(r"[^a-z0-9]", "", protocol.lower()) or "uri"
        is_changed = plain_protocol != protocol
    else:
        plain_protocol = "file" if uri.startswith("/") else "data"
        path = uri.rstrip("/")
        is_changed = False
    plain_path = _RESTRICTED.sub("_", path)
    key = f"{plain_protocol}://{plain_path}"
    if not is_changed and plain_path == path and len(key) <= MAX_ASSET_KEY_LENGTH:
        return key
    digest = hashlib.sha256(uri.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{key[: MAX_ASSET_KEY_LENGTH - _HASH_LENGTH - 1]}~{digest}"


def list_asset_events(
    flow_run: FlowRun, lineage: Lineage, outputs: Iterable[LineageOutput], *, with_inputs: bool
) -> Iterator[Event]:
    """Yield the Prefect asset events about the data that a run reads and makes.

    The id of an event depends only on the run and the data. So the server stores an event only
    once, even if two processes of the run send the same event.

    Args:
        flow_run: The flow run of the run.
        lineage: The lineage of the run, in which secrets are masked.
        outputs: The outputs of the lineage for which an event is needed.
        with_inputs: True to yield an event for each input, too.
    """
    inputs = lineage.inputs[:_MAX_INPUTS]
    if with_inputs:
        for data in inputs:
            asset = _make_asset(data.uri, data.uri)
            source = {"kind": data.kind.value, "uri": data.uri, "made_by": data.run}
            yield _make_event(REFERENCED, asset, flow_run, lineage, source)
    for output in outputs:
        sources = [data.uri for data in inputs]
        sources += [one.uri for one in lineage.resumes if one.attempt == output.attempt]
        payload = {
            "kind": output.kind.value,
            "uri": output.path or output.uri,
            "step": output.step,
            "attempt": output.attempt,
            "figures": dict(output.figures),
            "inputs": sources,
        }
        asset = _make_asset(output.uri, _describe_output(output, lineage.run_id))
        yield _make_event(
            MATERIALIZED,
            asset,
            flow_run,
            lineage,
            payload,
            sources=sources,
            at=output.at,
            version=output.signature,
        )


def _describe_output(output: LineageOutput, run_id: str) -> str:
    """Return the display name of an output, such as `checkpoint of step 20 of RUN`."""
    step = f" of step {output.step:g}" if output.step is not None else ""
    return f"{output.kind.value}{step} of {run_id}"


def _make_asset(uri: str, name: str) -> Asset:
    return Asset(key=make_asset_key(uri), properties=AssetProperties(name=name))


def _make_event(
    name: str,
    asset: Asset,
    flow_run: FlowRun,
    lineage: Lineage,
    payload: dict[str, Any],
    *,
    sources: Iterable[str] = (),
    at: float | None = None,
    version: str = "",
) -> Event:
    """Return an event about an asset, with the same resources as the events of Prefect's tasks.

    Args:
        name: Name of the event.
        asset: The asset.
        flow_run: The flow run, which becomes a related resource.
        lineage: The lineage of the run.
        payload: Content of the event in addition to the run and its workload.
        sources: URIs of the data from which the asset was made.
        at: Time of the event in UTC epoch seconds. If None, the current time is used.
        version: Text that is different for each version of the asset.
    """
    related = [
        AssetContext.asset_as_related(Asset(key=key))
        for key in dict.fromkeys(map(make_asset_key, sources))
        if key != asset.key
    ]
    if name == MATERIALIZED:
        related.append(AssetContext.related_materialized_by("muster"))
    related.append(
        {
            "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
            "prefect.resource.role": "flow-run",
            "prefect.resource.name": lineage.run_id,
        }
    )
    occurred = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    return Event(
        id=uuid5(flow_run.id, f"{name} {asset.key} {version}"),
        event=name,
        occurred=occurred,
        resource=Resource(AssetContext.asset_as_resource(asset)),
        related=[RelatedResource(labels) for labels in related],
        payload={"run_id": lineage.run_id, "workload": lineage.workload, **payload},
    )
