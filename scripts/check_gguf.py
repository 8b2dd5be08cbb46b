"""Our numbers against llama.cpp's: python -m scripts.check_gguf FILE.gguf [--ours DIR] [--tokens 64]

FILE is an F32 GGUF (`tidegate convert DIR FILE --to gguf`), DIR the hub directory that it was made from (default: FILE
is converted into a temporary one). Each prompt goes through both tokenizers and chat templates; then llama.cpp
continues it greedily, and both models' logits over all of it are compared, in float32 on both sides, the KV cache
included. Floor: relative error 1e-3 of the largest logit; where our best token differs from llama.cpp's, ours must lead
by less than twice that. Needs llama-cpp-python; says so and ends where it is not installed.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from model import convert
from model.chat import ChatTemplate
from model.checkpoint import load_hub
from model.tokenizer import Tokenizer
from scripts.report import finish, parser

FLOOR = 1e-3
CHAT = (
    "What is the capital of France? Tell me one thing about it.",
    "Write a short poem about the tide.",
    "Explain in three sentences why the sky is blue.",
    "List 5 numbers between 10 and 1,000, and their sum.",
)
TEXTS = (
    "Once upon a time, in a village by the sea,\n",
    "def fibonacci(n):\n    '''Return the n-th number.'''\n",
    "The year 1984 isn't 2024;  café naïve — 你好，世界 Привет 👍\t\n\n end",
)


class Agreement(NamedTuple):
    """relative_error: of the largest logit. agreed: leading tokens of the continuation that both choose alike.

    lead: how far ahead of llama.cpp's token ours is at the first one that differs, of the largest logit; 0: none.
    """

    relative_error: float
    agreed: int
    lead: float


def compare(ours: NDArray[Any], theirs: NDArray[Any], num_prompt: int) -> Agreement:
    """Logits [t, v] of both over prompt and continuation, whose tokens are the best of `theirs`."""
    scale = float(np.abs(theirs).max())
    error = float(np.abs(ours - theirs).max()) / scale
    mine, other = (logits[num_prompt - 1 :].argmax(-1) for logits in (ours, theirs))
    different = np.flatnonzero(mine != other)
    if not len(different):
        return Agreement(error, len(other), 0.0)
    first = int(different[0])
    row = ours[num_prompt - 1 + first]
    return Agreement(error, first, float(row[mine[first]] - row[other[first]]) / scale)


def greedy(llama: Any, ids: list[int], count: int) -> tuple[list[int], NDArray[np.float32]]:
    """llama.cpp's continuation [count] and its logits [len(ids) + count - 1, v] over prompt and continuation."""
    llama.reset()
    llama.eval(ids)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(llama.scores[llama.n_tokens - 1].argmax()))
        if len(tokens) < count:
            llama.eval(tokens[-1:])
    return tokens, np.array(llama.scores[: llama.n_tokens])


def our_logits(directory: Path, rows: list[list[int]]) -> list[NDArray[np.float32]]:
    """Logits [len(row), v] of each row, all in one batch: what pads a row stands behind it and is not seen."""
    graph, params = nnx.split(load_hub(directory, dtype=jnp.float32))
    longest = max(map(len, rows))
    tokens = np.array([row + [0] * (longest - len(row)) for row in rows], np.int32)

    @jax.jit
    def hidden(params: Any, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return nnx.merge(graph, params).hidden(tokens, positions)

    @jax.jit
    def logits(params: Any, hidden: jax.Array) -> jax.Array:
        return nnx.merge(graph, params).logits(hidden)

    with jax.default_matmul_precision("highest"):
        states = hidden(params, tokens)
        return [np.asarray(logits(params, states[i : i + 1]))[0, : len(row)] for i, row in enumerate(rows)]


def prompts(directory: Path, llama: Any) -> list[dict[str, Any]]:
    """Each prompt's ids, and whether llama.cpp's tokenizer (and the file's own chat template) gives the same."""
    tokenizer, chat = Tokenizer.load(directory), ChatTemplate.load(directory)
    found = []
    for text in TEXTS:
        ids = tokenizer.encode(text)
        theirs = llama.tokenize(text.encode(), add_bos=False, special=False)
        found.append({"prompt": ascii(text[:24]), "ids": ids, "same_ids": ids == theirs})
    for text in CHAT if chat is not None else ():
        messages = [{"role": "user", "content": text}]
        ids = chat.encode(messages, tokenizer) if chat is not None else []
        theirs = llama.tokenize(rendered(llama, messages).encode(), add_bos=False, special=True)
        found.append({"prompt": ascii(text[:24]), "ids": ids, "same_ids": ids == theirs})
    return found


def rendered(llama: Any, messages: list[dict[str, str]]) -> str:
    """The conversation as llama-cpp-python renders it with the template in the file."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    template = llama.metadata["tokenizer.chat_template"]
    ends = {name: llama.detokenize([token], special=True).decode() for name, token in
            (("bos_token", llama.token_bos()), ("eos_token", llama.token_eos()))}  # fmt: skip
    text: str = Jinja2ChatFormatter(template=template, **ends)(messages=messages).prompt
    return text


def measure(file: Path, directory: Path, count: int) -> list[dict[str, Any]]:
    from llama_cpp import Llama

    float32 = {"type_k": 0, "type_v": 0}
    llama = Llama(str(file), n_ctx=512, n_batch=512, logits_all=True, flash_attn=False, verbose=False, **float32)
    cases = prompts(directory, llama)
    continued = [greedy(llama, case["ids"], count) for case in cases]
    rows = [case["ids"] + tokens[:-1] for case, (tokens, _) in zip(cases, continued, strict=True)]
    found = our_logits(directory, rows)
    return [
        {**case, "ids": len(case["ids"]), **compare(ours, theirs, len(case["ids"]))._asdict()}
        for case, ours, (_, theirs) in zip(cases, found, continued, strict=True)
    ]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("file", type=Path, help="an F32 GGUF")
    options.add_argument("--ours", type=Path, help="the hub directory of the same model (default: made from FILE)")
    options.add_argument("--tokens", type=int, default=64, help="tokens of each continuation (default %(default)s)")
    args = options.parse_args()
    try:
        import llama_cpp  # noqa: F401
    except ImportError as error:
        print(f"skipped: llama-cpp-python cannot be imported ({error}); pip install llama-cpp-python compiles it")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        if args.ours is None:
            convert.run(args.file, Path(temporary) / "model")
        rows = measure(args.file, args.ours or Path(temporary) / "model", args.tokens)
    worst = max(row["relative_error"] for row in rows)
    good = worst <= FLOOR and all(row["same_ids"] and row["lead"] <= 2 * FLOOR for row in rows)
    equal = sum(row["agreed"] == args.tokens for row in rows)
    figure = f"largest relative error {worst:.1e} (floor {FLOOR:.0e}), {equal} of {len(rows)} continuations equal"
    return finish(rows, figure, ok=good, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
