"""Train the embedded model on the credit-default rows and write it in hub form.

    python -m scripts.train_default                     # validate: the last 1,944 rows of train.csv are held out
    python -m scripts.train_default --all-rows --threshold 0.5 --report-test     # the shipped weights

A killed run goes on from its last checkpoint when it is started again with the same arguments, and ends with the same
weights. Exit status 1: with --report-test, a floor (AUC 0.775, accuracy 0.815) was missed.
"""

import argparse
import csv
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray
from tqdm import tqdm

from model.balance import make_balance
from model.checkpoint import save_hub
from model.config import ModelConfig
from model.evaluate import auc, best_threshold, label_probabilities
from model.examples import Rows, drop_words, encode_rows, label_ids, neighbours, pack, shift_words
from model.load import load_model
from model.resume import OtherSettings, RunCheckpoints
from model.template import Template
from model.tokenizer import Tokenizer
from model.train import Examples, Recipe, init_state, make_step
from model.transformer import Transformer
from model.vocabulary import template_words, tokenizer_config, tokenizer_definition

ROOT = Path(__file__).parent.parent
ZOO = ROOT / "model/zoo/credit-mini"
AUC_FLOOR, ACCURACY_FLOOR = 0.775, 0.815
THRESHOLD_SLACK = 0.002  # of accuracy: four validation rows
BALANCE_EVERY, BALANCE_SPEED = 2, 0.01


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, default=ROOT / "data/credit_default", help="directory of train.csv and test.csv")
    add("--template", type=Path, default=ZOO / "template.toml", help="the task")
    add("--out", type=Path, default=ROOT / "runs/credit-mini", help="where the model is written")
    add("--work", type=Path, default=ROOT / "runs/train_default", help="checkpoints of an unfinished run")
    add("--config", type=Path, default=ZOO / "config.json", help="the sizes, as a hub config.json")
    add("--epochs", type=float, default=5.0, help="passes over the training rows (default %(default)s)")
    add("--steps", type=int, help="this many steps instead of --epochs")
    add("--batch-rows", type=int, default=256, help="rows a step (default %(default)s)")
    add("--learning-rate", type=float, default=2e-3, help="at the peak (default %(default)s)")
    add("--drop", type=float, default=0.25, help="share of a row's words that is dropped (default %(default)s)")
    add("--shift", type=float, default=0.15, help="share of words replaced by a neighbour (default %(default)s)")
    add("--seed", type=int, default=0, help="of weights, order and drops (default %(default)s)")
    add("--validation-rows", type=int, default=1944, help="held out, from the end (default %(default)s)")
    add("--all-rows", action="store_true", help="train on the validation rows too; needs --threshold")
    add("--threshold", type=float, help="of the positive label; default: the best one on the validation rows")
    add("--report-test", action="store_true", help="score test.csv with the written weights: once, at the end")
    add("--save-every", type=int, default=50, help="steps between checkpoints (default %(default)s)")
    add("--stop-at", type=int, help="leave after this step as if killed, for tests of resuming")
    add("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    if args.all_rows and args.threshold is None:
        parser.error("--all-rows leaves no rows to choose a threshold on: give --threshold")
    return args


class Task(NamedTuple):
    """What the rows say and how it is written."""

    template: Template
    tokenizer: Tokenizer
    labels: tuple[tuple[int, ...], ...]  # tokens of each
    end: int

    def read(self, path: Path) -> Rows:
        with path.open(newline="") as file:
            return encode_rows(list(csv.DictReader(file)), self.template, self.tokenizer)

    def scores(self, model: Transformer, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """(probability of the positive label, whether it is the right one) of each row."""
        place = next(i for i, label in enumerate(self.template.labels) if label.positive)
        return label_probabilities(model, rows, self.labels)[:, place], rows.label == place


def make_task(args: argparse.Namespace) -> Task:
    """Write template and tokenizer into the output directory and read them from there."""
    args.out.mkdir(parents=True, exist_ok=True)
    if args.template.resolve() != (args.out / "template.toml").resolve():
        shutil.copyfile(args.template, args.out / "template.toml")
    template = Template.load(args.out / "template.toml")
    context = json.loads(args.config.read_text("utf-8"))["max_position_embeddings"]
    files = {"tokenizer": tokenizer_definition(template_words(template)), "tokenizer_config": tokenizer_config(context)}
    for name, content in files.items():
        (args.out / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", "utf-8")
    tokenizer = Tokenizer.load(args.out)
    return Task(template, tokenizer, label_ids(template, tokenizer), tokenizer.eos_ids[0])


def write_threshold(path: Path, threshold: float) -> None:
    text, count = re.subn(r"(?m)^threshold = .*$", f"threshold = {threshold:.4g}", path.read_text("utf-8"))
    assert count == 1, f"{path} must have one line for the threshold"
    path.write_text(text, "utf-8")


def batches(rows: Rows, task: Task, args: argparse.Namespace) -> Callable[[int], Examples]:
    """The batch of a step: a function of the seed and the step alone, so that a resumed run sees the same ones."""
    width = max(map(len, rows.prompts)) + max(map(len, task.labels)) + 1
    table = neighbours(task.template, task.tokenizer)
    per_epoch = len(rows) // args.batch_rows * args.batch_rows

    def batch(step: int) -> Examples:
        epoch, place = divmod(step * args.batch_rows, per_epoch)
        order = np.random.default_rng((args.seed, 1, epoch)).permutation(len(rows))
        rng = np.random.default_rng((args.seed, 2, step))
        shifted = shift_words(rng, rows.take(order[place : place + args.batch_rows]), table, args.shift)
        return pack(drop_words(rng, shifted, args.drop), task.labels, task.end, width)

    return batch


def train(model: Transformer, rows: Rows, task: Task, args: argparse.Namespace) -> Transformer | None:
    """The trained model, or None after --stop-at."""
    num_steps = args.steps or round(args.epochs * (len(rows) // args.batch_rows))
    recipe = Recipe(
        num_steps,
        learning_rate=args.learning_rate,
        warmup_steps=min(100, num_steps // 3),
        label_width=max(map(len, task.labels)),
    )
    graph, params = nnx.split(model)
    state, step = init_state(params, recipe), make_step(graph, recipe)
    balance, batch = make_balance(graph, BALANCE_SPEED), batches(rows, task, args)
    settings = {k: v for k, v in vars(args).items() if k not in ("stop_at", "json", "report_test")}
    with RunCheckpoints(args.work, settings) as saved:
        state = saved.restore(state)
        for done in (bar := tqdm(range(int(state.step), num_steps), initial=int(state.step), total=num_steps)):
            examples = batch(done)
            state, parts = step(state, examples)
            if (done + 1) % BALANCE_EVERY == 0:
                state = balance(state, jax.tree.map(lambda x: x[: recipe.auxiliary_rows], examples))
            if (done + 1) % args.save_every == 0:
                bar.set_postfix({k: f"{float(v):.4f}" for k, v in parts._asdict().items()})
                saved.save(state)
            if done + 1 == args.stop_at:
                return None
        saved.remove()
    return cast(Transformer, nnx.merge(graph, state.average))


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    task = make_task(args)
    rows = task.read(args.data / "train.csv")
    first_held_out = len(rows) - args.validation_rows
    held_out = rows.take(range(first_held_out, len(rows)))
    kept = rows if args.all_rows else rows.take(range(first_held_out))
    sizes = {"vocab_size": task.tokenizer.vocab_size, "bos_token_id": task.tokenizer.bos_id, "eos_token_id": task.end}
    hub = {**json.loads(args.config.read_text("utf-8")), **sizes}
    try:
        trained = train(Transformer(ModelConfig.from_hub(hub), rngs=nnx.Rngs(args.seed)), kept, task, args)
    except OtherSettings as error:
        sys.exit(str(error))
    if trained is None:
        return 0
    save_hub(trained, hub, args.out, dtype=jnp.float32)
    result = report(load_model(args.out), held_out, task, args)
    print(json.dumps([result]) if args.json else "\n".join(f"{k} {v}" for k, v in result.items()))
    return int(result.get("test_auc", 1) < AUC_FLOOR or result.get("test_accuracy", 1) < ACCURACY_FLOOR)


def report(model: Transformer, held_out: Rows, task: Task, args: argparse.Namespace) -> dict[str, Any]:
    """Numbers of the written weights; states the threshold in the written template."""
    result: dict[str, Any] = {"out": str(args.out)}
    result["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    threshold = args.threshold
    if not args.all_rows:
        scores, positive = task.scores(model, held_out)
        best, accuracy = best_threshold(scores, positive, slack=THRESHOLD_SLACK)
        threshold = best if threshold is None else threshold
        result |= {"validation_auc": auc(scores, positive), "validation_accuracy": accuracy, "best_threshold": best}
    write_threshold(args.out / "template.toml", threshold)
    result["threshold"] = threshold
    if args.report_test:
        scores, positive = task.scores(model, task.read(args.data / "test.csv"))
        right = (scores >= threshold) == positive
        result |= {"test_auc": auc(scores, positive), "test_accuracy": float(right.mean())}
    return result


if __name__ == "__main__":
    sys.exit(main())
