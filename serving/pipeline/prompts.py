"""Inputs to token ids: render the row template or the chat, then encode, many texts in one call.

Rules, the same for every endpoint: text of users never becomes a control token; a raw text starts with BOS when the
tokenizer's own config says so; token ids are taken as they are; a prompt of no tokens is BOS alone where the
tokenizer has one and refused where it has none. One bad input fails alone: its place holds the error.
"""

from collections.abc import Sequence

from serving.errors import BadRequest, ContextLengthExceeded, ServingError
from serving.types import ChatInput, FeatureInput, Input, TextInput, TokenInput

from .language import Language, RowTemplate

Prompt = tuple[int, ...]


def find_template(language: Language, name: str | None) -> RowTemplate:
    """The named row template, or the default; raises BadRequest that lists what there is."""
    wanted = name if name is not None else language.default_template
    template = language.templates.get(wanted) if wanted is not None else None
    if template is None:
        known = ", ".join(sorted(language.templates)) or "none"
        got = "no template was named and the model has no default" if name is None else "no template of that name"
        raise BadRequest(f"features cannot be rendered: {got}; templates: {known}", param="template")
    return template


def encode_inputs(language: Language, inputs: Sequence[Input | ServingError]) -> list[Prompt | ServingError]:
    """Token ids per input, in order. An input that is an error already, or fails here, is that error."""
    out: list[Prompt | ServingError] = []
    texts: list[str] = []
    places: list[int] = []
    for place, item in enumerate(inputs):
        ready = _text_or_prompt(language, item)
        if isinstance(ready, str):
            texts.append(ready)
            places.append(place)
            out.append(())
        else:
            out.append(ready)
    for place, ids in zip(places, _encode_texts(language, texts), strict=True):
        out[place] = ids
    return [_checked(language, prompt) for prompt in out]


def _text_or_prompt(language: Language, item: Input | ServingError) -> str | Prompt | ServingError:
    match item:
        case FeatureInput(features, template):
            try:
                return find_template(language, template).render(features)
            except ServingError as error:
                return error
            except ValueError as error:
                column = getattr(error, "column", None)  # a TemplateError names it
                return BadRequest(str(error), param=f"features.{column}" if column else "features")
        case TextInput(text):
            return text
        case TokenInput(token_ids):
            return _in_vocabulary(language, token_ids)
        case ChatInput(messages):
            return _encode_chat(language, messages)
        case ServingError():
            return item


def _in_vocabulary(language: Language, token_ids: Prompt) -> Prompt | ServingError:
    size = language.vocab_size
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
        return BadRequest(f"a token id is outside the vocabulary: ids are 0 to {size - 1}")
    return token_ids


def _encode_chat(language: Language, messages: Sequence[object]) -> Prompt | ServingError:
    if language.chat is None:
        return BadRequest("this model has no chat template; send text to /v1/completions", param="messages")
    try:
        return tuple(language.chat.encode(messages, language.tokenizer))
    except ValueError as error:  # a MessageError names its field
        return BadRequest(str(error), param=getattr(error, "param", "messages"))


def _encode_texts(language: Language, texts: list[str]) -> list[Prompt]:
    if not texts:
        return []
    tokenizer = language.tokenizer
    encoded = [tokenizer.encode(texts[0])] if len(texts) == 1 else tokenizer.encode_batch(texts)
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        return [(tokenizer.bos_id, *ids) for ids in encoded]
    return [tuple(ids) for ids in encoded]


def _checked(language: Language, prompt: Prompt | ServingError) -> Prompt | ServingError:
    """Apply the empty-prompt rule and the limits that need no knowledge of what is asked."""
    if isinstance(prompt, ServingError):
        return prompt
    if not prompt:
        bos = language.tokenizer.bos_id
        return (bos,) if bos is not None else BadRequest("the prompt is empty and this tokenizer has no BOS token")
    if len(prompt) > language.max_context:
        return ContextLengthExceeded(
            f"this model's context is {language.max_context} tokens; the prompt has {len(prompt)}"
        )
    return prompt
