"""Options of the chat template, which serving, answering and training must share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.console import notes
from forerun.cli.prompts import parse_json, read_text
from forerun.errors import OptionError

if TYPE_CHECKING:
    from forerun.target.base import Tokenizer
    from forerun.training.data.rendering import Rendering


@dataclass(frozen=True, kw_only=True)
class TemplateFlags:
    """How conversations become text. Serve, answer and train with the same."""

    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", help="Jinja file or text in place of the model's own template.")
    ] = None
    chat_template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="Options of the template: '{\"enable_thinking\": false}'.")
    ] = None
    apply_chat_template: Annotated[
        bool,
        typer.Option("--apply-chat-template", help="A plain prompt is a user's message, its completion the answer."),
    ] = False

    def options(self) -> dict[str, Any]:
        """OptionError: no JSON object."""
        found = parse_json("--chat-template-kwargs", self.chat_template_kwargs or "{}")
        if not isinstance(found, dict):
            raise OptionError("--chat-template-kwargs", f"must be a JSON object, got {self.chat_template_kwargs}")
        return found

    def text(self) -> str | None:
        """The template that was given. OptionError: a file that cannot be read."""
        given = self.chat_template
        return given if given is None or "{" in given else read_text("--chat-template", given)

    def rendering(self, tokenizer: Tokenizer, end_ids: frozenset[int]) -> Rendering:
        from forerun.training.data.rendering import Rendering

        if "strftime_now" in (tokenizer.chat_template or ""):
            notes().print("the chat template may write today's date into prompts; see --chat-template-kwargs")
        return Rendering(tokenizer, end_ids, self.options())
