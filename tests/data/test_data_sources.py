import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from s2rl.config.schema import ColumnsConfig, DataSource
from s2rl.data.rows import load_rows
from s2rl.data.sources import open_source, plain
from s2rl.errors import DataError

FIXTURES = Path(__file__).parent / "fixtures"
QA = ColumnsConfig(prompt="question", answer="answer")
ROWS = [{"prompt": f"{i} + 1 =", "answer": i + 1} for i in range(5)]
PLAIN = ColumnsConfig(answer="answer")


def load(path, columns=PLAIN, **source):
    return load_rows([DataSource(path=str(path), **source)], columns=columns)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def refusal(path, columns=PLAIN, **source):
    with pytest.raises(DataError) as caught:
        load(path, columns, **source)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_verl_parquet_is_read_as_it_is():
    rows = load(FIXTURES / "aime2024_verl.parquet", ColumnsConfig())
    assert len(rows) == 3
    prompt = rows.prompt(0)
    (message,) = prompt.messages
    assert message.role == "user" and message.content.startswith("Solve the following math problem step by step.")
    assert (prompt.text, prompt.answer, prompt.data_source) == (None, "204", "math_dapo")
    assert prompt.extra["index"] == 60 and type(prompt.extra["index"]) is int
    assert list(rows.data_sources) == ["math_dapo"]


def test_gsm8k_jsonl_is_read_through_its_column_names():
    rows = load(FIXTURES / "gsm8k.jsonl", QA)
    assert len(rows) == 4
    assert rows[0].text.startswith("Janet") and rows[0].answer.endswith("#### 18")
    assert (rows[0].messages, rows[0].data_source, rows[0].extra) == (None, "", {})


def test_a_json_array_is_read():
    rows = load(FIXTURES / "math500.json", ColumnsConfig(prompt="problem", answer="answer", data_source="unique_id"))
    assert [r.answer for r in rows] == [r"\left( 3, \frac{\pi}{2} \right)", "p - q", r"\frac{14}{3}"]
    assert rows[0].data_source == "test/precalculus/807.json"


def test_json_lines_in_a_file_named_json_are_read(tmp_path):
    assert len(load(write_jsonl(tmp_path / "rows.json", ROWS))) == 5


def test_the_same_rows_give_the_same_digest_in_every_format(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=2))
    files = [tmp_path / "rows.parquet", tmp_path / "rows.json", write_jsonl(tmp_path / "rows.jsonl", ROWS)]
    assert len({load(f).digest for f in files}) == 1
    assert load(files[0], limit=4).digest != load(files[0]).digest


def test_rows_of_parquet_come_from_any_row_group(tmp_path):
    rows = [{"prompt": f"{i}?", "answer": i, "unused": "x" * 10} for i in range(2500)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=700)
    loaded = load(tmp_path / "rows.parquet")
    assert [loaded[i].answer for i in (0, 699, 700, 2499)] == ["0", "699", "700", "2499"]


def test_sources_are_put_one_after_the_other_and_limits_cut_each(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", ROWS)
    b = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "b", "answer": "b"}])
    rows = load_rows([DataSource(path=str(a), limit=2), DataSource(path=str(b), limit=9)], columns=PLAIN)
    assert [r.answer for r in rows] == ["1", "2", "b"]
    assert rows.where(1).endswith("a.jsonl, line 2") and rows.where(2).endswith("b.jsonl, line 1")


def test_a_bad_row_beyond_the_limit_does_not_matter(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\nnot json\n")
    assert len(load(path, limit=1)) == 1


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(r).encode() for r in ROWS) + b"\r\n\n")
    rows = load(path)
    assert [r.answer for r in rows] == ["1", "2", "3", "4", "5"]
    assert rows.where(1).endswith("line 3")


