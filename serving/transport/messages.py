"""Chat messages from the wire to plain dicts, as sent: what they say is checked where the template reads them."""

from collections.abc import Sequence

import msgspec

from serving.types import ChatInput

from .schema.chat import Message


def chat_input(messages: Sequence[Message]) -> ChatInput:
    """Fields that were not sent, or sent as null, are absent."""
    return ChatInput(tuple(msgspec.to_builtins(message) for message in messages))
