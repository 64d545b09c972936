"""Text to token ids and back: any checkpoint's tokenizer, or one made from the training text.

Every tokenizer is a `tokenizers.Tokenizer` and is saved as `tokenizer.json`, whatever it was read from. What this
module adds is what the file leaves open: which ids begin and end a text, one token for one word, text that streams
without splitting a character, and refusals that name the file, the character or the id.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmcli.errors import TokenizerError, remedy

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<unk>"
PIECE = 1 << 16  # characters encoded at a time: long enough to be fast, short enough to keep memory flat

# GPT-2's pattern never joins a visible character to the space or newline after it: the text may be cut there.
_CUT = re.compile(r"(?<=\S)[ \n]")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_characters() -> list[str]:
    """GPT-2's spelling of each byte: itself where that is visible in Latin-1, else the next character from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


_BYTES = _byte_characters()
_BYTE_OF = {character: byte for byte, character in enumerate(_BYTES)}


class Tokenizer:
    """A `tokenizers.Tokenizer` (`backend`) together with the ids that begin (`bos_id`) and end (`eos_ids`) a text.

    Whether BOS or EOS is added is the backend's post-processor's rule and no other's, as in transformers 5, which
    leaves `add_bos_token` in `tokenizer_config.json` unread where there is a `tokenizer.json`.
    """

    def __init__(self, backend: tokenizers.Tokenizer, bos_id: int | None = None, eos_ids: Iterable[int] = ()) -> None:
        backend.no_truncation()  # a saved truncation or padding belongs to somebody's training run
        backend.no_padding()
        self.backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._special = {id for id, token in self._added.items() if token.special}
        self._units = self._one_token_per_unit()
        self._cuts = self._may_be_cut()
        self._before, self._after = self._additions()
        self.bos_id = bos_id if bos_id is not None or not self._before else self._before[0]
        self.eos_ids = tuple(dict.fromkeys(eos_ids))

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text: the first of `eos_ids`."""
        return self.eos_ids[0] if self.eos_ids else None

    @property
    def add_bos(self) -> bool:
        """Whether `encode` puts BOS before a text by the tokenizer's own rule."""
        return self.bos_id is not None and self.bos_id in self._before

    @cached_property
    def size(self) -> int:
        """The largest id + 1: the rows an embedding needs, also where ids have gaps."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the tokenizer's JSON with sorted keys: equal for equal tokenizers, through save and load."""
        canonical = json.dumps(json.loads(self.backend.to_str()), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of `text`; with `special`, BOS and EOS as the tokenizer's rule adds them.

        Special tokens spelled out in the text are recognised, as in transformers. Raises TokenizerError for a
        character a tokenizer of characters does not know, and for text that is not Unicode (a lone surrogate).
        """
        return self.encode_batch([text], special)[0]

    def encode_batch(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """The ids of each text, as `encode` gives them; long texts and many texts use every core."""
        results: list[list[int]] = [list(self._before) if special else [] for _ in texts]
        for text in texts:
            _require_unicode(text)
        if self._units is not None:
            for ids, text in zip(results, texts, strict=True):
                ids += self._encode_units(text)
        else:
            parts = ((i, part) for i, text in enumerate(texts) for part in (_pieces([text]) if self._cuts else [text]))
            while batch := list(islice(parts, 64)):
                encodings = self.backend.encode_batch_fast([part for _, part in batch], add_special_tokens=False)
                for (i, _), encoding in zip(batch, encodings, strict=True):
                    results[i] += encoding.ids
        if special:
            for ids in results:
                ids += self._after
        return results

    def last_cut(self, text: str) -> int:
        """The last place at which `text` may be cut and its parts encoded apart; 0 where there is none."""
        if not self._cuts and (self._units is None or any(re.search(r"\s", t.content) for t in self._added.values())):
            return 0
        end = len(text)
        while end > 0:  # backwards, so that a long text is not searched from its beginning
            begin = max(0, end - 4096)
            places = [match.start() for match in _CUT.finditer(text, begin, end)]
            if places:
                return places[-1]
            end = begin
        return 0

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`, special tokens left out unless asked for; bytes that are not UTF-8 become U+FFFD."""
        known = [id for id in ids if id >= 0 and not (skip_special and id in self._special)]
        return self.backend.decode(known, skip_special_tokens=False) if known else ""

    def token(self, id: int) -> str:
        """The vocabulary's own spelling of `id` (`▁she`, `Ġking`, `king</w>`), `<row 62>` where it has none."""
        spelling = self._spelling(id)
        return f"<row {id}>" if spelling is None else spelling

    def id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling, or None."""
        try:
            return self.backend.token_to_id(token)
        except (TypeError, UnicodeEncodeError):  # a lone surrogate
            return None

    def one_token(self, text: str) -> int:
        """The id of the one token that is `text`: by the vocabulary's spelling first, else as encoded text.

        Where the tokenizer itself puts a space before a text, `she` and ` she` are the same token. Raises
        TokenizerError for text that is several tokens (it shows them), none, or unknown.
        """
        exact = self.id(text)
        single = self._single(text) if exact is None else exact
        if single is not None:
            return single
        ids = self.encode(text, special=False)
        other = text[1:] if text.startswith(" ") else " " + text
        alternative = self._single(other)
        if alternative is not None:
            change = "Without the" if text.startswith(" ") else "With a"
            hint = f"{change} leading space, {other!r} is one token: {self.token(alternative)!r} (id {alternative})."
        elif len(ids) > 1:
            try:
                tried = self.encode(other, special=False)
            except TokenizerError:
                tried = []
            also = (
                "reads the same" if tried == ids else f"is {len(tried)} tokens" if len(tried) > 1 else "is none either"
            )
            hint = f"{other!r} {also}. Ask for one of the pieces, in this spelling."
        else:
            hint = "Ask for a word of this tokenizer's vocabulary."
        if len(ids) == 1:
            raise TokenizerError(f"{text!r} is unknown to the tokenizer: it reads {self.token(ids[0])!r}", hint)
        pieces = ", ".join(f"{self.token(id)!r} (id {id})" for id in ids[:20]) + (", ..." if len(ids) > 20 else "")
        raise TokenizerError(f"{text!r} is {len(ids)} tokens, not one{': ' if ids else ''}{pieces}", hint)

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and the `tokenizer_config.json` with which transformers gives the same ids.

        Only the first of `eos_ids` has a place there; `generation_config.json` is where the others belong.
        """
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for key, id in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            if id is not None and self._spelling(id) is not None:
                config[key] = self.token(id)
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "tokenizer.json").write_text(self.backend.to_str(pretty=True), "utf-8")
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")

    def _spelling(self, id: int) -> str | None:
        return self.backend.id_to_token(id) if 0 <= id < 1 << 32 else None

    def _single(self, text: str) -> int | None:
        """The id of `text` encoded, if that is one known token; ` she` also as `she` where both read `▁she`."""
        try:
            ids = self.encode(text, special=False)
            if len(ids) != 1 and text.startswith(" "):
                bare = self.encode(text[1:], special=False)
                ids = bare if len(bare) == 1 and self.token(bare[0])[:1] in ("▁", "Ġ") else ids
        except TokenizerError:
            return None
        unknown = getattr(self.backend.model, "unk_token", None)
        return ids[0] if len(ids) == 1 and self.token(ids[0]) != unknown else None

    def _additions(self) -> tuple[list[int], list[int]]:
        """The ids the post-processor puts before and after a text, seen on one token of ordinary text."""
        if self.backend.num_special_tokens_to_add(False) == 0:
            return [], []
        for id in range(self.size):
            text = self.decode([id])
            if inner := self.backend.encode(text, add_special_tokens=False).ids if text else []:
                whole = self.backend.encode(text)
                start = whole.special_tokens_mask.index(0)
                return whole.ids[:start], whole.ids[start + len(inner) :]
        return self.backend.encode("").ids, []

    def _plain_added(self) -> bool:
        """Whether added tokens match just where they are spelled, never looking at the text around them."""
        return not any(token.lstrip or token.rstrip or token.single_word for token in self._added.values())

    def _may_be_cut(self) -> bool:
        """Whether encoding a text in the pieces of `_CUT` is encoding it whole (GPT-2's rule, and ours)."""
        if not isinstance(self.backend.pre_tokenizer, pre_tokenizers.ByteLevel) or self.backend.normalizer is not None:
            return False
        rule = _state(self.backend.pre_tokenizer)
        whole = all(not re.search(r"\s", token.content) for token in self._added.values())
        return bool(rule["use_regex"]) and not rule["add_prefix_space"] and self._plain_added() and whole

    def _one_token_per_unit(self) -> dict[str, int] | bytes | None:
        """The lookup of a tokenizer in which every byte, or every character, is a token of its own; else None.

        Such a vocabulary has no merges (they would make longer tokens): a lookup does the BPE's work, and faster.
        """
        model, splitter = self.backend.model, self.backend.pre_tokenizer
        if not isinstance(model, models.BPE) or self.backend.normalizer is not None or not self._plain_added():
            return None
        if model.byte_fallback or model.fuse_unk or model.end_of_word_suffix or model.continuing_subword_prefix:
            return None
        if splitter is not None and not isinstance(splitter, pre_tokenizers.ByteLevel):
            return None
        vocabulary = self.backend.get_vocab(with_added_tokens=False)
        if splitter is None:
            long = {token for token in vocabulary if len(token) != 1}
            return vocabulary if long <= {UNKNOWN} and model.unk_token in (None, *long) else None
        rule = _state(splitter)
        plain = not rule["use_regex"] and not rule["add_prefix_space"] and model.unk_token is None
        if plain and vocabulary.keys() == _BYTE_OF.keys() and max(vocabulary.values()) < 256:
            return bytes(vocabulary[character] for character in _BYTES)
        return None

    def _encode_units(self, text: str) -> list[int]:
        added = {token.content: id for id, token in self._added.items()}
        longest_first = sorted(added, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if added else [text]
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(added[part])
            elif isinstance(self._units, bytes):
                ids += part.encode().translate(self._units)
            elif self._units is not None:
                ids += self._encode_characters(part, self._units, sum(map(len, parts[:i])))
        return ids

    def _encode_characters(self, text: str, table: dict[str, int], offset: int) -> list[int]:
        unknown = getattr(self.backend.model, "unk_token", None)
        if unknown is not None:
            return [table.get(character, table[unknown]) for character in text]
        try:
            return [table[character] for character in text]
        except KeyError as error:
            position = offset + text.index(error.args[0])
            message = f"the character {error.args[0]!r} (position {position}) is not one of this tokenizer's characters"
            raise TokenizerError(message, "Leave it out, or train with a tokenizer of bytes or BPE.") from None


class Stream:
    """Token ids in, text out as soon as it is certain: the pieces joined are `decode` of all the ids.

    A push looks at a bounded window of ids. What waits for the next push is an unfinished UTF-8 character or, with
    byte fallback (`<0xE2>`), the whole run of such tokens: they are text only if all of them together are UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer._special if skip_special else set()
        decoder = tokenizer.backend.decoder
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes = isinstance(decoder, decoders.ByteLevel)
        self._fallback = decoder is not None and "ByteFallback" in json.dumps(_state(decoder))
        self._window: list[int] = []  # the last ids whose text is known, then those that wait
        self._said = ""  # the window's text that was already returned

    def push(self, id: int) -> str:
        """Take one id; return the text that is now certain, often one token's, sometimes none."""
        token = self._tokenizer._spelling(id)
        if token is None or id in self._skip:
            return ""
        if self._bytes:
            known = all(character in _BYTE_OF for character in token)
            return self._utf8.decode(bytes(_BYTE_OF[character] for character in token) if known else token.encode())
        self._window.append(id)
        return "" if self._fallback and _BYTE_TOKEN.fullmatch(token) else self._say()

    def finish(self) -> str:
        """Return the text that was still waiting; the next push begins a new text."""
        rest = self._utf8.decode(b"", final=True) if self._bytes else self._say()
        self._window, self._said = [], ""
        return rest

    def _say(self) -> str:
        # One token that has text is context enough: it takes up the leading space that some decoders strip.
        text = self._tokenizer.decode(self._window, skip_special=False)
        new = text[len(self._said) :]
        if new:
            self._window = self._window[-1:]
            text = self._tokenizer.decode(self._window, skip_special=False)
        self._said = text
        return new


def check_ids(ids: Iterable[int], vocab_size: int, tokenizer_size: int | None = None) -> None:
    """Refuse an id outside `0 .. vocab_size - 1` before it reaches the embedding: TokenizerError names it."""
    bad = next((id for id in ids if not 0 <= id < vocab_size), None)
    if bad is not None:
        also = "" if tokenizer_size is None else f"; the tokenizer's size is {tokenizer_size}"
        message = f"token id {bad} has no row in the model: its vocab_size is {vocab_size}{also}"
        hint = f"Ids go from 0 to {vocab_size - 1:,}; a text's come from the tokenizer the model was trained with."
        raise TokenizerError(message, hint)


def bytes_tokenizer() -> Tokenizer:
    """A token for each byte, id = byte, and `<|endoftext|>` (id 256) to end a text."""
    backend = _byte_level({character: byte for byte, character in enumerate(_BYTES)}, use_regex=False)
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend, eos_ids=[256])


