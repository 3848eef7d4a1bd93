"""Make the pictures of the UI in the documents again: `make screenshots`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import FloatRect, expect

from tests.ui import specs
from tests.ui.browsing import Ui, browser
from tests.ui.ui_stack import ROOT, UiStack, stack_up

IMAGES = ROOT / "docs" / "images"
_WIDTH = 1200
_COLORS = 256


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ui.screenshots", description=__doc__)
    parser.add_argument("--stack", metavar="HOME", help="use the running stack of this MUSTER_HOME")
    parser.add_argument(
        "--only", metavar="NAME", choices=[*PICTURES], help="make only this picture"
    )
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="muster-ui-") as folder,
        _open_stack(options, folder) as stack,
        browser(width=_WIDTH, height=900) as context,
    ):
        ui = Ui(context.new_page(), stack.url, stack.password)
        for name, take in PICTURES.items():
            if options.only in (None, name):
                clip = take(stack, ui)
                png = ui.page.screenshot(full_page=name in _WHOLE, clip=clip)
                _save(png, IMAGES / f"{name}.png")
    return 0


def _open_stack(options: argparse.Namespace, folder: str) -> AbstractContextManager[UiStack]:
    """Return the stack of the option --stack, or start a stack with this folder as MUSTER_HOME."""
    if options.stack:
        return nullcontext(UiStack(home=Path(options.stack)))
    return stack_up(Path(folder))


def _show_completed_run(stack: UiStack, ui: Ui) -> None:
    """Run the quickstart to its end, and open the tab of the run's artifacts."""
    id = stack.run()
    stack.until_state(id, "Completed")
    ui.open_run(id, "Artifacts")
    ui.sees("reward", "timeline", "step 60 of 60")
    ui.until(lambda: len(ui.pictures()) >= 2 and all(ui.pictures()), "two pictures")


def _show_failed_run(stack: UiStack, ui: Ui) -> None:
    """Run a trainer that crashes, and open the summary of its run."""
    id = stack.run(specs.crashing())
    stack.until_state(id, "Failed")
    artifact_filter = {"artifacts": {"flow_run_id": {"any_": [id]}, "key": {"any_": ["summary"]}}}
    [summary] = stack.ask("POST", "/artifacts/filter", artifact_filter)
    ui.open(f"/v2/artifacts/artifact/{summary['id']}")
    ui.sees("first failure", specs.COMPLAINT, "what happens next")


def _show_form(stack: UiStack, ui: Ui) -> None:
    """Open the form of a custom run of the quickstart."""
    form = ui.open_form(stack.ask("GET", "/deployments/name/train/quickstart")["id"])
    # The page loads the JSON editor of `env` last. Until then, the field is an empty grey area.
    expect(form.locator(".cm-editor").first).to_be_visible()


def _show_queue(stack: UiStack, ui: Ui) -> FloatRect:
    """Queue two runs behind a run that holds the GPUs, and open the table of the queue.

    Returns:
        Area of the page from the title to the end of the table, without the menu of the UI.
    """
    holder = stack.run(specs.gang_of("llama-8b", 2))
    waiting_ids = [
        stack.run(specs.gang_of(name, gpus)) for name, gpus in (("qwen-7b", 2), ("tiny", 1))
    ]
    try:
        stack.until_state(holder, "Running", saying="running:")
        names = [stack.until_state(id, "PendingResources")["name"] for id in waiting_ids]
        # The table has a wide column with the reasons why runs wait. The window must be wide enough
        # for this column.
        ui.page.set_viewport_size({"width": 2600, "height": 640})
        ui.open("/v2/artifacts/key/gang-queue")
        ui.page.locator("[data-testid^=timeline-card] a").first.click()
        ui.sees(*names)
        table = ui.page.locator("table").bounding_box()
        assert table is not None
        margin = 25
        return {
            "x": table["x"] - margin,
            "y": 0,
            "width": table["width"] + 2 * margin,
            "height": table["y"] + table["height"] + margin,
        }
    finally:
        for id in (*waiting_ids, holder):
            stack.cancel(id)


def _save(png: bytes, path: Path) -> None:
    """Save a screenshot as a PNG file that is small enough for a repository."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.open(BytesIO(png)).convert("RGB")
    image = image.resize(
        (_WIDTH, round(image.height * _WIDTH / image.width)), Image.Resampling.LANCZOS
    )
    # Other quantization methods of Pillow would give a small symbol the color of its surroundings.
    reduced_image = image.quantize(
        _COLORS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    )
    reduced_image.save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} kB", flush=True)


#: Mapping from the name of a picture's file to the function that opens the page for this picture.
#: The function returns the area of the page that the picture shows. If the function returns None,
#: the picture shows the visible part of the page, or the whole page for names in _WHOLE.
PICTURES: dict[str, Callable[[UiStack, Ui], FloatRect | None]] = {
    "run": _show_completed_run,
    "failed-run": _show_failed_run,
    "run-form": _show_form,
    "queue": _show_queue,
}
#: Names of the pictures that show the whole page instead of its visible part.
_WHOLE = frozenset(("run", "failed-run"))


if __name__ == "__main__":
    raise SystemExit(main())
