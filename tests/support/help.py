"""How the commands of the tests show their `--help`."""

from __future__ import annotations

import argparse


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Says the default of each option that has one, and leaves a text that has lines of its own as
    it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text.strip():
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_said = "%(default)" in text or action.default in (None, False, argparse.SUPPRESS)
        if is_said or not action.option_strings or action.default == []:
            return text
        return f"{text} (default: %(default)s)".lstrip()
