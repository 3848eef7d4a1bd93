"""Tests that foreign text in artifacts becomes no link, image, HTML or formatting in Prefect's UI.

Pages and descriptions are Markdown. The older UI also renders each cell of a table as Markdown.
Both UIs turn bare web addresses into links, but the library MarkdownIt does not. The tests
therefore search the rendered HTML, outside of code, for bare addresses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from tasks.queue.packing import Demand
from tasks.queue.scheduling_pass import QueuedRun, QueueView
from tasks.queue.settings import FaultyNode
from tasks.queue.tables import tables_of
from tasks.ray.usage import ClusterNode
from tasks.record.events import Event
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.server import artifacts as artifacts_module
from tasks.show import page
from tasks.show.markdown import escape_cell, escape_markdown
from tasks.show.pictures import Figures, show_timeline
from tasks.show.run_view import ObservedRun, RunView, Shown
from tasks.show.slow import Measured, Slow
from tasks.spec.run import RunSpec
from tasks.upkeep.preflight import Finding, NodeResult, PreflightVerdict
from tasks.upkeep.report import Report, RunReport

HOSTILE = {
    "image": "![x](http://evil.example/x.png)",
    "image by reference": "![x][y]\n\n[y]: http://evil.example/x.png",
    "link": "[a](javascript:alert(1)) [b](http://evil.example)",
    "tag": "<img src=http://evil.example/x.png onerror=alert(1)><a href='javascript:alert(1)'>c",
    "autolinks": "http://evil.example, HTTPS://evil.example/x. www.evil.example; me@evil.example",
    "autolink in brackets": "<http://evil.example> <me@evil.example>",
    "backticks": "` `` ``` a`b http://evil.example`c ![x](http://evil.example)``",
    "pipes": "a|b|![x](http://evil.example)|\n|---|---|\n|c|",
    "heading and fence": "# big\n```\n![x](http://evil.example)\n~~~\n> quote",
    "formatting": "*a* **b** _c_ __d__ ~~e~~ \\*f\\* \\![x](http://evil.example)",
    "entities": "&lt;img src=x&gt; &#60;img&#62; &#104;ttp://evil.example",
    "nested": "[![x](http://evil.example/x.png)](http://evil.example) [x]: http://evil.example",
}
_TAGS = re.compile(r"<(/?)(\w+)([^>]*)>")
_CODE = re.compile(r"<code.*?</code>", re.DOTALL)
#: Matches a bare address, such as `http://evil.example`. Both of Prefect's UIs turn bare addresses
#: into links.
_BARE = re.compile(r"(?i)(https?://|ftp://|www\.)\w|[-.\w+]+@[-\w]+\.\w")


def rendered(markdown: str) -> str:
    """Return the HTML of a Markdown text."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown)


def dangers_in(markdown: str) -> list[str]:
    """Return the dangerous HTML tags and the addresses that become links in a Markdown page."""
    html = rendered(markdown)
    # Ignore Muster's own pictures. They are data URLs, so they load nothing from another server.
    html = re.sub(r'<img src="data:image/svg\+xml;base64,[^"]*"', "<p", html)
    tags = [name for _, name, _ in _TAGS.findall(html) if name in ("a", "img", "script", "iframe")]
    return tags + [address.group() for address in _BARE.finditer(_CODE.sub("", html))]


def dangers_in_cell(text: str) -> list[str]:
    """Return the HTML tags, formats and links that a text would create in a cell of a table.

    Prefect's older UI searches the Markdown source of a cell for addresses, and turns each address
    into a link. So this function searches the Markdown source, too.
    """
    formats = (
        "a",
        "img",
        "script",
        "em",
        "strong",
        "s",
        "code",
        "pre",
        "table",
        "h1",
        "blockquote",
    )
    tags = [name for _, name, _ in _TAGS.findall(rendered(text)) if name in formats]
    return tags + [address.group() for address in _BARE.finditer(text)]


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE)
def hostile(request: pytest.FixtureRequest) -> str:
    """Return one of the hostile texts. A test with this fixture runs once for each text."""
    return str(request.param)


@pytest.fixture
def view(hostile: str, tmp_path: Path) -> RunView:
    """A failed run with hostile text in each field that a program or a person can write."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "reward": 1.0}\n')
    # The key of a metric must not have spaces or empty parts between dots.
    key = "".join(hostile.split()).replace(".", "")
    spec = RunSpec.model_validate(
        {
            "name": "x",
            "workload": "grpo",
            "components": {"trainer": {"command": ["true"]}},
            "progress": {"jsonl": str(metrics), "step": key, "total": 60},
        }
    )
    failure = {
        "kind": "RUNTIME_ERROR",
        "component": "trainer",
        "signal": hostile,
        "message": hostile,
        "line": hostile,
        "hint": hostile,
        "log_tail": f"{hostile}\n```\n{hostile}",
    }
    job = {"submission_id": hostile, "nodes": [hostile], "status": hostile}
    attempt = {
        "number": 1,
        "state": "failed",
        "failure": failure,
        "components": {"trainer": {"started_at": 1.0, "ended_at": 2.0, "signal": hostile}},
        "ray": {"trainer": job},
        "host": hostile,
        "resume_from": hostile,
        "decision": f"final: {hostile}",
        "alarms": [{"rule": "nan", "message": hostile}],
    }
    record = {"run_id": hostile, "state": "failed", "message": hostile, "attempts": [attempt]}
    run_seen = ObservedRun(spec)
    run_seen.doing = hostile
    fields = {"reason": hostile}
    run_seen.observe(Event(at=0.0, name="probe.failed", component="trainer", fields=fields))
    run_seen.observe(Event(at=0.0, name="run.progress", fields={"step": 7.0}))
    started = {"rank": 0, "epoch": 1, "url": hostile}
    run_seen.observe(Event(at=0.0, name="rollout.server.started", fields=started))
    measured = Measured(now=1.0, before=2.0)
    return RunView(
        at=10.0,
        spec=spec,
        record=RunJson.model_validate(record),
        place=RunPlace(directory=tmp_path / "x-1"),
        seen=run_seen,
        host=hostile,
        message=hostile,
        slow=Slow(step=measured, parts={hostile: measured}, gpus={hostile: measured}, requests={}),
    )


def curve_of(view: RunView) -> Shown | None:
    """Return the artifact with the curve of the run's metrics, or None if there is no curve."""
    assert view.spec.progress is not None and view.spec.progress.jsonl is not None
    figures = Figures(Path(view.spec.progress.jsonl), "step")
    figures.read_new()
    return page.show_curve(view, figures)


