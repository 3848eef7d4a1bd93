"""The pictures of the UI in the documents, made anew: `make screenshots`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from io import BytesIO
from pathlib import Path

from PIL import Image

from tests.ui import specs
from tests.ui.browsing import Ui, browser
from tests.ui.ui_stack import ROOT, UiStack, stack_up

IMAGES = ROOT / "docs" / "images"
_WIDTH = 1200
_COLORS = 256


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ui.screenshots", description=__doc__)
    parser.add_argument("--stack", metavar="HOME", help="the stack that is up in this MUSTER_HOME")
    parser.add_argument("--only", metavar="NAME", choices=[*PICTURES], help="this picture alone")
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="muster-ui-") as folder,
        _stack(options, folder) as stack,
        browser(width=_WIDTH, height=900) as context,
    ):
        ui = Ui(context.new_page(), stack.url, stack.password)
        for name, take in PICTURES.items():
            if options.only in (None, name):
                take(stack, ui)
                _keep(ui.page.screenshot(full_page=name in _WHOLE), IMAGES / f"{name}.png")
    return 0


def _stack(options: argparse.Namespace, folder: str) -> AbstractContextManager[UiStack]:
    if options.stack:
        return nullcontext(UiStack(home=Path(options.stack)))
    return stack_up(Path(folder))


def _run(stack: UiStack, ui: Ui) -> None:
    id = stack.run()
    stack.until_state(id, "Completed")
    ui.open_run(id, "Artifacts")
    ui.sees("reward", "timeline", "step 60 of 60")
    ui.until(lambda: len(ui.pictures()) >= 2 and all(ui.pictures()), "its pictures")


def _failed(stack: UiStack, ui: Ui) -> None:
    id = stack.run(specs.crashing())
    stack.until_state(id, "Failed")
    of_run = {"artifacts": {"flow_run_id": {"any_": [id]}, "key": {"any_": ["summary"]}}}
    [summary] = stack.ask("POST", "/artifacts/filter", of_run)
    ui.open(f"/v2/artifacts/artifact/{summary['id']}")
    ui.sees("what failed first", specs.COMPLAINT, "what happens next")


def _form(stack: UiStack, ui: Ui) -> None:
    ui.open_form(stack.ask("GET", "/deployments/name/train/quickstart")["id"])


def _queue(stack: UiStack, ui: Ui) -> None:
    holder = stack.run(specs.gang_of("llama-8b", 2))
    waits = [stack.run(specs.gang_of(name, gpus)) for name, gpus in (("qwen-7b", 2), ("tiny", 1))]
    try:
        stack.until_state(holder, "Running", saying="running:")
        names = [stack.until_state(id, "PendingResources")["name"] for id in waits]
        ui.page.set_viewport_size({"width": 1700, "height": 640})  # for the reasons
        ui.open("/v2/artifacts/key/gang-queue")
        ui.page.locator("[data-testid^=timeline-card] a").first.click()
        ui.sees(*names)
    finally:
        for id in (*waits, holder):
            stack.cancel(id)


def _keep(png: bytes, path: Path) -> None:
    """As a file that is small enough for a repository."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.open(BytesIO(png)).convert("RGB")
    image = image.resize(
        (_WIDTH, round(image.height * _WIDTH / image.width)), Image.Resampling.LANCZOS
    )
    # The other ways give a small mark the color of its surroundings.
    few = image.quantize(_COLORS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} kB", flush=True)


#: By the name of their file.
PICTURES = {"run": _run, "failed-run": _failed, "run-form": _form, "queue": _queue}
#: They are taken down to their end.
_WHOLE = frozenset(("run", "failed-run"))


if __name__ == "__main__":
    raise SystemExit(main())
