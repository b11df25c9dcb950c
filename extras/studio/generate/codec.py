"""Prompts to tokens, and tokens to text one by one, never half a character. Torch-free."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.prepare.vocabulary import KNOWN_ENDS, byte_tokenizer, guarded, parse_tokenizer, valid_text

TOKENIZER = "tokenizer.json"
_BROKEN = "\ufffd"


class TextCodec:
    """A tokenizer as generation needs it.

    Args:
        tokenizer: Content of a tokenizer.json; b"" for bytes.
        ends: Tokens that end a text; none: those that have a known name.
        special: Whether prompts get what the tokenizer puts around a text, as models of a hub expect it.
        name: What errors call it.

    Attributes:
        ends: Tokens that end a text.

    Raises:
        ConfigError: The library is not installed, or the file is no tokenizer.
    """

    def __init__(
        self, tokenizer: bytes, ends: Sequence[int] = (), *, special: bool = False, name: str = TOKENIZER
    ) -> None:
        is_bytes = not tokenizer or tokenizer == byte_tokenizer()[TOKENIZER]
        self._library: Any = None if is_bytes else parse_tokenizer(tokenizer, name)
        self._special, self.name = special, "bytes" if is_bytes else name
        self.ends = frozenset(ends) or self._known_ends()

    def _known_ends(self) -> frozenset[int]:
        if self._library is None:
            return frozenset({0})  # what `Vocabulary` puts behind a document
        found = (self._library.token_to_id(name) for name in KNOWN_ENDS)
        return frozenset([number for number in found if number is not None][:1])

    def number(self, token: str) -> int:
        """Return the number of a token of that name; ConfigError where there is none."""
        found = None if self._library is None else self._library.token_to_id(token)
        if found is None:
            raise ConfigError(f"the tokenizer {self.name} has no token {token!r}", expected="the name of a token")
        return int(found)

    def encode(self, prompt: str, vocab: int) -> list[int]:
        """Return the tokens of a prompt; an empty one is a text that begins: an end token alone.

        Args:
            prompt: Any text.
            vocab: Tokens that the model has.

        Raises:
            ConfigError: The model has no such token: the tokenizer is of another model.
        """
        if self._library is None:
            tokens = list(prompt.encode("utf-8", "surrogateescape"))
        else:
            text, library = valid_text(prompt), self._library
            work = lambda: library.encode(text, add_special_tokens=self._special).ids  # noqa: E731 -- a line
            tokens = list(guarded(work, f"the tokenizer {self.name} cannot encode a prompt"))
        tokens = tokens or sorted(self.ends)[:1]
        if not tokens:
            raise ConfigError("the prompt is empty", found=f"no token, and {self.name} has none that ends a text")
        if max(tokens) >= vocab:
            raise ConfigError(
                f"the tokenizer {self.name} is not that of the model",
                found=f"token {max(tokens)} in the prompt",
                expected=f"0 to {vocab - 1} (model.vocab)",
                remedy="give the tokenizer that the model was trained with: --tokenizer FILE",
            )
        return tokens

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        """Return what turns the tokens behind those of `before` into text."""
        if self._library is None:
            return ByteStream()
        return LibraryStream(self._library, before)


class TextStream:
    """Turns tokens into text as they come."""

    def push(self, token: int) -> str:
        """Return the characters that one more token completes; "" while the last one is not whole."""
        raise NotImplementedError

    def finish(self) -> str:
        """Return what is left: U+FFFD for a character that was never completed."""
        raise NotImplementedError


class ByteStream(TextStream):
    """Tokens are bytes; others say nothing."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """See TextStream."""
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def finish(self) -> str:
        """See TextStream."""
        return self._decoder.decode(b"", final=True)


class LibraryStream(TextStream):
    """Tokens of a tokenizer.json: decoded with those before them, since some join only together.

    Args:
        before: Tokens in front of the first.
    """

    _MOST = 64
    """Tokens after which text that does not become whole is shown as it is: it is no character."""

    def __init__(self, tokenizer: Any, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._known, self._new = list(before)[-8:], list[int]()

    def push(self, token: int) -> str:
        """See TextStream."""
        self._new.append(token)
        text = self._text()
        if text.endswith(_BROKEN) and len(self._new) < self._MOST:
            return ""
        return self._settled(text)

    def finish(self) -> str:
        """See TextStream."""
        return self._settled(self._text())

    def _text(self) -> str:
        before, after = (self._tokenizer.decode(part) for part in (self._known, self._known + self._new))
        return str(after[len(before) :])

    def _settled(self, text: str) -> str:
        if text:
            self._known, self._new = self._new, []
        return text


def codec_of_files(files: Mapping[str, bytes], *, special: bool, name: str) -> TextCodec | None:
    """Return the codec of a tokenizer.json and what lies beside it; None where there is no tokenizer.json.

    Raises:
        ConfigError: See TextCodec.
    """
    if TOKENIZER not in files:
        return None
    return TextCodec(files[TOKENIZER], _ends(files), special=special, name=name)


def _ends(files: Mapping[str, bytes]) -> list[int]:
    """Return the tokens that end a text, as config.json and generation_config.json say."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads(files.get(name, b"{}")).get("eos_token_id")
        except (ValueError, AttributeError):
            continue
        found += [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]
    return found
