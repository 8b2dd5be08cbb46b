"""A file in, the same rows scored: on the fake device, against the toy model's own probabilities."""

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.config import EngineConfig
from serving.engine.engine import Engine
from serving.offline.record import Record
from serving.offline.score import score_file
from serving.offline.sink import JsonlSink
from serving.pipeline.language import Language
from serving.types import Score as ScoreOfRow
from tests.fakes import FakeClock, FakeRunner, ToyModel
from tests.fakes_text import FakeLabel, FakeTemplate, byte_language

Score = Callable[..., int]
CONFIG = EngineConfig(max_slots=64, max_context=512)


class Case:
    """One run of score_file in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.messages = io.StringIO()
        self.runner = FakeRunner()

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.directory / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def score(self, source: Path, out: str, *, language: Language | None = None, **options: Any) -> int:
        engine = Engine(self.runner, options.pop("config", CONFIG), max_context=512, clock=FakeClock())
        return score_file(
            source,
            self.directory / out,
            language=language or byte_language(),
            engine=engine,
            messages=self.messages,
            clock=FakeClock(),
            **options,
        )

    def rows(self, name: str) -> list[dict[str, str]]:
        with (self.directory / name).open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def objects(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / name).read_text("utf-8").splitlines()]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def expected(text: str, labels: tuple[str, ...] = ("G", "B")) -> list[float]:
    """Softmax over the labels' log-probabilities after the text."""
    logprobs = []
    for label in labels:
        context, total = list(text.encode()), 0.0
        for token in label.encode():
            total += float(ToyModel().logprobs(context)[token])
            context.append(token)
        logprobs.append(total)
    weights = [math.exp(p) for p in logprobs]
    return [w / sum(weights) for w in weights]


def test_csv_to_csv(case: Case) -> None:
    source = case.write("in.csv", 'id,x,note\n1,5,a\n2,77,"b, c"\n3,5,\n')
    assert case.score(source, "out.csv") == 0
    rows = case.rows("out.csv")
    assert list(rows[0]) == ["id", "x", "note", "label", "prob_good", "prob_bad", "tier", "error"]
    assert [(r["id"], r["x"], r["note"]) for r in rows] == [("1", "5", "a"), ("2", "77", "b, c"), ("3", "5", "")]
    for row in rows:
        good, bad = expected(f"x={row['x']}>")
        assert float(row["prob_good"]) == pytest.approx(good)
        assert float(row["prob_bad"]) == pytest.approx(bad)
        assert row["label"] == ("bad" if bad >= 0.5 else "good")
        assert (row["tier"], row["error"]) == ("full", "")
    assert "3 rows, 0 of them" in case.messages.getvalue()
    assert case.runner.closed


