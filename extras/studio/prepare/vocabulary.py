"""Text to tokens: bytes, any tokenizer.json (the `tokenizers` library), or a byte-level BPE trained on the text. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flashckpt.errors import ConfigError, DataError, FlashckptError
from flashckpt.trainer.data.prepared import BYTES, tokenizer_at, tokenizer_digest


def byte_tokenizer() -> dict[str, bytes]:
    """Return the files of a tokenizer that gives each byte of UTF-8 its own number, without special tokens."""
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {_character(byte): byte for byte in range(256)}, "merges": [],
        },
    }  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
    }


def _character(byte: int) -> str:
    """Return the character that stands for a byte, as GPT-2 chose them: itself where it can be printed, else from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(one not in printable for one in range(byte)))


END_TOKEN = "<|endoftext|>"  # noqa: S105 -- a token of text
"""What a BPE that is trained here puts between documents."""
KNOWN_ENDS = (END_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|end|>", "[EOS]", "[SEP]")
"""What tokenizers call the token that ends a text, the likeliest first."""

Tokens = npt.NDArray[np.uint32]


class Vocabulary:
    """Encodes documents; each ends with the end token.

    Args:
        text: Content of a tokenizer.json; b"" for bytes.
        end_token: Name of the end token; "": the first known one.
        name: What errors call it.

    Raises:
        ConfigError: the library is not installed, the file is no tokenizer, or it has no such token.
    """

    def __init__(self, text: bytes, end_token: str = "", *, name: str = "bytes") -> None:
        self.name, self._tokenizer, self.size, self.end = name, None, BYTES, 0
        self.files = byte_tokenizer() if not text else {"tokenizer.json": text}
        self.digest = tokenizer_digest(text, end_token)
        if text:
            self._tokenizer = parse_tokenizer(text, name)
            self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
            self.end = self._number_of_end(end_token)
        elif end_token:
            raise ConfigError("data.end_token has no effect on bytes", found=end_token, expected="a tokenizer")

    @property
    def is_bytes(self) -> bool:
        """Whether the tokens of a text are its bytes."""
        return self._tokenizer is None

    def _number_of_end(self, wanted: str) -> int:
        assert self._tokenizer is not None
        for name in (wanted,) if wanted else KNOWN_ENDS:
            number = self._tokenizer.token_to_id(name)
            if number is not None:
                return int(number)
        raise ConfigError(
            f"the tokenizer {self.name} has no token that ends a document",
            found=f"none of {wanted or ', '.join(KNOWN_ENDS)}",
            expected="the name of one of its tokens",
            remedy="set data.end_token",
        )

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text and its end token, uint32; in parallel over the cores."""
        if self._tokenizer is None:
            return [
                np.frombuffer(text.encode("utf-8", "replace") + b"\0", np.uint8).astype(np.uint32) for text in texts
            ]
        tokenizer, valid = self._tokenizer, list(map(valid_text, texts))
        found = self._guarded(lambda: tokenizer.encode_batch_fast(valid, add_special_tokens=False))
        return [np.array([*one.ids, self.end], np.uint32) for one in found]

    def encode_with_bytes(self, texts: Sequence[str]) -> list[tuple[Tokens, Tokens]]:
        """Return for each text its tokens as `encode` does, and how many bytes of its UTF-8 each token is, plus one.

        0 stands for no text: the end token. Bytes that no token is of (white space that a tokenizer drops) count with the
        next one, or with the last; a character that is cut into several tokens counts with the first.
        """
        if self._tokenizer is None:
            found = self.encode(texts)
            return [(one, np.where(np.arange(len(one)) < len(one) - 1, 2, 0).astype(np.uint32)) for one in found]
        tokenizer, valid = self._tokenizer, list(map(valid_text, texts))
        encoded = self._guarded(lambda: tokenizer.encode_batch(valid, add_special_tokens=False))
        return [
            (np.array([*one.ids, self.end], np.uint32), _text_bytes(text, one.offsets))
            for text, one in zip(valid, encoded, strict=True)
        ]

    def _guarded(self, work: Callable[[], Any]) -> Any:
        return guarded(work, f"the tokenizer {self.name} cannot encode a text")

    def number_of(self, token: str) -> int | None:
        """Return the number of a token by its name; None: there is none."""
        number = None if self._tokenizer is None else self._tokenizer.token_to_id(token)
        return None if number is None else int(number)


def _text_bytes(text: str, offsets: Sequence[tuple[int, int]]) -> Tokens:
    """Return bytes plus one of each token whose characters are at `offsets`, and 0 for the end token after them."""
    marks = np.zeros(len(offsets) + 1, np.uint32)
    if len(offsets):
        points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
        before = np.concatenate([[0], np.cumsum(sizes)])
        ends = before[np.maximum.accumulate(np.array([end for _, end in offsets], np.int64))]
        ends[-1] = before[-1]
        marks[:-1] = np.diff(ends, prepend=0) + 1
    return marks


def valid_text(text: str) -> str:
    """Return a text in which halves of characters, which JSON may hold, are "?": no tokenizer takes them."""
    return text.encode("utf-8", "replace").decode()


def guarded(work: Callable[[], Any], problem: str) -> Any:
    """Return what `work` does with the tokenizers library.

    Raises:
        DataError: `problem`; the library raised, whatever it was.
    """
    try:
        return work()
    except FlashckptError:  # of the texts, as they were read
        raise
    except BaseException as error:  # a panic of the library is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(problem, found=f"{type(error).__name__}: {error}"[:300], expected="text in Unicode") from error


def read_vocabulary(place: str, end_token: str) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json or of the folder that has one; bytes for "" and "bytes".

    Raises:
        DataError: the file cannot be read.
        ConfigError: see `Vocabulary`.
    """
    if place in ("", "bytes"):
        return Vocabulary(b"", end_token)
    blob = tokenizer_at(place)
    return Vocabulary(blob.read(0, blob.nbytes), end_token, name=blob.url)


def tokenizer_file(digest: str) -> str:
    """Return the name of the file in which `data prepare` keeps a tokenizer."""
    return f"tokenizer-{digest}.json"


def train_bpe(texts: Iterable[str], size: int) -> bytes:
    """Return the tokenizer.json of a byte-level BPE of `size` tokens, the end token among them.

    Raises:
        ConfigError: the library is not installed.
        DataError: the text is too small for so many tokens.
    """
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    guarded(
        lambda: tokenizer.train_from_iterator(map(valid_text, texts), trainer), "no tokenizer can be made of the text"
    )
    if tokenizer.get_vocab_size() != size:
        raise DataError(
            "the text is too small for this vocabulary",
            found=f"{tokenizer.get_vocab_size()} tokens can be made of it",
            expected=f"{size} tokens (data.bpe)",
            remedy="lower data.bpe, or add text",
        )
    return str(tokenizer.to_str()).encode()


def parse_tokenizer(text: bytes, name: str) -> Any:
    """Return the tokenizer of the library, which neither cuts nor pads.

    Raises:
        ConfigError: the library is not installed, or `text` is no tokenizer.json.
    """
    try:
        json.loads(text)
        tokenizer = _library().Tokenizer.from_str(text.decode())
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{name} is no tokenizer", found=str(error), expected="a tokenizer.json of the tokenizers library"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the tokenizers library is needed for tokens other than bytes",
            found=str(error),
            remedy="pip install 'flashckpt[tokenizers]', or leave data.tokenizer and data.bpe out",
        ) from error
    return tokenizers