def characters(texts: Iterable[str], unknown: bool = False) -> Tokenizer:
    """A token for each distinct character of `texts`, in code point order (nanoGPT's char level: the same ids).

    With `unknown`, one more token `<unk>` stands for every other character; without it such a character is refused.
    """
    distinct: set[str] = set()
    for text in texts:
        _require_unicode(text)
        distinct.update(text)
    vocabulary = {token: id for id, token in enumerate([*sorted(distinct), *([UNKNOWN] if unknown else [])])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN if unknown else None))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


MOST_TOKENS = 10_000_000
"""The largest vocabulary that is learned: the trainer reserves its memory at once, and ends the process without it."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE (GPT-2's pattern); all 256 bytes and `<|endoftext|>` (id 0) count in `vocab_size`.

    The texts are read as one text in pieces: the same text gives the same file, wherever it was cut. A text that
    repeats too little gives fewer tokens. Raises TokenizerError for a `vocab_size` below 257 or above `MOST_TOKENS`.
    """
    if vocab_size > MOST_TOKENS:
        raise TokenizerError(f"vocab_size {vocab_size:,}: more than {MOST_TOKENS:,} tokens", "Ask for fewer.")
    if vocab_size < 257:
        raise TokenizerError(f"vocab_size {vocab_size}: a byte-level BPE has at least 257 tokens", "Ask for more.")
    backend = _byte_level({}, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=_BYTES,
    )
    backend.train_from_iterator(_pieces(texts), trainer)
    return Tokenizer(backend, eos_ids=[0])


