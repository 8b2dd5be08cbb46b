"""Templates: rendering, the column at fault, labels and the decision, files that do not fit together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.template import Label, Template, TemplateError

GOOD_BAD = """
[labels]
good = {text = " good", value = 0}
bad = {text = " bad", value = 1, positive = true}
"""
FILE = (
    """
name = "t"
text = "100% of {purpose}: {amount} {size} =>"
threshold = 0.3
[columns]
amount = "number"
months = "number"
purpose = "text"
[words.size]
value = {divide = ["amount", "months"]}
edges = [0, 10, 100.5]
"""
    + GOOD_BAD
)
ROW = {"amount": 120, "months": 12, "purpose": "car", "unused": object()}


def load(text: str, tmp_path: Path) -> Template:
    path = tmp_path / "template.toml"
    path.write_text(text)
    return Template.load(path)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return load(FILE, tmp_path_factory.mktemp("template"))


def test_facts(template: Template) -> None:
    assert template.name == "t"
    assert template.columns == ("amount", "months", "purpose")
    assert template.labels == (Label("good", " good", 0), Label("bad", " bad", 1, positive=True))
    assert template.threshold == 0.3
    assert template.label_column == "label"


@pytest.mark.parametrize("amount", [120, 120.0, "120", "120.0", " 1.2e2 ", "+120", "120."])
def test_a_number_may_be_spelt_as_it_likes(template: Template, amount: object) -> None:
    assert template.render({**ROW, "amount": amount}) == "100% of car: 120 size=2 =>"


def test_text_columns(template: Template) -> None:
    assert template.render({**ROW, "purpose": " 新车 %s {amount} "}) == "100% of 新车 %s {amount}: 120 size=2 =>"
    assert template.render({**ROW, "purpose": 7}) == template.render({**ROW, "purpose": "7"})


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("amount", None, "missing"),
        ("amount", "", "missing"),
        ("amount", "  ", "missing"),
        ("amount", "abc", "must be a number, got 'abc'"),
        ("amount", "12abc" + "x" * 500, "must be a number"),
        ("amount", "1_000", "must be a number"),
        ("amount", "0x10", "must be a number"),
        ("amount", "１２", "must be a number"),
        ("amount", "nan", "must be a number"),
        ("amount", "inf", "must be a number"),
        ("amount", float("nan"), "not finite"),
        ("amount", float("-inf"), "not finite"),
        ("amount", "1e999", "not finite"),
        ("amount", 10**400, "not finite"),
        ("amount", "9" * 5000, "not finite"),
        ("amount", True, "must be a number, got bool"),
        ("amount", [120], "must be a number, got list"),
        ("amount", {"a": 1}, "must be a number, got dict"),
        ("purpose", None, "missing"),
        ("purpose", " ", "missing"),
        ("purpose", False, "must be text, got bool"),
        ("purpose", ["car"], "must be text, got list"),
    ],
)
def test_an_unusable_value_names_its_column(template: Template, column: str, value: object, message: str) -> None:
    with pytest.raises(TemplateError, match=message) as caught:
        template.render({**ROW, column: value})
    assert caught.value.column == column
    assert column in str(caught.value)
    assert len(str(caught.value)) < 120


def test_an_absent_column_is_missing(template: Template) -> None:
    with pytest.raises(TemplateError, match="'months' is missing"):
        template.render({"amount": 1, "purpose": "x"})
    with pytest.raises(TemplateError, match="'amount' is missing"):
        template.render({})


@given(
    st.integers(-(10**15), 10**15) | st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(10**15), 10**15) | st.floats(allow_nan=False, allow_infinity=False),
)
def test_strings_and_numbers_give_one_text(template: Template, amount: float, months: float) -> None:
    row = {**ROW, "amount": amount, "months": months}
    try:
        text = template.render(row)
    except TemplateError as error:
        assert "too large" in str(error)  # noqa: PT017 - a huge ratio is the other allowed outcome
        return
    assert template.render({**row, "amount": repr(amount), "months": repr(months)}) == text
    ratio = amount / months if months else 0.0
    assert text.endswith(f" size={sum(edge <= ratio for edge in (0, 10, 100.5))} =>")


class TestDecision:
    def test_threshold_is_of_the_positive_label(self, template: Template) -> None:
        assert template.decide({"good": 0.7, "bad": 0.3}) == "bad"
        assert template.decide({"good": 0.7001, "bad": 0.2999}) == "good"

    def test_several_labels(self, tmp_path: Path) -> None:
        labels = '[labels]\na = {text=" a", value="x"}\nb = {text=" b", value="y"}\nc = {text=" c", value="z"}\n'
        template = load('name="t"\ntext="{n}"\n[columns]\nn="number"\n' + labels, tmp_path)
        assert template.decide({"a": 0.3, "b": 0.4, "c": 0.3}) == "b"
        positive = labels.replace('"x"}', '"x", positive=true}')
        template = load('name="t"\ntext="{n}"\nthreshold=0.25\n[columns]\nn="number"\n' + positive, tmp_path)
        assert template.decide({"a": 0.25, "b": 0.4, "c": 0.35}) == "a"
        assert template.decide({"a": 0.2, "b": 0.3, "c": 0.5}) == "c"

    @pytest.mark.parametrize("value", [1, 1.0, "1", "1.0", " 1 "])
    def test_label_of_a_data_value(self, template: Template, value: object) -> None:
        assert template.label_of(value).name == "bad"

    @pytest.mark.parametrize("value", [2, "", None, "bad", True, "nan"])
    def test_no_label(self, template: Template, value: object) -> None:
        with pytest.raises(TemplateError, match="allowed are 0, 1"):
            template.label_of(value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "t"', "", "name"),
        ("threshold = 0.3", "threshold = 1.5", "threshold: got 1.5"),
        ("threshold = 0.3", "threshhold = 0.3", "threshhold"),
        ("threshold = 0.3", 'threshold = "high"', "threshold"),
        ("{purpose}", "{nothing}", "{nothing} is neither"),
        ('amount = "number"', 'amount = "money"', "columns"),
        ("[words.size]", "[words.amount]", "words.amount: a column has the same name"),
        ("edges = [0, 10, 100.5]", "edges = [0, 10, 10]", "words.size.edges"),
        ("edges = [0, 10, 100.5]", "edges = [0, inf]", "words.size.edges"),
        ('["amount", "months"]', '["amount", "purpose"]', "words.size.value: 'purpose' is not a column of numbers"),
        ('["amount", "months"]', '["amount"]', "words.size.value: divide takes 2 arguments, got 1"),
        ('{divide = ["amount", "months"]}', '{eval = ["amount"]}', "words.size.value: got"),
        ('{divide = ["amount", "months"]}', '{sum = "amount"}', "words.size.value: got"),
        ('{divide = ["amount", "months"]}', "{sum = []}", "words.size.value: got"),
        ('{divide = ["amount", "months"]}', "3", "value"),
        ('bad = {text = " bad", value = 1, positive = true}', "", "at least two"),
        ("value = 0}", "value = 0, positive = true}", "only one may be positive"),
        ("value = 0}", "value = 1}", "two have the same value"),
        ('" good"', '" bad"', "two have the same text"),
        ('" good"', '""', "a text is empty"),
        ('name = "t"', "name =", "template.toml"),
    ],
)
def test_files_that_do_not_fit_together(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in FILE
    with pytest.raises(TemplateError) as caught:
        load(FILE.replace(old, new), tmp_path)
    assert message in str(caught.value)
    assert "template.toml" in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="nowhere"):
        Template.load(tmp_path / "nowhere.toml")


def test_features_may_be_any_mapping(template: Template) -> None:
    class Features(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return ROW[key]

        def __iter__(self) -> Any:
            return iter(ROW)

        def __len__(self) -> int:
            return len(ROW)

    assert template.render(Features()) == template.render(ROW)


def test_an_example_must_render(tmp_path: Path) -> None:
    example = '[example]\namount = 5\nmonths = 2\npurpose = "car"\n'
    template = load(FILE + example, tmp_path)
    assert template.render(template.example) == template.render({"amount": "5", "months": 2.0, "purpose": "car"})
    assert load(FILE, tmp_path).example == {}
    with pytest.raises(TemplateError, match=r"example: .*'months'") as caught:
        load(FILE + example.replace("months = 2\n", ""), tmp_path)
    assert caught.value.column == "months"
