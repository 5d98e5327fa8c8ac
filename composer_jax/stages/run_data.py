"""RunData: the source code of a run and the tokenizer trained on it."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from composer_jax.checkpoint.base_model import copy_base_files
from composer_jax.data.chat.chat_format import ChatFormat
from composer_jax.data.chat.load_chat_format import load_chat_format
from composer_jax.data.chat.tool_prompt import TOOL_PROMPT
from composer_jax.data.corpus import Corpus, CorpusFile, find_corpus, read_texts
from composer_jax.data.text_tokenizer import TextTokenizer, check_vocab_size
from composer_jax.data.token_cache import cache_file, encode_files, read_encoded
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.errors import UserError
from composer_jax.extensions import import_object
from composer_jax.observe.progress import Progress
from composer_jax.parallel.processes import is_first_process
from composer_jax.schema.run_config import RunConfig
from composer_jax.stages.shared_files import make_shared
from composer_jax.storage.local_copy import local_copy
from composer_jax.storage.workdir import Workdir


class RunData:
    """What the data section of a config names; everything is made on first use and kept in DIR/data."""

    def __init__(self, config: RunConfig, path: Path, workdir: Workdir | None = None):
        """workdir: the run's folder, through whose bucket processes on several hosts share files."""
        self.config, self.folder, self.workdir = config, path / "data", workdir

    @functools.cached_property
    def corpus(self) -> Corpus:
        """Source files, divided into training and held-out files."""
        data = self.config.data
        return find_corpus(
            local_copy(data.source) if data.source else None,
            extensions=data.extensions,
            max_bytes=data.max_bytes,
            max_heldout_bytes=data.max_heldout_bytes,
        )

    @functools.cached_property
    def base_chat(self) -> ChatFormat | None:
        """The chat format of the run's base, with its tokenizer; None without a base.

        Raises UserError if the base has no tokenizer or chat template, or its tokenizer has more ids than the
        embedding.
        """
        if not self.config.base:
            return None
        folder = self.folder.parent / "base"

        def copy() -> Path:
            if not folder.exists():
                copy_base_files(self.config.base, folder)
            return folder

        make_shared(self.workdir, copy)
        chat = load_chat_format(folder, tool_prompt=self.config.data.tool_prompt or TOOL_PROMPT)
        check_vocab_size(chat.tokenizer, self.config.model.vocab_size, self.config.base)
        return chat

    @functools.cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer: the base's, or one that process 0 trains once per run."""
        if self.base_chat is not None:
            return self.base_chat.tokenizer
        return Tokenizer.load(make_shared(self.workdir, self._train_tokenizer))

    def _train_tokenizer(self) -> Path:
        path = self.folder / "tokenizer.json"
        if path.exists():
            return path
        path.parent.mkdir(exist_ok=True)
        source = read_texts(self.corpus.train, max_bytes=self.config.data.tokenizer_bytes)
        vocab_size = self.config.model.vocab_size
        tokenizer = Tokenizer.train(itertools.chain(source, self.tokenizer_texts()), vocab_size)
        if tokenizer.vocab_size != vocab_size:
            raise UserError(
                f"The source code gives a vocabulary of {tokenizer.vocab_size} only; set "
                f"model.vocab_size={tokenizer.vocab_size} or use more source (data.source)."
            )
        tokenizer.save(path)
        return path

    def tokenizer_texts(self) -> Iterator[str]:
        """Yields the texts of data.tokenizer_texts, source by source."""
        for name, texts in self.config.data.tokenizer_texts.items():
            function = import_object(texts.kind, f"config.data.tokenizer_texts.{name}.kind")
            yield from function(self.config.seed, texts.count)

    def documents(self, part: Literal["train", "heldout"]) -> list[np.ndarray]:
        """Returns the token ids of every file in one part of the corpus; only process 0 needs to have the files."""
        tokenizer = self.tokenizer
        if not is_first_process():
            return read_encoded(make_shared(self.workdir, lambda: self.folder))
        files = getattr(self.corpus, part)
        documents = self._encode(files, {"train": "source", "heldout": "held-out source"}[part])
        make_shared(self.workdir, lambda: cache_file(tokenizer, files, self.folder))
        return documents

    def _encode(self, files: Sequence[CorpusFile], name: str) -> list[np.ndarray]:
        with Progress(sum(file.num_bytes for file in files), "byte", f"encode {name}") as progress:
            return encode_files(self.tokenizer, files, cache_dir=self.folder, progress=progress.update)
