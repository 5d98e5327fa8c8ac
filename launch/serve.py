"""Serves any weights over OpenAI's API: python -m launch.serve --checkpoint=hf:DIR --port=8000

    python -m launch.serve --checkpoint=runs/demo --api_key=SECRET --host=0.0.0.0
    python -m launch.serve --checkpoint=gguf:FILE --max_model_len=8192 --control_key=OTHER
    python -m launch.serve --checkpoint=patches:FOLDER --arm=candidate

Clients send requests to /v1/chat/completions, /v1/completions and /v1/responses. http://127.0.0.1:8000/ shows the load
and a chat box, /metrics is for Prometheus. With --control_key a trainer can pause the server, install weights, and read
the token ids and log-probabilities of every session (the header X-Session-ID names one). A server of patches:FOLDER
takes the versions that a trainer publishes there as they come; with --arm, those that a release gives to the arm
(launch.traffic). The server listens to this machine only, unless --host says otherwise. Needs
`pip install 'composer_jax[serve]'`.
"""

from absl import flags as absl_flags

from composer_jax.errors import UserError
from launch import flags

AXES = ("data", "expert", "tensor")


def define(values):
    string = lambda name, default, meaning: absl_flags.DEFINE_string(  # noqa: E731
        name, default, meaning, flag_values=values
    )
    integer = lambda name, default, meaning: absl_flags.DEFINE_integer(  # noqa: E731
        name, default, meaning, flag_values=values
    )
    string("checkpoint", None, "Weights: hf:DIR, gguf:FILE, patches:DIR, a run folder, or our checkpoints.")
    string("follow", "", "A folder of versions to follow; patches:DIR follows DIR without it.")
    absl_flags.DEFINE_enum(
        "arm", "", ["", "anchor", "candidate"], "The arm of a release; without one, the newest version.",
        flag_values=values,
    )  # fmt: skip
    string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 is every network of this machine.")
    integer("port", 8000, "Port to listen on; 0 takes a free one.")
    absl_flags.DEFINE_multi_string(
        "api_key", [], "A key that clients have to send; may be repeated. None lets everybody in.", flag_values=values
    )
    string("control_key", "", "The key of /pause, /update_weights, /sessions and the like; without it they are closed.")
    string("name", "", "What clients call the model; the default is the last part of its address.")
    integer("max_model_len", None, "Tokens of the longest context; the default is the model's, at most 32768.")
    integer("slots", 32, "Requests that are sampled at once.")
    integer("cache_tokens", None, "Tokens in the cache, which all requests share; the default is four full contexts.")
    string("drafts", "", 'Speculative decoding: "prompt_lookup", "mtp", or nothing.')
    string("dtype", None, "float32, bfloat16 or float16; the default is that of the weights.")
    absl_flags.DEFINE_boolean(
        "return_routed_experts",
        False,
        "Keeps the experts of every token, so that requests may ask for them.",
        flag_values=values,
    )
    integer("engine_port", None, "Port at which learners of RL sample (docs/fleet.md); 0 takes a free one.")
    string("token_file", "", "File with the secret that these learners must know.")
    string("traffic", "", "Folder into which the turns of users who consent are written (docs/realtime.md).")
    string("traffic_policy", "", "File with the policy of that folder, which the first start needs.")
    for axis in AXES:
        integer(axis, 1, f"Devices along mesh axis {axis}.")
    return ("checkpoint",)


def main(values):
    for key in [*values.api_key, *([values.control_key] if values["control_key"].present else [])]:
        if not key or key != key.strip():
            raise UserError(f"the key {key!r} is empty or begins or ends with a space; give one that is not.")
    if values.control_key and values.control_key in values.api_key:
        raise UserError("--control_key is also an --api_key; clients must not control the server.")
    if values.traffic_policy and not values.traffic:
        raise UserError("--traffic_policy is the policy of a traffic folder; give --traffic, too.")
    if values.token_file and values.engine_port is None:
        raise UserError("--token_file is the secret of --engine_port; give that, too.")
    from composer_jax.stages.serve import ServeOptions, serve

    serve(
        values.checkpoint,
        ServeOptions(
            host=values.host,
            port=values.port,
            api_keys=tuple(values.api_key),
            control_key=values.control_key,
            name=values.name,
            dtype=values.dtype,
            axes={axis: values[axis].value for axis in AXES if values[axis].value != 1},
            max_model_len=values.max_model_len,
            slots=values.slots,
            cache_tokens=values.cache_tokens,
            drafts=values.drafts,
            follow=values.follow,
            arm=values.arm,
            returns_routing=values.return_routed_experts,
            engine_port=values.engine_port,
            token_file=values.token_file,
            traffic=values.traffic,
            traffic_policy=values.traffic_policy,
        ),
    )


if __name__ == "__main__":
    flags.run(main, define=define)
