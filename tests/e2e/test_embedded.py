"""The model that ships, over HTTP: real rows get probabilities that separate, and the other endpoints work too."""

import csv
import itertools
from pathlib import Path

import openai

from tests.fakes_http import Served

ROWS = Path(__file__).resolve().parents[2] / "data" / "credit_default" / "test.csv"


def test_real_rows_are_separated(embedded: Served) -> None:
    with ROWS.open(newline="") as file:
        rows = list(itertools.islice(csv.DictReader(file), 400))
    results = embedded.post("/v1/score", {"inputs": [{"features": row} for row in rows]}).json["results"]
    risks = [result["probabilities"]["bad"] for result in results]
    bad = [risk for risk, row in zip(risks, rows, strict=True) if row["default"] == "1"]
    good = [risk for risk, row in zip(risks, rows, strict=True) if row["default"] == "0"]
    wins = sum((b > g) + (b == g) / 2 for b in bad for g in good) / (len(bad) * len(good))
    assert wins > 0.7
    assert {result["label"] for result in results} == {"good", "bad"}


def test_numbers_strings_and_unused_columns_score_alike(embedded: Served) -> None:
    with ROWS.open(newline="") as file:
        row = next(csv.DictReader(file))
    used = {name: row[name] for name in embedded.language.templates["credit-mini"].columns}
    numbers = {name: float(value) for name, value in used.items()}
    inputs = [{"features": each} for each in (row, numbers, used, {**row, "note": [1]})]
    results = embedded.post("/v1/score", {"inputs": inputs}).json["results"]
    assert len({result["probabilities"]["bad"] for result in results}) == 1
    missing = embedded.post("/v1/score", {"inputs": [{"features": {**used, "age": None}}, *inputs]}).json["results"]
    assert missing[0]["error"]["param"] == "features.age"
    assert "error" not in missing[1]


def test_the_openai_client_talks_to_it(embedded: Served) -> None:
    with openai.OpenAI(base_url=f"{embedded.url}/v1", api_key="none", max_retries=0) as client:
        text = client.completions.create(model="credit-mini", prompt=" ", max_tokens=8, temperature=0, logprobs=3)
        assert text.usage is not None
        assert text.usage.completion_tokens <= 8
        stream = client.chat.completions.create(
            model="credit-mini", messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True
        )
        assert [c.finish_reason for chunk in stream for c in chunk.choices if c.finish_reason][-1] in ("stop", "length")
