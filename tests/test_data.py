"""Text, tokens and batches: what is read, what is refused, and that a batch depends on nothing but its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from colrow.data import Bytes, corpus, read, tokenizer_from, train_tokenizer
from colrow.errors import DataError


def test_the_standard_library_is_there_without_data_and_the_same_each_time() -> None:
    text = read(())
    assert 100_000 < len(text) <= 4_100_000
    assert text == read(())


def test_a_folder_gives_its_text_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {
        "b.txt": b"bee",
        "a.md": b"ay",
        "sub/c.py": b"sea",
        ".git/config": b"hidden",
        "image.png": b"\x89PNG\0\0",
        "empty.txt": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
    assert read([tmp_path]) == b"ay\nbee\nsea"
    assert read([tmp_path / "b.txt", tmp_path / "a.md"]) == b"bee\nay"


@pytest.mark.parametrize("kind", ["missing", "empty", "empty folder"])
def test_a_path_without_text_is_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path if kind == "empty folder" else tmp_path / "text"
    if kind == "empty":
        path.write_text("\n")
    with pytest.raises(DataError, match=str(path)):
        read([path])


def test_bytes_there_and_back() -> None:
    tokenizer = train_tokenizer(b"anything", 256)
    assert tokenizer.encode("naïve".encode()).tolist() == list("naïve".encode())
    assert tokenizer.decode(list("naïve".encode())) == "naïve"
    assert isinstance(tokenizer_from(tokenizer.to_text()), Bytes)
    assert tokenizer.encode(b"").numel() == 0


def test_a_bpe_is_shorter_comes_back_and_survives_being_saved() -> None:
    text = b"def add(a, b):\n    return a + b\n" * 50
    tokenizer = train_tokenizer(text, 300)
    tokens = tokenizer.encode(text)
    assert 256 < tokenizer.vocab <= 300
    assert tokens.numel() < len(text) / 2
    assert tokenizer.decode(tokens.tolist()) == text.decode()
    assert tokenizer_from(tokenizer.to_text()).encode(text).tolist() == tokens.tolist()
    assert train_tokenizer(text, 300).to_text() == tokenizer.to_text()


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(DataError, match="--vocab-size: 100 entries"):
        train_tokenizer(b"text", 100)


def test_rows_depend_on_seed_step_and_row_only() -> None:
    text = corpus(torch.arange(5000, dtype=torch.int32), context=8)
    whole = text.batch(7, 3, range(8))
    parts = [text.batch(7, 3, range(first, first + 2)) for first in (0, 2, 4, 6)]
    for side in (0, 1):
        assert torch.equal(torch.cat([part[side] for part in parts]), whole[side])
    assert torch.equal(whole[1], whole[0] + 1)
    assert not torch.equal(text.batch(7, 4, range(8))[0], whole[0])
    assert not torch.equal(text.batch(8, 3, range(8))[0], whole[0])
    assert int(torch.stack([text.batch(0, step, range(8))[1] for step in range(300)]).max()) <= 4749


def test_validation_text_is_apart_and_its_batches_are_always_the_same() -> None:
    text = corpus(torch.arange(5000, dtype=torch.int32), context=8)
    assert text.train.numel() == 4750 and int(text.validation[0]) == 4750
    batches = text.validation_batches(4, 2)
    assert [len(inputs) for inputs, _ in batches] == [4, 4]
    assert int(batches[0][0].min()) == 4750 and int(batches[-1][1].max()) == 4999
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, text.validation_batches(4, 2), strict=True))


def test_little_text_is_enough_and_less_is_an_error() -> None:
    text = corpus(torch.arange(18), context=8)
    assert text.batch(0, 0, range(2))[0].tolist() == [list(range(8))] * 2
    assert len(text.validation_batches(4, 2)) == 1
    with pytest.raises(DataError, match="the text has 17 tokens; training and validation need 9 each"):
        corpus(torch.arange(17), context=8)
