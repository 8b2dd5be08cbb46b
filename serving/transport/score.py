"""POST /v1/score: rows in, labels with probabilities out. A malformed row fails alone, by index."""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from serving.errors import BadRequest, ServingError
from serving.pipeline.labels import LabelText
from serving.service import ScoreAnswer, Timing
from serving.types import ChatInput, FeatureInput, Input, LatencyClass, Score, TextInput, TokenInput

from .context import CONTEXT, EXCHANGE
from .decode import convert
from .messages import chat_input
from .problem import error_out
from .schema.chat import Message
from .schema.score import LabelIn, ScoreIn, ScoreInput, ScoreOut, ScoreResult, TimingOut
from .streaming import usage_out
from .wire import check_rows, json_response, make_call, read_request


async def score(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    body = await read_request(request, ScoreIn)
    check_rows(request, len(body.inputs), "inputs")
    call = make_call(request, body, LatencyClass.SCORE)
    answer = await context.startup.service().score(
        read_inputs(body.inputs),
        labels=_labels(body.labels),
        template=body.template,
        call=call,
    )
    _count(request, answer)
    out = ScoreOut(
        id=f"score-{request[EXCHANGE].id}",
        object="score",
        created=int(context.now()),
        model=context.model_name,
        results=[_result(each) for each in answer.scores],
        usage=usage_out(answer.usage),
        timing=_timing(answer.timing),
    )
    return json_response(out)


def read_inputs(items: Sequence[object]) -> list[Input | ServingError]:
    """The rows as the pipeline takes them, each malformed one as its error."""
    try:
        rows = msgspec.convert(items, list[ScoreInput])  # all at once, which is cheap, where none is malformed
    except msgspec.ValidationError:
        return [_read(item, i) for i, item in enumerate(items)]
    return [_input(row, i) for i, row in enumerate(rows)]


def _read(item: object, index: int) -> Input | ServingError:
    try:
        return _input(convert(item, ScoreInput, f"inputs[{index}]"), index)
    except ServingError as error:
        return error


def _input(row: ScoreInput, index: int) -> Input | ServingError:
    chat = None if row.messages is None else _chat(row.messages, index)
    if isinstance(chat, ServingError):
        return chat
    if (row.features, row.text, row.token_ids, chat).count(None) != 3:
        path = f"inputs[{index}]"
        return BadRequest(f"{path}: exactly one of features, text, messages, token_ids is needed", param=path)
    if row.features is not None:
        return FeatureInput(row.features, row.template)
    if row.text is not None:
        return TextInput(row.text)
    return chat if chat is not None else TokenInput(tuple(row.token_ids or ()))


def _chat(messages: Sequence[object], index: int) -> ChatInput | ServingError:
    try:
        return chat_input([convert(m, Message, f"inputs[{index}].messages[{i}]") for i, m in enumerate(messages)])
    except ServingError as error:
        return error


def _labels(labels: list[str | LabelIn] | None) -> list[LabelText] | None:
    if labels is None:
        return None
    return [LabelText(label) if isinstance(label, str) else LabelText(label.name, label.text) for label in labels]


def _result(score: Score) -> ScoreResult:
    if score.error is not None:
        return ScoreResult(score.index, error=error_out(score.error))
    assert score.label is not None
    return ScoreResult(score.index, score.label, score.probabilities, score.tier)


def _timing(timing: Timing) -> TimingOut:
    return TimingOut(*(round(seconds * 1000, 3) for seconds in (timing.encode_s, timing.engine_s, timing.total_s)))


def _count(request: web.Request, answer: ScoreAnswer) -> None:
    metrics = request.app[CONTEXT].metrics
    num_wrong = sum(score.error is not None for score in answer.scores)
    metrics.rows.labels("error").inc(num_wrong)
    metrics.rows.labels("ok").inc(len(answer.scores) - num_wrong)
    metrics.tokens.labels("prompt").inc(answer.usage.prompt_tokens)
