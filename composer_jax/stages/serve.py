"""Serves weights at an address over HTTP: what `launch.serve` does."""

import dataclasses
import signal
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from absl import logging
from jax.sharding import Mesh

from composer_jax.checkpoint.address import PATCHES_PREFIX
from composer_jax.checkpoint.checkpoint import Checkpoint, PublishedCheckpoint, open_checkpoint
from composer_jax.checkpoint.dtypes import require_float_dtype
from composer_jax.data.chat.text_processor import TextProcessor
from composer_jax.errors import UserError
from composer_jax.models.config import ModelConfig
from composer_jax.models.model_def import ModelDef
from composer_jax.parallel.dispatch import dispatch_without_drops
from composer_jax.parallel.platform import use_compilation_cache
from composer_jax.parallel.processes import broadcast_from_process0, is_first_process, process_count
from composer_jax.rl.engines.engine_port import bind_port
from composer_jax.rl.engines.engine_process import LEARNERS_AT
from composer_jax.sampler.config import SamplerConfig
from composer_jax.sampler.sampler import Sampler
from composer_jax.stages.follow_weights import WeightFollower, run_while_serving, version_to_serve
from composer_jax.stages.model import mesh_of_axes
from composer_jax.stages.serve_engine import BoundPort, open_engine_port
from composer_jax.stages.served_weights import ServedWeights

if TYPE_CHECKING:  # the packages of the server are optional
    from starlette.applications import Starlette

    from composer_jax.serve.service import Service

LONGEST_DEFAULT = 32_768
"""Tokens of a context unless the user says otherwise; fewer where the model has a shorter one."""
TYPICAL = 2048
"""Tokens of a usual context."""
LOCAL = ("localhost", "127.0.0.1", "::1")
GRACE_SECONDS = 30
"""How long requests may go on after SIGTERM."""


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """What `launch.serve` takes beside the address."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    control_key: str = ""
    name: str = ""
    """Of the model; empty is the last part of its address."""
    dtype: str | None = None
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Sizes of mesh axes (mesh_of_axes)."""
    max_model_len: int | None = None
    slots: int = 32
    cache_tokens: int | None = None
    """Tokens in the cache; None is room for four full contexts, or for TYPICAL tokens of every slot."""
    drafts: str = ""
    follow: str = ""
    """A folder of versions whose weights the server takes as they come; empty is that of a patches: address, if any."""
    arm: str = ""
    """Which arm of a release it serves, "anchor" or "candidate"; empty is the newest version."""
    engine_port: int | None = None
    """Port at which learners of RL sample (rl/engines); None has no such port."""
    token_file: str = ""
    """File with the secret that learners must know."""
    returns_routing: bool = False
    """Requests may ask for the experts that computed their tokens."""
    traffic: str = ""
    """Folder into which the turns of users who consent are written; empty writes none."""
    traffic_policy: str = ""
    """File with the folder's policy; empty keeps that of the folder."""


def serve(address: str, options: ServeOptions) -> None:
    """Serves until SIGINT or SIGTERM, then ends the requests that run.

    Every process of a run must call it. Process 0 has the port, and the others compute with it. A server of several
    processes takes other weights from folders of versions only.

    Raises UserError, before any weight is read, for an address without weights, a port in use, or a package that is
    missing.
    """
    try:
        import uvicorn

        from composer_jax.serve.app import new_app
        from composer_jax.serve.service import ServerLimits, Service
        from composer_jax.serve.traffic.writer import TrafficWriter
    except ImportError as error:
        raise UserError(f"{error.name} is missing; pip install 'composer_jax[serve]'.") from error
    use_compilation_cache()
    require_float_dtype(options.dtype)
    folder = followed_folder(address, options)
    leads = process_count() == 1 or is_first_process()
    engine_port = None
    if options.engine_port is not None:
        engine_port = open_engine_port(options.host, options.engine_port, options.token_file, folder, leads=leads)
    checkpoint = open_checkpoint(address)
    text = _text_of(checkpoint, options.name)
    if isinstance(checkpoint, PublishedCheckpoint):
        _choose_version(checkpoint, options)
    config = sampler_config(options, checkpoint.config.max_context)
    listening = _listen(options.host, options.port) if leads else None
    traffic = None
    if listening is not None and options.traffic:
        traffic = TrafficWriter(
            options.traffic, options.traffic_policy, text, arm=options.arm, keeps_routing=options.returns_routing
        )
    sampler = _new_sampler(checkpoint, text, options, config)
    receiver = checkpoint.take_receiver() if isinstance(checkpoint, PublishedCheckpoint) else None
    mtp = options.drafts == "mtp"
    weights = ServedWeights(sampler, checkpoint.config, options.dtype, mtp=mtp, folder=folder, receiver=receiver)
    if listening is None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # process 0 gets it, too, and ends what runs before it ends this one
        sampler.follow(weights.of_version, on_ask=weights.answer)
        return

    local = options.host in LOCAL and not options.api_keys
    service = Service(sampler, text, ServerLimits(), weights, traffic)
    app = new_app(service, options.api_keys, options.control_key, LOCAL if local else ())
    if folder:
        _follow_folder(app, service, folder, options, engine_port, checkpoint.config)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS, server_header=False)
    )
    listening.listen()  # clients wait until the server has started, which takes the other processes, too
    host, port = listening.getsockname()[:2]
    learners = "" if engine_port is None else f"{LEARNERS_AT}{engine_port.address}"
    context = f"(context of {config.max_model_len} tokens)"
    print(f"{text.name} listens on http://{host}:{port}/ {context}{learners}", file=sys.stderr, flush=True)
    server.run([listening])


