"""Trains the model that bench_speculative runs: the embedded one's form and data, taught to continue its rows.

credit-mini itself learned rows whose words were dropped and shifted, with the language and MTP losses at 0.005: it
judges rows, and continues them badly. Here nothing is dropped, both losses count in full, and rows follow each other,
so that an answer may be long.
"""

import csv
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from model.balance import make_balance
from model.checkpoint import save_hub
from model.config import ModelConfig
from model.examples import Rows, encode_rows, label_ids, pack
from model.template import Template
from model.tokenizer import Tokenizer
from model.train import Recipe, init_state, make_step
from model.transformer import Transformer

ROOT = Path(__file__).parent.parent
ZOO, DATA = ROOT / "model/zoo/credit-mini", ROOT / "data/credit_default"
BATCH, CHAIN, BALANCE_EVERY, BALANCE_SPEED = 16, 4, 2, 0.01  # examples a step, rows in an example


def read_rows(name: str, limit: int | None = None) -> Rows:
    """Of DATA, with credit-mini's template and tokenizer."""
    with (DATA / name).open(newline="") as file:
        lines = list(csv.DictReader(file))[:limit]
    return encode_rows(lines, Template.load(ZOO / "template.toml"), Tokenizer.load(ZOO))


def train(directory: Path, *, layers: int, steps: int) -> None:
    """Write the trained model to `directory` in hub form."""
    hub = json.loads((ZOO / "config.json").read_text("utf-8")) | {
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers - 1,
    }
    model = Transformer(ModelConfig.from_hub(hub), rngs=nnx.Rngs(0))
    template, tokenizer = Template.load(ZOO / "template.toml"), Tokenizer.load(ZOO)
    rows, labels = read_rows("train.csv"), label_ids(template, tokenizer)
    width = CHAIN * (max(map(len, rows.prompts)) + max(map(len, labels)) + 1)
    recipe = Recipe(
        steps, learning_rate=3e-3, language=1.0, mtp=1.0, auxiliary_rows=BATCH, label_width=max(map(len, labels))
    )
    graph, params = nnx.split(model)
    state, step, balance = init_state(params, recipe), make_step(graph, recipe), make_balance(graph, BALANCE_SPEED)
    rng = np.random.default_rng(0)
    for number in (bar := tqdm(range(steps), desc="training", disable=None)):
        chosen = rows.take(rng.choice(len(rows), BATCH * CHAIN, replace=False))
        examples = pack(_chained(chosen, labels, tokenizer.eos_ids[0]), labels, tokenizer.eos_ids[0], width)
        state, parts = step(state, examples)
        if number % BALANCE_EVERY == 0:
            state = balance(state, examples)
        if number % 50 == 0:
            bar.set_postfix({"language": f"{float(parts.language):.3f}", "mtp": f"{float(parts.mtp):.3f}"})
    save_hub(cast(Transformer, nnx.merge(graph, state.average)), hub, directory, dtype=jnp.float32)


def _chained(rows: Rows, labels: Sequence[Sequence[int]], end: int) -> Rows:
    """CHAIN rows one after the other, each with its label and an end: the last one's label is yet to come."""
    whole = [(*prompt, *labels[label], end) for prompt, label in zip(rows.prompts, rows.label, strict=True)]
    last = range(CHAIN - 1, len(rows), CHAIN)
    prompts = (itertools.chain(*whole[i - CHAIN + 1 : i], rows.prompts[i]) for i in last)
    return Rows(tuple(map(tuple, prompts)), rows.label[list(last)])