def test_a_malformed_line_is_named_by_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + '\n\n{"prompt": "2 +\n')
    assert f"{path}, line 3: not valid JSON" in refusal(path)
    path.write_text(json.dumps(ROWS[0]) + '\n["a"]\n')
    assert f"{path}, line 2: a JSON object is needed, not an array" in refusal(path)
    path.write_bytes(b'{"prompt": "\xff", "answer": 1}\n')
    assert f"{path}, line 1: not UTF-8 text" in refusal(path)


def test_a_json_file_that_is_no_array_of_objects_is_refused(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("[1, 2")
    assert "not valid JSON" in refusal(path)
    path.write_text("3")
    assert "a JSON array of objects is needed, not a number" in refusal(path)
    path.write_text('[{"prompt": "a", "answer": 1}, 3]')
    assert "row 1: a JSON object is needed" in refusal(path)


def test_a_missing_file_is_refused_with_what_the_folder_holds(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    assert "no such file" in refusal(tmp_path / "tran.jsonl") and "train.jsonl" in refusal(tmp_path / "tran.jsonl")
    assert "does not exist either" in refusal(tmp_path / "nowhere" / "train.parquet")


def test_a_misspelled_relative_file_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in ("data/train", "a/b/c", "../train", "train.jsonl"):
        assert "no such file" in refusal(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_an_empty_file_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    assert "empty" in refusal(tmp_path / name)


def test_a_file_without_rows_is_refused(tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "rows.jsonl").write_text("\n\n")
    for name in ("rows.parquet", "rows.json", "rows.jsonl"):
        assert "the data set is empty" in refusal(tmp_path / name)


def test_an_unknown_extension_lists_the_allowed_ones(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n")
    assert "unknown extension '.csv'; allowed are .parquet, .jsonl, .json" in refusal(tmp_path / "rows.csv")


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "rows.parquet").write_text("hello, this is no parquet file")
    assert "not a readable parquet file" in refusal(tmp_path / "rows.parquet")


def test_split_and_subset_are_refused_for_files(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    assert "`split: train` is for named data sets" in refusal(path, split="train")
    assert "`subset: main` is for named data sets" in refusal(path, subset="main")


@pytest.fixture
def offline_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "named"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS)
    write_jsonl(folder / "test.jsonl", ROWS[:2])
    return folder


def test_a_data_set_is_read_by_name_and_split(offline_datasets):
    rows = load(offline_datasets, split="test")
    assert [r.text for r in rows] == ["0 + 1 =", "1 + 1 ="]
    assert [r.answer for r in rows] == ["1", "2"]


def test_a_data_set_with_several_splits_asks_for_one(offline_datasets):
    assert "`split` is needed; the data set has: train, test" in refusal(offline_datasets)


def test_a_data_set_that_cannot_be_loaded_is_a_message_not_a_traceback(offline_datasets):
    assert "could not load it" in refusal(offline_datasets, split="validation")


def test_only_the_columns_that_are_used_are_kept_in_memory(tmp_path):
    pq.write_table(pa.Table.from_pylist([{**r, "image": "x" * 100} for r in ROWS]), tmp_path / "rows.parquet")
    table = open_source(DataSource(path=str(tmp_path / "rows.parquet")), columns=("prompt", "answer"))
    assert set(table[0]) == {"prompt", "answer"}


def test_numpy_and_arrow_values_become_plain_python_at_any_depth():
    value = {
        "i": np.int64(3),
        "f": np.float64(0.5),
        "b": np.bool_(True),
        "s": np.str_("text"),
        "a": np.array([[1, 2]]),
        "o": np.array([{"role": np.str_("user")}], dtype=object),
        "p": pa.scalar({"x": 1}),
        "t": (1, None),
    }
    result = plain(value)
    assert result == {
        "i": 3,
        "f": 0.5,
        "b": True,
        "s": "text",
        "a": [[1, 2]],
        "o": [{"role": "user"}],
        "p": {"x": 1},
        "t": [1, None],
    }
    assert [type(result[k]) for k in "ifbs"] == [int, float, bool, str]
    assert type(result["o"][0]["role"]) is str