def _choose_version(checkpoint: PublishedCheckpoint, options: ServeOptions) -> None:
    """Makes all processes load one version, whatever is published while they start."""
    versions, arm = checkpoint.address.path, "" if options.follow else options.arm
    checkpoint.version = broadcast_from_process0(lambda: version_to_serve(versions, arm))
    checkpoint.is_followed = not options.follow


def _follow_folder(
    app: "Starlette",
    service: "Service",
    folder: str,
    options: ServeOptions,
    engine_port: BoundPort | None,
    network: ModelConfig,
) -> None:
    """Makes an application take the versions of a folder while it serves, and let learners in at its engine port."""
    mode = "recompute" if engine_port is None else "keep"  # as a sampler beside its learner
    follower = WeightFollower(service, folder, options.arm, serves_other=bool(options.follow), mode=mode)
    run_while_serving(app, follower.run)
    if engine_port is not None:
        run_while_serving(app, engine_port.served(service, network, follower.look, follower.reload).run)


def _text_of(checkpoint: Checkpoint, name: str) -> TextProcessor:
    text = checkpoint.text.named(name or checkpoint.name)
    try:
        text.tokenizer  # noqa: B018 - refuses a model without one
    except UserError:
        checkpoint.text.tokenizer  # noqa: B018 - tells whoever starts the server where the files are
        raise
    return text


def followed_folder(address: str, options: ServeOptions) -> str:
    """Returns the folder of versions that a server follows, or "". Raises UserError for an arm without a folder."""
    folder = options.follow or (address.removeprefix(PATCHES_PREFIX) if address.startswith(PATCHES_PREFIX) else "")
    if options.arm and not folder:
        raise UserError(
            f"--arm={options.arm} is an arm of a release; name its versions with --checkpoint=patches:FOLDER."
        )
    return folder


def _new_sampler(checkpoint: Checkpoint, text: TextProcessor, options: ServeOptions, config: SamplerConfig) -> Sampler:
    mesh = mesh_of_axes(options.axes)
    definition, params, router_bias = checkpoint.load(mesh, options.dtype, mtp=options.drafts == "mtp")
    network = definition.config if options.dtype else network_on_cpus(definition.config, mesh)
    dispatch = dispatch_without_drops(network.dispatch)
    definition = ModelDef(dataclasses.replace(network, cache_routing=options.returns_routing, dispatch=dispatch))
    # Episodes end a message as their harness expects it, and know no end of text.
    ends = text.end_tokens if options.engine_port is None else text.chat_format.end_tokens
    sampler = Sampler(definition, mesh, config, end_tokens=ends, decode=text.tokenizer.decode)
    version = (checkpoint.version or 0) if isinstance(checkpoint, PublishedCheckpoint) else 0
    sampler.update(params, router_bias, version=version, copy=False)
    del params, router_bias
    sampler.warm_up(processed=True)
    return sampler


def network_on_cpus(network: ModelConfig, mesh: Mesh) -> ModelConfig:
    """Returns the network with float32 in place of bfloat16 as its compute dtype if the mesh is one of CPUs."""
    if mesh.devices.flat[0].platform != "cpu" or network.compute_dtype != "bfloat16":
        return network
    logging.warning(
        "A CPU multiplies bfloat16 several times slower than float32, so the server computes in float32; "
        "--dtype=float32 also stores the weights in it, which is faster and takes twice their memory, and "
        "--dtype=bfloat16 computes in bfloat16."
    )
    return dataclasses.replace(network, compute_dtype="float32")


def sampler_config(options: ServeOptions, max_context: int) -> SamplerConfig:
    """Returns the sizes of the sampler. Raises UserError for a context that is longer than the model's."""
    max_model_len = options.max_model_len or min(max_context, LONGEST_DEFAULT)
    if max_model_len > max_context:
        raise UserError(
            f"--max_model_len={max_model_len} exceeds the model's context of {max_context} tokens; use less."
        )
    cache_tokens = options.cache_tokens or min(
        options.slots * max_model_len, max(4 * max_model_len, options.slots * TYPICAL)
    )
    return SamplerConfig(
        slots=options.slots,
        max_model_len=max_model_len,
        cache_tokens=cache_tokens,
        prefill_shapes=((8, 32), (2, 256)),
        decode_steps=8 if options.drafts else 4,  # a stream has an event per call, and drafts take a call's pages
        drafts=options.drafts,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Binds the port before the weights are read."""
    try:
        return bind_port(host, port)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}:{port} ({error}); use another --port or --host.") from error