def test_jsonl_to_jsonl_takes_every_form_of_input(case: Case) -> None:
    lines = [
        {"x": 5, "id": "a"},
        {"features": {"x": 6}, "id": "b"},
        {"text": "free text", "more": [1, {"k": None}]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    source = case.write("in.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert case.score(source, "out.jsonl") == 0
    out = case.objects("out.jsonl")
    for got, given in zip(out, lines, strict=True):
        assert {k: got[k] for k in given} == given
        assert got["error"] is None
        assert got["tier"] == "full"
    for got, text in zip(out, ["x=5>", "x=6>", "free text"], strict=False):
        assert [got["probabilities"]["good"], got["probabilities"]["bad"]] == pytest.approx(expected(text))


def test_order_is_kept_over_many_jobs(case: Case) -> None:
    source = case.write("in.csv", "x\n" + "".join(f"{i}\n" for i in range(500)))
    assert case.score(source, "out.csv") == 0
    rows = case.rows("out.csv")
    assert [row["x"] for row in rows] == [str(i) for i in range(500)]
    for i in (0, 63, 64, 255, 499):
        assert float(rows[i]["prob_good"]) == pytest.approx(expected(f"x={i}>")[0])


def test_bad_rows_fail_alone(case: Case) -> None:
    source = case.write("in.csv", b"x,y\n1,2\n3\n4,5,6\n7,\xff\n\n8,9\n")
    assert case.score(source, "out.csv") == 0
    with (case.directory / "out.csv").open(encoding="utf-8", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    assert [bool(row["error"]) for row in rows] == [False, True, True, True, False]
    assert "2 has 1 fields" in rows[1]["error"]
    assert "3 has 3 fields" in rows[2]["error"]
    assert "not UTF-8" in rows[3]["error"]
    assert rows[1]["label"] == rows[1]["prob_good"] == rows[1]["tier"] == ""
    assert rows[3]["y"] == "\udcff"  # the input's byte, untouched
    assert "3 of them with an error" in case.messages.getvalue()


def test_bad_lines_of_jsonl_fail_alone(case: Case) -> None:
    lines = ['{"x":1}', "nonsense", "[1]", '{"y":1}', '{"features":3}', '{"messages":"m"}', '{"text":5}', '{"x":2}']
    source = case.write("in.jsonl", "\n".join(lines))
    assert case.score(source, "out.jsonl") == 0
    out = case.objects("out.jsonl")
    assert [row["error"] is None for row in out] == [True] + [False] * 6 + [True]
    assert "row 2 is not a JSON object" in out[1]["error"]["message"]
    assert out[3]["error"]["param"] == "features.x"
    assert out[3]["y"] == 1
    assert [row["label"] for row in out[1:7]] == [None] * 6


def test_a_step_that_fails_is_its_rows_error(case: Case) -> None:
    case.runner.fail_result = {0}
    source = case.write("in.csv", "x\n" + "".join(f"{i}\n" for i in range(200)))
    assert case.score(source, "out.csv") == 0
    failed = [row["error"] for row in case.rows("out.csv") if row["error"]]
    assert 0 < len(failed) < 200
    assert all(text.startswith("step_failed: ") for text in failed)


def test_when_every_row_fails_the_exit_code_says_so(case: Case) -> None:
    assert case.score(case.write("in.csv", "y\n1\n2\n"), "out.csv") == 1
    assert case.score(case.write("none.csv", "x\n"), "out.csv") == 0
    assert case.rows("out.csv") == []


def test_labels_of_several_tokens(case: Case) -> None:
    template = FakeTemplate(labels=(FakeLabel("good", " fine"), FakeLabel("bad", " not")))
    source = case.write("in.csv", "x\n3\n4\n")
    assert case.score(source, "out.csv", language=byte_language(templates={"toy": template})) == 0
    for row in case.rows("out.csv"):
        probabilities = expected(f"x={row['x']}>", (" fine", " not"))
        assert [float(row["prob_good"]), float(row["prob_bad"])] == pytest.approx(probabilities, rel=1e-5)


def test_labels_given_and_a_model_without_a_template(case: Case) -> None:
    bare = byte_language(templates={})
    source = case.write("in.jsonl", '{"text":"abc"}\n')
    assert case.score(source, "out.jsonl", language=bare, labels=["Y", "N"]) == 0
    (row,) = case.objects("out.jsonl")
    assert list(row["probabilities"].values()) == pytest.approx(expected("abc", ("Y", "N")))
    with pytest.raises(ValueError, match="at least two are needed"):
        case.score(source, "out.jsonl", language=bare)


def test_a_row_that_the_engine_refuses_fails_alone(case: Case) -> None:
    """65 tokens would fit the context, but not a cache of four pages."""
    case.runner = FakeRunner(num_pages=5, buckets=[b for b in FakeRunner().buckets if b.tokens <= 64])
    rows = [{"text": "a" * 10}, {"text": "a" * 65}, {"text": "b" * 10}]
    source = case.write("in.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert case.score(source, "out.jsonl", config=EngineConfig(max_context=512)) == 0
    out = case.objects("out.jsonl")
    assert [row["error"] and row["error"]["code"] for row in out] == [None, "context_length_exceeded", None]


def test_a_small_queue_is_waited_for(case: Case) -> None:
    source = case.write("in.csv", "x\n" + "".join(f"{i}\n" for i in range(300)))
    for num_rows in (64, 7):  # a chunk of 64 rows, and only a part of one
        case.runner = FakeRunner()
        config = EngineConfig(max_context=512, max_queue_rows=num_rows)
        assert case.score(source, "out.csv", config=config) == 0
        assert [row["error"] for row in case.rows("out.csv")] == [""] * 300


@pytest.mark.parametrize(
    ("name", "text", "out", "message"),
    [
        ("in.txt", "x\n1\n", "out.csv", r"in.txt: cannot read .txt; known: .csv, .jsonl"),
        ("in.csv", "x\n1\n", "out.xml", r"cannot write .xml; known: .csv, .jsonl, .parquet"),
        ("in.csv", "x\n1\n", "in.csv", "is the input"),
        ("in.csv", "", "out.csv", "names the columns of a CSV file"),
        ("in.csv", "x," + "a" * 200_000 + "\n1,2\n", "out.csv", "the first line is not CSV: field larger"),
        ("in.csv", "x,x\n1,2\n", "out.csv", "a column is there twice: 'x'"),
        ("in.csv", "x,label,tier\n1,2,3\n", "out.csv", "columns that the output adds: label, tier"),
        ("in.jsonl", '{"x":1,"error":2}\n', "out.jsonl", "columns that the output adds: error"),
        ("in.jsonl", '{"x":1,"prob_bad":2}\n', "out.csv", "columns that the output adds: prob_bad"),
        ("in.csv", b"x,\xff\n1,2\n", "out.csv", "not UTF-8"),
    ],
)
def test_what_cannot_work_is_refused_and_leaves_no_file(
    case: Case, name: str, text: str | bytes, out: str, message: str
) -> None:
    source = case.write(name, text)
    with pytest.raises(ValueError, match=message):
        case.score(source, out)
    assert [path.name for path in case.directory.iterdir()] == [name]


def test_missing_files_and_directories(case: Case) -> None:
    source = case.write("in.csv", "x\n1\n")
    with pytest.raises(FileNotFoundError, match="is not a file"):
        case.score(case.directory / "no.csv", "out.csv")
    with pytest.raises(FileNotFoundError, match="directory does not exist"):
        case.score(source, "no/out.csv")


def test_an_old_output_stays_until_the_new_one_is_complete(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    old = case.write("out.jsonl", "old")
    source = case.write("in.jsonl", '{"x":1}\n' * 100)
    writes = iter([JsonlSink.write] * 70)

    def write(sink: JsonlSink, record: Record, score: ScoreOfRow) -> None:
        next(writes, full)(sink, record, score)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(JsonlSink, "write", write)
        with pytest.raises(OSError, match="no space"):
            case.score(source, "out.jsonl")
    assert old.read_text() == "old"
    assert sorted(path.name for path in case.directory.iterdir()) == ["in.jsonl", "out.jsonl"]
    case.runner = FakeRunner()
    case.score(case.write("in2.jsonl", '{"x":1}\n'), "out.jsonl")
    assert len(case.objects("out.jsonl")) == 1


def test_jsonl_to_csv_has_every_rows_columns(case: Case) -> None:
    source = case.write("in.jsonl", '{"x":1,"a":[1,"é"]}\n{"x":2.5,"b":true}\n')
    assert case.score(source, "out.csv") == 0
    rows = case.rows("out.csv")
    assert [(r["x"], r["a"], r["b"]) for r in rows] == [("1", '[1, "é"]', ""), ("2.5", "", "true")]


def test_parquet_has_types(case: Case) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    source = case.write("in.csv", "x,amount,name,code\n1,2.5,a,007\n2,3,b,1\n3,,c,\n")
    assert case.score(source, "out.parquet") == 0
    table = pq.read_table(case.directory / "out.parquet")
    assert {f.name: str(f.type) for f in table.schema} == {
        "x": "int64", "amount": "double", "name": "string", "code": "string", "label": "string",
        "prob_good": "double", "prob_bad": "double", "tier": "string", "error": "string",
    }  # fmt: skip
    rows = table.to_pylist()
    assert [r["amount"] for r in rows] == [2.5, 3.0, None]
    assert [r["code"] for r in rows] == ["007", "1", ""]
    assert [r["prob_good"] for r in rows] == pytest.approx([expected(f"x={i}>")[0] for i in (1, 2, 3)])


def test_parquet_without_pyarrow_says_what_to_do(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'tidegate\[parquet\]'"):
        case.score(case.write("in.csv", "x\n1\n"), "out.parquet")