PAGES = (
    page.show_summary,
    page.show_components,
    page.show_time,
    page.show_progress,
    page.show_attempts,
    page.show_record,
    show_timeline,
    curve_of,
)


@pytest.mark.parametrize("make_page", PAGES, ids=lambda make_page: make_page.__name__)
def test_pages_of_a_run_contain_no_foreign_markup(
    make_page: Callable[[RunView], Shown | None], view: RunView
) -> None:
    shown = make_page(view)

    assert shown is not None
    assert_harmless(shown)


def assert_harmless(shown: Shown) -> None:
    """Check that an artifact of Prefect shows hostile text only as text, not as markup."""
    assert dangers_in(shown.headline) == []
    if shown.type == "markdown":
        assert dangers_in(str(shown.data)) == []
    if shown.type == "table":
        for row in json.loads(str(shown.data)):
            for name, cell in row.items():
                assert name.replace(" ", "").isalnum()
                assert not isinstance(cell, str) or dangers_in_cell(cell) == []


def test_tables_of_the_queue_contain_no_foreign_markup(hostile: str) -> None:
    run = QueuedRun(
        number=1,
        flow_run_id="id",
        name=hostile,
        demand=Demand(nodes=1, gpus_per_node=1, cpus_per_gpu=1),
        cluster=hostile,
        queue=hostile,
        waiting_since=0.0,
        reason=hostile,
        tags=(hostile,),
    )
    queue = QueueView(
        at=1.0,
        pool=hostile,
        policy="fifo",
        is_paused=False,
        paused_queues=(hostile,),
        limit=8,
        running=2,
        tags={hostile: (1, 2)},
        line=(run, run),
        nodes=(ClusterNode(name=hostile, gpus=8, held={hostile: 8}, is_drained=True),),
        faulty=(FaultyNode(node=hostile, reason=hostile, by=hostile, until=9.0),),
        troubles=(hostile,),
    )

    tables = tables_of(queue)

    assert len(tables) == 2
    for table in tables.values():
        assert_harmless(table)


def test_reports_of_the_upkeep_contain_no_foreign_markup(
    hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts: list[dict[str, Any]] = []
    monkeypatch.setattr(
        artifacts_module,
        "create_markdown_artifact",
        lambda markdown, **fields: artifacts.append({"markdown": markdown, **fields}),
    )
    monkeypatch.setattr(artifacts_module.PREFECT_API_URL, "value", lambda: "http://server/api")
    run = RunReport(name=hostile, found=hostile, jobs=(hostile,), record=hostile, open=hostile)
    report = Report(host=hostile, runs=(run,))
    node = NodeResult(name=hostile, unreached=hostile, facts={})
    finding = Finding(node=hostile, check="reach", problem=hostile, remedy=hostile)
    verdict = PreflightVerdict(nodes=(node,), findings=(finding,))

    log: Any = None

    artifacts_module.create_report("key", report.as_markdown(), report.summary, log)
    artifacts_module.create_report("key", verdict.as_markdown(), verdict.summary, log)

    assert len(artifacts) == 2
    for artifact in artifacts:
        assert dangers_in(artifact["markdown"]) == []
        assert dangers_in(artifact["description"]) == []


@pytest.mark.parametrize(
    "escape", [escape_markdown, lambda text: str(escape_cell(text))], ids=["text", "cell"]
)
def test_foreign_text_is_shown_literally(escape: Callable[[str], str], hostile: str) -> None:
    html = rendered(escape(hostile))

    shown = html.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"')
    assert words_of_text(shown.replace("&amp;", "&")) == "".join(hostile.split())


def words_of_text(shown: str) -> str:
    """Return the text of an HTML paragraph, without tags and white space."""
    for tag in ("<p>", "</p>", "<code>", "</code>"):
        shown = shown.replace(tag, "")
    return "".join(shown.split())


@pytest.mark.parametrize(
    "plain", ["RUNTIME_ERROR: 3 of 4", "sft-20260101-000000-aa", "2 nodes (8 GPUs)", "", "a/b_c.d"]
)
def test_plain_text_in_a_cell_is_unchanged(plain: str) -> None:
    assert escape_cell(plain) == plain


def test_cells_without_text_are_unchanged() -> None:
    assert [escape_cell(value) for value in (7, 0.5, None)] == [7, 0.5, None]
