"""A run: its folder, its settings, and the parts that several stages need, each made once and only when asked for."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from composer_jax.agent.episode import Limits
from composer_jax.atomic_write import write_atomically
from composer_jax.checkpoint.native import model_notes, restore_weights
from composer_jax.checkpoint.store import CheckpointStore
from composer_jax.checkpoint.workdir import Workdir
from composer_jax.data.chat import compact_json
from composer_jax.data.chat_compact import CompactFormat
from composer_jax.data.chat_format import ChatFormat
from composer_jax.data.corpus import Corpus, SourceFile, find_corpus, read_texts
from composer_jax.data.token_cache import cache_file, encode_files, read_encoded
from composer_jax.data.tokenizer import Tokenizer
from composer_jax.demo import recall
from composer_jax.demo.expert import Notes, RecallRates, recall_summary
from composer_jax.demo.generate import FAMILIES, generate
from composer_jax.errors import UserError
from composer_jax.event_loop import EventLoop
from composer_jax.models.model_def import ModelDef
from composer_jax.observe.metrics import MetricsWriter, NoMetrics
from composer_jax.observe.progress import Progress
from composer_jax.parallel.context import zigzag_order
from composer_jax.parallel.mesh import AXES, batch_shards, make_mesh
from composer_jax.parallel.platform import configure_cpu, use_compilation_cache
from composer_jax.parallel.processes import broadcast_from_process0, is_first_process, process_count
from composer_jax.rl.rollout import Environment
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.engine import Sampler
from composer_jax.sandbox import LocalSandboxPool
from composer_jax.seeds import seeded_random
from composer_jax.stages.settings import OptimizerSettings, Settings, settings_from
from composer_jax.stages.usage import used
from composer_jax.tasks.formats import Options
from composer_jax.tasks.images.pools import ImagePools
from composer_jax.tasks.result_cache import ResultCache
from composer_jax.tasks.source import TaskSource
from composer_jax.train.learner import Learner
from composer_jax.train.losses import LanguageLoss
from composer_jax.train.optimizer import Optimizer, OptimizerConfig, make_optimizer

NEEDED_BYTES = 500_000_000
"""Free disk space a run of the tiny preset asks for before it starts; it writes a tenth of that."""


class Run:
    """Use as a context manager: it locks the folder, and lets it go at the end.

    Several processes (parallel/processes.py) that make the same Run work on it together, in one folder that all of
    them see. The first decides what is done and writes files; of checkpoints each writes its shards.
    """

    def __init__(self, config: Mapping[str, Any], workdir: Path):
        self.settings: Settings = settings_from(config)
        plain = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        configure_cpu(self.settings.mesh.cpu_devices)
        use_compilation_cache()
        if process_count() > 1:
            self._require_collectives()
        self.workdir = _open(workdir, plain)
        self.path = self.workdir.path
        self.workdir.require_free(NEEDED_BYTES)
        self.definition = ModelDef(self.settings.model)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        self.workdir.close()

    # -- devices -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def mesh(self) -> Mesh:
        devices = jax.devices()
        sizes = {axis: getattr(self.settings.mesh, axis) for axis in AXES}
        if process_count() == 1 and -1 not in sizes.values():  # of several processes none may be left without a part
            devices = devices[: math.prod(sizes.values())]
        mesh = make_mesh(devices, **sizes)
        self._require_divisible(mesh)
        return mesh

    def _require_collectives(self) -> None:
        if self.settings.mesh.reduction == "host" and self.mesh.shape["replica"] > 1:
            raise UserError(
                'mesh.reduction="host" adds the gradients of replicas in one process, and here are '
                f"{process_count()}; use --config.mesh.reduction=collective."
            )

    def _require_divisible(self, mesh: Mesh) -> None:
        """All that is spread over the mesh, asked for before the first stage rather than found in the fourth."""
        settings, shards = self.settings, batch_shards(mesh)
        spread = {
            "pretrain.batch_size": settings.pretrain.batch_size,
            "sft.batch_size": settings.sft.batch_size,
            "sampler.slots": settings.sampler.slots,
            **{f"rl.batches[{i}]": rows for i, (_, rows) in enumerate(settings.rl.batches)},
        }
        for name, rows in spread.items():
            if rows % shards:
                raise UserError(f"{name} has {rows} rows for {shards} devices; use a multiple of {shards}.")
        for length in (settings.pretrain.seq_len, settings.sft.seq_len, *(length for length, _ in settings.rl.batches)):
            zigzag_order(length, mesh.shape["context"])  # refuses rows that do not divide

    # -- data ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def corpus(self) -> Corpus:
        data = self.settings.data
        return find_corpus(
            Path(data.source) if data.source else None,
            extensions=data.extensions,
            max_bytes=data.max_bytes,
            max_heldout_bytes=data.max_heldout_bytes,
        )

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Trained on the first call of a run, loaded afterwards."""
        path = self.path / "data" / "tokenizer.json"
        broadcast_from_process0(lambda: None if path.exists() else self._train_tokenizer(path))
        return Tokenizer.load(path)

    @functools.cached_property
    def chat(self) -> ChatFormat:
        """The format of all conversations."""
        return CompactFormat(self.tokenizer)

    def _train_tokenizer(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        texts = itertools.chain(
            read_texts(self.corpus.train, max_bytes=self.settings.data.tokenizer_bytes), self.task_texts()
        )
        tokenizer = Tokenizer.train(texts, self.settings.model.vocab_size)
        if tokenizer.vocab_size != self.settings.model.vocab_size:
            raise UserError(
                f"The source code gives a vocabulary of {tokenizer.vocab_size} only; set "
                f"model.vocab_size={tokenizer.vocab_size} or use more source (data.source)."
            )
        tokenizer.save(path)

    def task_texts(self) -> Iterator[str]:
        """Files, tool calls and reports as an agent sees them, from training tasks."""
        for index in range(self.settings.data.tokenizer_tasks):
            for family in FAMILIES:
                task = generate(family, "train", self.settings.seed, -1 - index)
                yield task.instruction
                for path, text in task.files.items():
                    if path.endswith(".py") and path != "run_tests.py":
                        yield text
                        line = text.rstrip().rsplit("\n", 1)[-1]
                        yield "read" + compact_json({"path": path})
                        yield "edit" + compact_json({"path": path, "old": line, "new": line})
                if family == recall.FAMILY:
                    notes = Notes(task.metadata["facts"], read_conf=True, read_target=index % 2 == 0)
                    yield recall_summary(task, notes, "long", RecallRates(), seeded_random("tokenizer", index))

    def documents(self, part: Literal["train", "heldout"]) -> list[np.ndarray]:
        """Token ids of every file in one part of the corpus; only the first process needs to have the files."""
        tokenizer, folder = self.tokenizer, self.path / "data"
        if is_first_process():
            files = getattr(self.corpus, part)
            documents = self._encode(files, {"train": "source", "heldout": "held-out source"}[part])
        name = broadcast_from_process0(lambda: cache_file(tokenizer, files, folder).name)
        return documents if is_first_process() else read_encoded(folder / name)

    def _encode(self, files: Sequence[SourceFile], name: str) -> list[np.ndarray]:
        with Progress(sum(file.num_bytes for file in files), "byte", f"encode {name}") as progress:
            done = 0

            def advance(now: int, total: int) -> None:
                nonlocal done
                progress.update(now - done)
                done = now

            return encode_files(self.tokenizer, files, cache_dir=self.path / "data", progress=advance)

    # -- weights -------------------------------------------------------------------------------------------------

    def store(self, stage: str, keep: int = 1) -> CheckpointStore:
        return CheckpointStore(self.path / "checkpoints" / stage, keep=keep, notes=model_notes(self.definition))

    def optimizer(self, settings: OptimizerSettings, steps: int) -> Optimizer:
        return make_optimizer(OptimizerConfig(**dataclasses.asdict(settings)), steps)

    def weights_of(self, stage: str):
        """(params, router_bias) that a finished stage left."""
        broadcast_from_process0(lambda: self.workdir.stage_result(stage))
        with self.store(stage) as store:
            return restore_weights(store, self.definition, self.mesh)

    def learner(self, optimizer: Optimizer, loss=None, bias_rate: float = 0.0) -> Learner:
        return Learner(
            self.definition,
            optimizer,
            loss or LanguageLoss(),
            self.mesh,
            reduction=self.settings.mesh.reduction,
            bias_rate=bias_rate,
        )

    # -- agents --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def sampler(self) -> Sampler:
        return Sampler(
            self.definition,
            self.mesh,
            SamplerConfig(**dataclasses.asdict(self.settings.sampler)),
            end_token=self.chat.end,
        )

    def sampler_with(self, params, router_bias, version: int) -> Sampler:
        """The run's sampler with these weights; compiled completely on the first call."""
        first = self.sampler.version < 0
        self.sampler.update(params, router_bias, version)
        if first:
            with Progress(self.sampler.num_programs, "program", "compile the sampler") as progress:
                self.sampler.warm_up(progress.update)
        return self.sampler

    @functools.cached_property
    def tasks(self) -> TaskSource:
        """Raises UserError when RL would run out of tasks. Those to train on are not read any more when RL is done."""
        path = lambda name: Path(text).expanduser() if (text := getattr(self.settings.tasks, name)) else None  # noqa: E731
        trained = self.workdir.stage_done("rl")
        source = TaskSource(
            self.settings.seed,
            None if trained else path("train"),
            path("heldout"),
            Options(repos=path("repos"), packages=path("packages")),
        )
        if not trained:
            source.require(self.settings.rl.groups, self.settings.rl.steps)
        return source

    def hold_to_tasks(self, step: int) -> None:
        """Keeps the list of the tasks that RL uses at its first step, and raises UserError at a later one when it is
        another: RL knows how many it has used, not which."""
        drawn, known = self.tasks.drawn(self.settings.rl.groups), self.path / "data" / "tasks.json"
        if step == 0:
            known.parent.mkdir(exist_ok=True)
            write_atomically(known, (json.dumps(drawn, indent=1) + "\n").encode())
        elif known.exists() and json.loads(known.read_bytes()) != drawn:
            raise UserError(
                f"{self.settings.tasks.train} holds other tasks than when RL in {self.path} began, of which {known} is "
                "the list; put them back, or begin another run in a new workdir."
            )

    @property
    def limits(self) -> Limits:
        agent = self.settings.agent
        return Limits(agent.max_turns, agent.max_turn_tokens, agent.max_episode_tokens)

    @contextmanager
    def environment(self) -> Iterator[tuple[Environment, EventLoop]]:
        """Sandboxes and the event loop they live in."""
        size = self.settings.agent.concurrency
        with EventLoop() as loop:
            pool, images = LocalSandboxPool(self.tasks.limits, size=size), ImagePools(size)
            try:
                yield Environment(self.chat, pool, self.limits, ResultCache(), images=images), loop
            finally:
                loop.run(pool.close())
                loop.run(images.close())

    def check(self) -> None:
        """Raises UserError for what RL and evaluation would find wrong after hours: tasks, and a machine that refuses
        to build sandboxes, in one of which a command is run."""
        limits = self.tasks.limits

        async def try_one() -> str:
            async with (
                LocalSandboxPool(limits, size=1) as pool,
                await pool.acquire({"hello.py": "print('ready')"}) as sandbox,
            ):
                return (await sandbox.run(["python", "hello.py"])).stdout

        with EventLoop() as loop:
            said = loop.run(try_one())
        if said != "ready\n":
            raise UserError(
                f"The sandbox runs but a program in it said {said!r} instead of 'ready'; see docs/sandbox.md."
            )

    # -- stages --------------------------------------------------------------------------------------------------

    def done(self, stage: str) -> bool:
        """Whether a stage is done."""
        return broadcast_from_process0(lambda: self.workdir.stage_done(stage))

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Runs a stage: yields a dict for its results, which is stored when the body ends well.

        What it used (seconds, peak_rss_gb) is stored too, earlier attempts that were interrupted included. Of several
        processes the first one's are stored.
        """
        result: dict[str, Any] = {}
        with used(self.path / "stages" / f"{name}.used") if is_first_process() else nullcontext() as usage:
            yield result
        broadcast_from_process0(lambda: self.workdir.mark_done(name, {**result, **usage()}))

    def metrics(self, stage: str) -> MetricsWriter:
        """Where a stage writes its metrics, if this is the process that does."""
        return MetricsWriter(self.path / "metrics" / f"{stage}.jsonl") if is_first_process() else NoMetrics()


def _open(workdir: Path, config: dict[str, Any]) -> Workdir:
    """The folder of a run, claimed by the first process and then shared by the others."""
    if is_first_process():
        claimed = Workdir(workdir, config)
    holder = broadcast_from_process0(lambda: claimed.holder)
    return claimed if is_first_process() else Workdir(workdir, config, holder=holder)
