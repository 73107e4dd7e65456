"""Tokens are those of the model's own tokenizer, however long the text."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from simulator.documents.problems import InputError
from tests.worker.warm import ROOT
from worker.data.sources.tokenize_text import convert_text, open_tokenizer, pieces_of

END = "<|endoftext|>"
TEXT = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")


def byte_level() -> tokenizers.Tokenizer:
    """Train a small BPE like GPT-2's."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    return made


def with_prefix() -> tokenizers.Tokenizer:
    """Train one that puts a space before a text, and so has no place to cut."""
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["</s>"], unk_token="</s>", show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    byte_level().save(str(found / "tokenizer.json"))
    return found


@pytest.fixture(scope="module")
def encoders():
    return byte_level(), with_prefix()


def test_tokens_are_those_of_transformers(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=END
    )
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.txt").write_text("Grüße, 世界!\n\n  done", encoding="utf-8")
    count = convert_text([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out", folder)
    tokens = np.load(tmp_path / "out")
    wanted = []
    for name in ("a.txt", "b.txt"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        wanted += [*theirs(text, add_special_tokens=False)["input_ids"], theirs.eos_token_id]
    assert (count, tokens.dtype, tokens.tolist()) == (len(wanted), np.uint16, wanted)


def test_each_line_of_json_is_a_document(folder, tmp_path):
    texts = ["one\ntwo", "", "three"] * 700
    lines = "".join(json.dumps({"text": text, "id": 3}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    convert_text(tmp_path / "a.jsonl", tmp_path / "out", folder / "tokenizer.json")
    made = byte_level()
    end = made.token_to_id(END)
    wanted = [token for text in texts for token in [*made.encode(text).ids, end]]
    assert np.load(tmp_path / "out").tolist() == wanted


@given(
    text=st.text(st.sampled_from("ab \n\t!é1"), max_size=120) | st.just(TEXT[:3000]),
    chunk=st.integers(1, 40),
)
def test_a_long_text_gives_the_tokens_of_the_whole(encoders, text, chunk):
    for encoder in encoders:
        pieces = list(pieces_of(text.splitlines(keepends=True), encoder, chunk=chunk))
        assert [token for piece in pieces for token in piece] == encoder.encode(text).ids


def test_a_long_text_is_converted_in_pieces_where_that_changes_nothing(encoders):
    lines = TEXT.splitlines(keepends=True)
    by_bytes, prefixed = (len(list(pieces_of(lines, each, chunk=500))) for each in encoders)
    assert by_bytes > 5
    assert prefixed == 1


def test_the_token_at_the_end_of_a_text_is_read_from_the_folder(tmp_path):
    made = byte_level()
    made.add_special_tokens(["<stop>"])
    made.save(str(tmp_path / "tokenizer.json"))
    for config, wanted in [
        ({}, END),
        ({"eos_token": "<stop>"}, "<stop>"),
        ({"eos_token": {"content": "<stop>"}}, "<stop>"),
    ]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert open_tokenizer(tmp_path).end == made.token_to_id(wanted)
    assert open_tokenizer(tmp_path, END).end == made.token_to_id(END)


def test_unusable_tokenizers_and_texts_are_reported(folder, tmp_path):
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("a")
    (tmp_path / "t.json").write_text("{}")
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "a"}\n["text"]\n')
    latin = tmp_path / "latin"
    latin.write_bytes(b"a\n\xff")
    for source, tokenizer, end, told in [
        (text, tmp_path, None, "has no tokenizer.json"),
        (text, tmp_path / "none", None, "none: does not exist"),
        (text, tmp_path / "t.json", None, "t.json: is not a tokenizer of the package"),
        (text, folder, "<stop>", "--end-of-text: has no token '<stop>'"),
        (lines, folder, None, 'a.jsonl: line 2: is not a JSON object with a "text"'),
        (latin, folder, None, "latin: line 2: is not UTF-8"),
        (tmp_path / "none", None, None, "none: cannot be read: No such file"),
    ]:
        with pytest.raises(InputError) as error:
            convert_text(source, out, tokenizer, end_of_text=end)
        assert told in str(error.value)
        assert not out.exists()
    with pytest.raises(InputError, match="cannot be written: No such file"):
        convert_text(text, tmp_path / "no" / "t.bin")
