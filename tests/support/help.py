"""Format the `--help` texts of the programs in `tests/`."""

from __future__ import annotations

import argparse


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that adds the default value to each option that has a default.

    The formatter keeps the line breaks of a description that has several lines. A description of
    one line is wrapped.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text.strip():
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        names_default = "%(default)" in text
        has_default = action.default not in (None, False, argparse.SUPPRESS, [])
        if names_default or not has_default or not action.option_strings:
            return text
        return f"{text} (default: %(default)s)".lstrip()