def load(path: str | Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint folder, of the folder that a file of weights lies in, or the file given.

    `tokenizer.json` comes first, then `vocab.json` with `merges.txt` (GPT-2's byte-level BPE, or GPT-1's where tokens
    end in `</w>`), then `tokenizer.model` (SentencePiece). BOS and EOS come from `tokenizer_config.json`, and where
    that is silent from `generation_config.json` or `config.json`; further EOS ids in `generation_config.json` count
    too. The files are taken at their word: transformers 5's LlamaTokenizer puts its own rule for the space before a
    text in place of Llama 2's, which is SentencePiece's and is kept here (` she` then begins with two spaces).
    Raises TokenizerError naming the file that is missing or damaged.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    given = path.is_file() and path.name.endswith((".json", ".model", "merges.txt"))
    given = given and not path.name.endswith(("config.json", ".index.json"))
    names = [path.name] if given else ["tokenizer.json", "vocab.json", "tokenizer.model"]
    name = next((name for name in names if (folder / name).is_file()), None)
    if name is None:
        looked = "tokenizer.json, vocab.json with merges.txt, or tokenizer.model"
        raise TokenizerError(
            f"{path}: no tokenizer there (looked for {looked})",
            f"Copy the tokenizer's files into {folder}. (generate, logits and trace can do without: --ids 1,2,3.)",
        )
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    if name in ("vocab.json", "merges.txt"):
        backend, defaults = _read_vocab_and_merges(folder)
    elif name.endswith(".model"):
        backend, defaults = _read_sentencepiece(folder / name)
    else:
        backend, defaults = _read_tokenizer_json(folder / name), {}
    config = {**defaults, **{key: value for key, value in config.items() if value is not None}}
    named = [_content(config.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")]
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    # As transformers does: a token that the configuration names is special, whatever the vocabulary's file says.
    extra = {token for token in named if token and token not in added and backend.token_to_id(token) is not None}
    backend.add_special_tokens(sorted(extra))
    bos, eos = ([id for id in [backend.token_to_id(token or "")] if id is not None] for token in named[:2])
    generation, model = _read_json(folder / "generation_config.json"), _read_json(folder / "config.json")
    bos = bos or _ids(generation, "bos_token_id", backend) or _ids(model, "bos_token_id", backend)
    eos = [*eos, *_ids(generation, "eos_token_id", backend)] or _ids(model, "eos_token_id", backend)
    if not (name.endswith(".json") and name != "vocab.json"):
        _set_rule(
            backend, bos[:1] if config.get("add_bos_token") else [], eos[:1] if config.get("add_eos_token") else []
        )
    return Tokenizer(backend, bos[0] if bos else None, eos)


def _byte_level(vocabulary: dict[str, int], use_regex: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """The same text in pieces of about `PIECE` characters, cut only where `_CUT` allows."""
    rest = ""
    for text in texts:
        start, rest = 0, rest + text
        while match := _CUT.search(rest, start + PIECE):
            yield rest[start : match.start()]
            start = match.start()
        rest = rest[start:]
    yield rest


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"the text is not Unicode: {text[error.start]!r} at position {error.start} is half a character"
        raise TokenizerError(message, "Give the text as UTF-8.") from None


def _state(part: Any) -> dict[str, Any]:
    """A normalizer's, pre-tokenizer's or decoder's settings, as they stand in `tokenizer.json`."""
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _content(value: Any) -> str | None:
    """A token of `tokenizer_config.json`: a string, or {"content": string, ...}."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _ids(config: dict[str, Any], key: str, backend: tokenizers.Tokenizer) -> list[int]:
    """One id or a list of ids in a model's configuration, those without a token left out."""
    value = config.get(key)
    ids = [id for id in (value if isinstance(value, list) else [value]) if type(id) is int and 0 <= id < 1 << 32]
    return [id for id in ids if backend.id_to_token(id) is not None]


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read ({error.strerror})", remedy(error)) from None


def _damaged(path: Path, why: object) -> TokenizerError:
    return TokenizerError(f"{path}: damaged: {str(why).rstrip('.')}", "Copy or download the file again.")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_bytes(path).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise _damaged(path, f"a JSON object was expected, not a {type(value).__name__}")
    return value


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(_read_bytes(path).decode("utf-8-sig"))
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise _damaged(path, error) from None


def _read_vocab_and_merges(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """GPT-2's or GPT-1's two files, set up as transformers' GPT2Tokenizer and OpenAIGPTTokenizer set them up."""
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    for path in (vocab, merges):
        if not path.is_file():
            raise TokenizerError(
                f"{folder}: no tokenizer there: {path.name} is missing", "Copy it beside the other file."
            )
    _read_json(vocab)  # for its own message
    try:
        tokens, pairs = models.BPE.read_file(str(vocab), str(merges))
        gpt1 = any(token.endswith("</w>") for token in tokens)
        if not gpt1:
            backend = _byte_level({}, use_regex=True)
            backend.model = models.BPE(vocab=tokens, merges=pairs)
            return backend, dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT)
        model = models.BPE(vocab=tokens, merges=pairs, unk_token=UNKNOWN, end_of_word_suffix="</w>")
    except Exception as error:  # the library raises bare Exception
        raise _damaged(merges, f"{error} (with {vocab.name})") from None
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return backend, {"unk_token": UNKNOWN}


def _set_rule(backend: tokenizers.Tokenizer, bos: list[int], eos: list[int]) -> None:
    """Add BOS and EOS (where given) to every text: the rule of `add_bos_token` where no tokenizer.json holds one."""
    if bos or eos:
        tokens = {id: str(backend.id_to_token(id)) for id in (*bos, *eos)}
        template = [*(tokens[id] for id in bos), "$A", *(tokens[id] for id in eos)]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(token, id) for id, token in tokens.items()]
        )


def _read_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """A SentencePiece model (BPE or unigram) as a tokenizer that gives the same ids and text.

    Source: sentencepiece_model.proto and normalizer.cc of https://github.com/google/sentencepiece.
    """
    try:
        proto = importlib.import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    except ImportError:
        message = f"{path}: a SentencePiece model, and the package that reads it is not installed"
        raise TokenizerError(message, 'Install the extra: pip install "llmcli[sentencepiece]"') from None
    try:
        proto.ParseFromString(_read_bytes(path))
        pieces, trainer, rules = list(proto.pieces), proto.trainer_spec, proto.normalizer_spec
        if not pieces:
            raise _damaged(path, "no pieces in it")
        if trainer.model_type not in (1, 2) or trainer.treat_whitespace_as_suffix:
            message = f"{path}: a SentencePiece model of words, of characters, or with spaces after words"
            raise TokenizerError(message, "llmcli reads BPE and unigram models with spaces before words.")
        model: Any = _sentencepiece_model(pieces, trainer)
        steps: list[Any] = []
        if rules.precompiled_charsmap:
            steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
        if rules.remove_extra_whitespaces:
            steps.append(normalizers.Replace(tokenizers.Regex(r"\A +| +\z| +(?= )"), ""))
        steps += [normalizers.Prepend("▁")] if rules.add_dummy_prefix else []
        steps += [normalizers.Replace(" ", "▁")] if rules.escape_whitespaces else []
        backend = tokenizers.Tokenizer(model)
        backend.normalizer = normalizers.Sequence(steps)
    except TokenizerError:
        raise
    except Exception as error:  # protobuf's DecodeError, the library's bare Exception
        raise _damaged(path, error) from None
    whole = sorted((re.escape(piece.piece) for piece in pieces if piece.type == 4), key=len, reverse=True)
    if whole:  # user-defined pieces are never merged with what stands around them
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("|".join(whole)), "isolated")
    backend.add_special_tokens([piece.piece for piece in pieces if piece.type == 3])
    unknown = pieces[trainer.unk_id].piece
    strip = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(unknown, trainer.unk_surface),
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *strip,
        ]
    )
    ends = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id}
    return backend, {key: pieces[id].piece for key, id in ends.items() if 0 <= id < len(pieces)}


def _sentencepiece_model(pieces: list[Any], trainer: Any) -> models.Unigram | models.BPE:
    if trainer.model_type == 1:
        scores = [(piece.piece, piece.score) for piece in pieces]
        return models.Unigram(scores, trainer.unk_id, trainer.byte_fallback)
    # A pair merges if it makes a piece; the higher the piece's score, the earlier.
    normal = {piece.piece: (-piece.score, id) for id, piece in enumerate(pieces) if piece.type == 1}
    splits = [(token, i) for token in normal for i in range(1, len(token)) if {token[:i], token[i:]} <= normal.keys()]
    splits.sort(key=lambda split: (normal[split[0]], split[1]))
    return models.BPE(
        vocab={piece.piece: id for id, piece in enumerate(pieces)},
        merges=[(token[:i], token[i:]) for token, i in splits],
        unk_token=pieces[trainer.unk_id].piece,
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
        ignore_merges=any(piece.type == 4 for piece in pieces),
    )
