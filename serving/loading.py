"""A model directory to a Backend.

The one place that puts model and engine together, and the only one outside the engine that needs jax. `serve` and
`score` both call it, so a row meets the same parts online and offline.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import msgspec

from model.architecture import Window
from model.chat import ChatTemplate
from model.fingerprint import fingerprint
from model.layout import lay_out
from model.load import load_model
from model.reasoning import CLOSE, OPEN, ReasoningSplit, opens_reasoning
from model.sharding import make_mesh, parse_mesh
from model.template import Template
from model.tokenizer import Detokenizer, Tokenizer

from .backend import Backend
from .config import Config, EngineConfig
from .engine.buckets import MIN_CHUNK_TOKENS
from .engine.engine import Engine
from .engine.ring import Ring
from .engine.runner import JaxRunner, use_compilation_cache
from .pipeline.language import Language
from .pipeline.llguide import make_guide


def load_backend(config: Config, directory: Path, *, compile_cache: Path | None, clock: Callable[[], float]) -> Backend:
    """Read everything, weights included. compile_cache: where compiled programs are kept; None: nowhere.

    Raises ValueError or OSError with a message for people.
    """
    if compile_cache is not None:
        use_compilation_cache(compile_cache)
    tokenizer = Tokenizer.load(directory)
    chat = ChatTemplate.load(directory)
    template = load_template(config.model.template, directory)
    mesh = make_mesh(parse_mesh(config.model.mesh)) if config.model.mesh else None
    dtype = None if config.model.dtype == "auto" else jnp.dtype(config.model.dtype)
    model = load_model(directory, dtype=dtype, mesh=mesh, strict_mesh=True)
    if config.attention.impl != "auto":
        model.arithmetic = replace(model.arithmetic, attention_impl=config.attention.impl)
    if config.engine.deterministic:
        model.arithmetic = model.arithmetic.fixed()
    elif mesh is None:
        lay_out(model)
    engine_config, ring = config.engine, None
    if config.attention.kind == "window":
        window = Window(config.attention.window, config.attention.sinks)
        model.narrow(window)
        engine_config, ring = windowed(config.engine, window)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, the model {model.config.vocab_size}"
        )
    max_context = min(config.engine.max_context, model.config.max_position)
    runner = JaxRunner(model, engine_config, max_context=max_context, mesh=mesh, ring=ring)
    # Kept pages of one arithmetic have other bits than those of another; with an MTP layer's part they are larger.
    mark = f"{fingerprint(directory)} {model.embed_tokens.weight().dtype} {model.arithmetic}"
    mark += f"{' mtp' if config.engine.speculate else ''} {config.attention if ring else ''}"
    engine = Engine(runner, engine_config, max_context=max_context, clock=clock, fingerprint=mark, ring=ring)
    language = make_language(
        tokenizer,
        chat,
        template,
        max_context=max_context,
        vocab_size=model.config.vocab_size,
        adjusts=config.engine.sampling_tables,
    )
    return Backend(language, engine, lambda: runner.num_compiles, runner.footprint)


def windowed(config: EngineConfig, window: Window) -> tuple[EngineConfig, Ring]:
    """Chunks no longer than the window: a longer one holds pages of tokens that it does not see itself."""
    chunk = min(config.prefill_chunk, max(window.size, MIN_CHUNK_TOKENS))
    ring = Ring.of(window.size, window.sinks, config.page_size, chunk)
    return msgspec.structs.replace(config, prefill_chunk=chunk), ring


def load_template(path: str, directory: Path) -> Template | None:
    """The template at `path`, else the one beside the model, else None."""
    if path:
        return Template.load(path)
    own = directory / "template.toml"
    return Template.load(own) if own.is_file() else None


def make_language(
    tokenizer: Tokenizer,
    chat: ChatTemplate | None,
    template: Template | None,
    *,
    max_context: int,
    vocab_size: int,
    adjusts: bool = True,
) -> Language:
    """`adjusts`: the engine keeps tables for penalties, biases and masks."""
    reasons = OPEN in tokenizer.control
    guide = make_guide(tokenizer, control_ids=tokenizer.control.values(), vocab_size=vocab_size) if adjusts else None
    return Language(
        tokenizer=tokenizer,
        max_context=max_context,
        vocab_size=vocab_size,
        new_detokenizer=lambda: Detokenizer(tokenizer, skip_special=True),
        chat=chat,
        new_splitter=(lambda ids: ReasoningSplit(opened=opens_reasoning(ids, tokenizer))) if reasons else None,
        templates={template.name: template} if template is not None else {},
        default_template=template.name if template is not None else None,
        reasoning_end=lambda ids: tokenizer.control.get(CLOSE) if opens_reasoning(ids, tokenizer) else None,
        adjusts=adjusts,
        guide=guide,
    )
