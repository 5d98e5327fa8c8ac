"""Small faults of the library that its tests must find: 60 of them, in eleven areas.

They were picked from the library's code, without sight of the tests. `python -m tests.mutants` runs the tests against
each.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One text of one file, replaced by another."""

    name: str
    """AREA.FAULT; the area is one of AREAS."""
    file: str
    """Path from the root of the repository."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    """What replaces it."""
    why: str
    """What goes wrong, in one sentence."""

    @property
    def area(self) -> str:
        """The part of the name before the dot."""
        return self.name.partition(".")[0]


AREAS = (
    "router",
    "rope",
    "losses",
    "transcript",
    "sampler",
    "rewards",
    "episode",
    "sandbox",
    "grading",
    "tokenizers",
    "checkpoint",
)

MUTANTS = (
    Mutant(
        "router.bias_in_gates",
        "composer_jax/models/router.py",
        "gates_Tk = jnp.take_along_axis(scores_TE, ids_Tk, axis=-1)",
        "gates_Tk = jnp.take_along_axis(scores_TE + self.bias.get_value(), ids_Tk, axis=-1)",
        "The selection bias enters the gates, so that balancing the load changes the output.",
    ),
    Mutant(
        "router.bias_update_sign",
        "composer_jax/models/router.py",
        "error = jnp.sign(counts.mean(-1, keepdims=True) - counts)",
        "error = jnp.sign(counts - counts.mean(-1, keepdims=True))",
        "The bias of an overloaded expert rises, so that the load drifts away from balance.",
    ),
    Mutant(
        "router.group_strength",
        "composer_jax/models/router.py",
        "jax.lax.top_k(groups, min(2, groups.shape[-1]))[0].sum(-1)",
        "jax.lax.top_k(groups, 1)[0].sum(-1)",
        "A group of experts is judged by its best score alone, so that other groups are chosen than in DeepSeek-V3.",
    ),
    Mutant(
        "router.replay_threshold",
        "composer_jax/models/router_replay.py",
        "least_T1 = replay.plausibility * score(own_Tk).min(-1, keepdims=True)",
        "least_T1 = replay.plausibility * score(own_Tk).max(-1, keepdims=True)",
        "Replayed experts are compared with the best score of the router's choice, so that plausible ones are dropped.",
    ),
    Mutant(
        "router.padding_in_balance",
        "composer_jax/models/router_stats.py",
        "shares_BE = (rows(shares_TE) * token_mask_BS[..., None]).sum(1)",
        "shares_BE = rows(shares_TE).sum(1)",
        "The scores of padding count in the sequence-wise balance loss.",
    ),
    Mutant(
        "router.foreign_ids",
        "composer_jax/parallel/dispatch/compute.py",
        "valid_N = (ids_N >= 0) & (ids_N < n)",
        "valid_N = ids_N < n",
        "A pair without an expert (-1) is computed by an expert, or shifts the rows of the others.",
    ),
    Mutant(
        "rope.yarn_ramp",
        "composer_jax/models/rope.py",
        "return (plain * (1 - slowed) + plain / self.factor * slowed).astype(np.float32)",
        "return (plain * slowed + plain / self.factor * (1 - slowed)).astype(np.float32)",
        "YaRN slows the fast pairs down and keeps the slow ones.",
    ),
    Mutant(
        "rope.yarn_logit_scale",
        "composer_jax/models/rope.py",
        "return self._temperature(self.mscale_all_dim) ** 2",
        "return self._temperature(self.mscale_all_dim)",
        "The attention logits are scaled by YaRN's temperature instead of its square.",
    ),
    Mutant(
        "rope.llama3_ramp",
        "composer_jax/models/rope.py",
        "/ np.float32(self.high_freq_factor - self.low_freq_factor)",
        "/ np.float32(self.high_freq_factor)",
        "Llama 3's ramp between slowed and kept pairs ends too late.",
    ),
    Mutant(
        "rope.halves_direction",
        "composer_jax/models/rope.py",
        "[first * cos - second * sin, first * sin + second * cos]",
        "[first * cos + second * sin, second * cos - first * sin]",
        "Pairs of the two halves turn in the other direction than in the published weights.",
    ),
    Mutant(
        "rope.yarn_context_default",
        "composer_jax/checkpoint/huggingface/config_json.py",
        'original_context=original or hf_config["max_position_embeddings"],',
        "original_context=original or 4096,",
        "A config.json without original_max_position_embeddings gets DeepSeek's context instead of its own.",
    ),
    Mutant(
        "losses.ratio_gradient",
        "composer_jax/train/losses.py",
        "frozen_BS = jax.lax.stop_gradient(logprobs_BS)",
        "frozen_BS = logprobs_BS",
        "A gradient flows through the importance ratio, which is to be a constant weight.",
    ),
    Mutant(
        "losses.local_normaliser",
        "composer_jax/train/losses.py",
        "loss = nll / normaliser\n",
        'loss = nll / batch["weights"].sum()\n',
        "Cross-entropy is divided by this device's own weights, so that tokens of emptier devices count more.",
    ),
    Mutant(
        "losses.dual_clip",
        "composer_jax/train/trust_region.py",
        "is_zero_if_negative = (ratio < bounds.lower) | (ratio > bounds.dual)",
        "is_zero_if_negative = ratio < bounds.lower",
        "A token of negative advantage counts with a ratio that nothing bounds.",
    ),
    Mutant(
        "losses.teacher_swapped",
        "composer_jax/train/teacher_kl.py",
        "return teacher.divergence(student)",
        "return student.divergence(teacher)",
        "The KL is that of the student to the teacher, and the gradient reaches the teacher's side only.",
    ),
    Mutant(
        "losses.leave_one_out",
        "composer_jax/rl/algorithm.py",
        "advantage *= len(rewards) / (len(rewards) - 1)",
        "advantage *= (len(rewards) - 1) / len(rewards)",
        "The advantages of RLOO are too small by the square of G/(G-1).",
    ),
    Mutant(
        "losses.later_segments",
        "composer_jax/rl/reference.py",
        "later[row.episode] = float(sum_n[0])",
        "later[row.episode] = float(sum_n[-1])",
        "A token pays for the last token of the next segment only, instead of all later tokens of its episode.",
    ),
    Mutant(
        "transcript.shared_trained_twice",
        "composer_jax/agent/transcript.py",
        "own = [spans[node.id] for node in path if node.id in spans and spans[node.id].row == len(rows)]",
        "own = [spans[node.id] for node in path if node.id in spans]",
        "A sampled node that several branches share is trained once for each of them.",
    ),
    Mutant(
        "transcript.row_end",
        "composer_jax/agent/transcript.py",
        "end = own[-1].stop",
        "end = own[-1].stop - 1",
        "A row loses its last trained token, which is the end of the message.",
    ),
    Mutant(
        "transcript.unknown_route",
        "composer_jax/agent/transcript.py",
        "unknown = np.int16(-1)",
        "unknown = np.int16(0)",
        "Tokens without routes replay expert 0 instead of being marked as unknown.",
    ),
    Mutant(
        "transcript.route_width",
        "composer_jax/agent/transcript.py",
        "ids.max(initial=0) < 256 else",
        "ids.max(initial=0) <= 256 else",
        "The expert 256 is stored in eight bits and becomes expert 0.",
    ),
    Mutant(
        "transcript.frame_untrained",
        "composer_jax/agent/transcript.py",
        "logprobs[sampled], versions[sampled], trained=trained",
        "logprobs[sampled], versions[sampled]",
        "A message that is not to be trained is trained once its transcript has been stored and read again.",
    ),
    Mutant(
        "sampler.top_p_last",
        "composer_jax/sampler/token_sampling.py",
        "(rank_BW <= needed_B[:, None])",
        "(rank_BW < needed_B[:, None])",
        "top_p drops the last token that it needs, also the likeliest one.",
    ),
    Mutant(
        "sampler.verify_position",
        "composer_jax/sampler/decode.py",
        "positions_BS.reshape(-1) + 1,",
        "positions_BS.reshape(-1),",
        "A draft is verified with the random numbers of the token before, so that drafts change what is sampled.",
    ),
    Mutant(
        "sampler.prefix_hold_leaks",
        "composer_jax/sampler/scheduler.py",
        "            if not resumes:\n                tree.release(prefix, n_skipped)\n            return False",
        "            return False",
        "A sequence that finds no room keeps its hold of the prefix, whose pages are never reused.",
    ),
    Mutant(
        "sampler.whole_context_cached",
        "composer_jax/sampler/scheduler.py",
        "tree.match(sequence.tokens[: n - 1])",
        "tree.match(sequence.tokens)",
        "A context of whole pages counts as computed up to its last token, which decoding has to compute.",
    ),
    Mutant(
        "sampler.stale_cache",
        "composer_jax/sampler/engine.py",
        "            self._scheduler.recompute()\n        self.version = version\n",
        "            self.version = version\n        self.version = version\n",
        "After an update new requests continue from cache entries of the old weights.",
    ),
    Mutant(
        "sampler.window_page",
        "composer_jax/sampler/prefix_index.py",
        "max(0, computed - window + 1) // page_size",
        "max(0, computed - window + 2) // page_size",
        "A page is given up one token too early, while the sliding window still reaches into it.",
    ),
    Mutant(
        "sampler.cache_scale",
        "composer_jax/models/cache.py",
        "jnp.maximum(jnp.abs(part).max(-1, keepdims=True) / 127, 1e-30)",
        "jnp.maximum(part.max(-1, keepdims=True) / 127, 1e-30)",
        "The int8 cache takes its scale from the largest number, so that larger negative ones overflow.",
    ),
    Mutant(
        "rewards.gap_to_itself",
        "composer_jax/rl/rewards.py",
        "(other for other in grades if other < grade)",
        "(other for other in grades if other <= grade)",
        "The distance of every grade to the next lower one is zero, so that no episode pays its costs.",
    ),
    Mutant(
        "rewards.zero_grade",
        "composer_jax/rl/rewards.py",
        "grades = {0.0}",
        "grades: set[float] = set()",
        "In a group of solved episodes nothing bounds the costs, so that a solved episode can have a negative reward.",
    ),
    Mutant(
        "rewards.failures_pay",
        "composer_jax/rl/rewards.py",
        "if not config.weight or not episode.reward or episode.advantages is not None:",
        "if not config.weight or episode.advantages is not None:",
        "Unsolved episodes pay for their length, so that giving up early is rewarded.",
    ),
    Mutant(
        "rewards.effort_ignored",
        "composer_jax/rl/rewards.py",
        "weight = config.weight * config.effort.length_factor(episode.effort)",
        "weight = config.weight",
        "The level of effort does not change what length costs.",
    ),
    Mutant(
        "rewards.comment_slope",
        "composer_jax/rl/penalties.py",
        "return max(0.0, ratio - COMMENT_LIMIT) / (1 - COMMENT_LIMIT)",
        "return max(0.0, ratio - COMMENT_LIMIT)",
        "An edit of comments alone has half of the full penalty.",
    ),
    Mutant(
        "episode.sampling_is_timed",
        "composer_jax/agent/episode.py",
        "with self.clock.paused():",
        "with nullcontext():",
        "Sampling uses up the seconds of tools and harness, so that slow sampling ends episodes.",
    ),
    Mutant(
        "episode.reward_without_finish",
        "composer_jax/agent/episode.py",
        'reward = result.reward if outcome == "finished" else 0.0',
        'reward = result.reward if outcome in ("finished", "no_call") else 0.0',
        "An episode that stops without calling finish is rewarded.",
    ),
    Mutant(
        "episode.one_more_segment",
        "composer_jax/agent/episode.py",
        "if self.episode.summaries + 1 == compaction.max_segments:",
        "if self.episode.summaries == compaction.max_segments:",
        "An episode has one branch more than max_segments allows.",
    ),
    Mutant(
        "episode.overlapping_pauses",
        "composer_jax/agent/episode_clock.py",
        "            if not self._pauses:\n                self._resume()",
        "            self._resume()",
        "The clock runs again when the first of several overlapping pauses ends.",
    ),
    Mutant(
        "episode.stale_folders",
        "composer_jax/agent/workspace.py",
        "        self._totals = None\n        self.changes = dict(changes)\n",
        "        self.changes = dict(changes)\n",
        "Tools do not see the folders that a command made after the first listing.",
    ),
    Mutant(
        "sandbox.parent_paths",
        "composer_jax/sandbox/inside/files.py",
        'if inside.startswith("/") or ".." in parts:',
        'if inside.startswith("/"):',
        "A path with .. leads out of the workspace.",
    ),
    Mutant(
        "sandbox.links_followed",
        "composer_jax/sandbox/inside/files.py",
        "_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "_READ = os.O_RDONLY | os.O_NONBLOCK",
        "Reading a file follows a symbolic link out of the workspace.",
    ),
    Mutant(
        "sandbox.place_lost",
        "composer_jax/sandbox/local_pool.py",
        "if turn.done() and not turn.cancelled():",
        "if turn.cancelled():",
        "A caller that is cancelled just after it got a place keeps it, and the next one waits for ever.",
    ),
    Mutant(
        "sandbox.leaked_environment",
        "composer_jax/sandbox/backend.py",
        'environment = {"PATH": ":".join(path), "HOME": "/tmp", **_SAME}',
        'environment = {**os.environ, "PATH": ":".join(path), "HOME": "/tmp", **_SAME}',
        "Commands inside see the variables of the trainer, its keys included.",
    ),
    Mutant(
        "sandbox.archive_limit",
        "composer_jax/sandbox/container_changes.py",
        "                    left -= len(data)\n",
        "",
        "An archive from a container may hold more bytes than the limit.",
    ),
    Mutant(
        "sandbox.changes_after_restore",
        "composer_jax/sandbox/local_sandbox.py",
        'self.plan, self._worker, self._changes, self.jobs = plan, "none", {}, 0',
        'self.plan, self._worker, self.jobs = plan, "none", 0',
        "After restore the changes of the state before are still reported.",
    ),
    Mutant(
        "grading.type_of_value",
        "composer_jax/tasks/grading/judge_cases.py",
        "if type(value) is not type(want):",
        "if not isinstance(value, type(want)):",
        "A submission that returns True passes a case that wants 1.",
    ),
    Mutant(
        "grading.timeout_cached",
        "composer_jax/tasks/grading/cases.py",
        'return _judge(grader, result.outcome, result.stdout), result.outcome in ("ok", "nonzero")',
        "return _judge(grader, result.outcome, result.stdout), True",
        "The grade of a run that hit a limit is kept, although another run may not hit it.",
    ),
    Mutant(
        "grading.broken_tests",
        "composer_jax/tasks/suites/judge.py",
        "if kept < 1.0:",
        "if kept <= 0.0:",
        "A submission that breaks some of the passing tests gets the full reward.",
    ),
    Mutant(
        "grading.skipped_is_repaired",
        "composer_jax/tasks/suites/judge.py",
        '"fail_to_pass": (PASSED, XFAILED),',
        '"fail_to_pass": (PASSED, XFAILED, SKIPPED),',
        "A fail-to-pass test that the submission has skipped counts as repaired.",
    ),
    Mutant(
        "grading.last_status",
        "composer_jax/tasks/grading/log_parsers.py",
        "outcomes[name] = max(outcomes.get(name, PASSED), outcome, key=_BADNESS.index)",
        "outcomes[name] = outcome",
        "A test that the log names twice has its last status, so that printing PASSED hides a failure.",
    ),
    Mutant(
        "tokenizers.spelled_control",
        "composer_jax/data/tokenizer.py",
        "backend.encode_special_tokens = True",
        "backend.encode_special_tokens = False",
        "Text that spells a control token encodes to it, so that a file can end a message.",
    ),
    Mutant(
        "tokenizers.control_ids",
        "composer_jax/data/tokenizer.py",
        "return 0 <= token < len(SPECIAL)",
        "return 0 <= token <= len(SPECIAL)",
        "The first id of text counts as a control token, which what reads a message leaves out.",
    ),
    Mutant(
        "tokenizers.pad_zero",
        "composer_jax/data/model_tokenizer.py",
        'pad = named["pad_token"] if named["pad_token"] is not None else self._eod',
        'pad = named["pad_token"] or self._eod',
        "A padding token with the id 0 counts as missing, and rows are padded with the end of text.",
    ),
    Mutant(
        "tokenizers.ids_with_gaps",
        "composer_jax/data/model_tokenizer.py",
        "self.vocab_size = max(self._known, default=-1) + 1",
        "self.vocab_size = len(self._known)",
        "Where ids have gaps, the largest ones are not below vocab_size.",
    ),
    Mutant(
        "tokenizers.gguf_user_defined",
        "composer_jax/checkpoint/gguf/tokenizer.py",
        "AddedToken(token, special=kind == _CONTROL, normalized=False)",
        "AddedToken(token, special=True, normalized=False)",
        "User-defined tokens of a GGUF file become control tokens, which no text encodes to.",
    ),
    Mutant(
        "checkpoint.published_bias",
        "composer_jax/checkpoint/weight_shards.py",
        'return shards | local_shards({"router_bias": router_bias})',
        'return shards | local_shards({"router_bias": jax.tree.map(lambda a: a.astype(jnp.bfloat16), router_bias)})',
        "The router bias is published in bfloat16, so that the sampler chooses other experts.",
    ),
    Mutant(
        "checkpoint.long_gap",
        "composer_jax/checkpoint/weight_patch.py",
        "long_gaps = gaps[gaps >= ESCAPE]",
        "long_gaps = gaps[gaps > ESCAPE]",
        "A patch with a gap of exactly 65,535 unchanged elements cannot be read.",
    ),
    Mutant(
        "checkpoint.half_patch",
        "composer_jax/checkpoint/weight_chain.py",
        "for array, data in reversed(undo):",
        "for array, data in undo[:0]:",
        "A damaged patch leaves arrays of two versions.",
    ),
    Mutant(
        "checkpoint.mxfp4_halves",
        "composer_jax/checkpoint/huggingface/quantized.py",
        "_E2M1[blocks & 15], _E2M1[blocks >> 4]",
        "_E2M1[blocks >> 4], _E2M1[blocks & 15]",
        "The two weights of a byte of an mxfp4 tensor change places.",
    ),
    Mutant(
        "checkpoint.first_stage",
        "composer_jax/checkpoint/checkpoint.py",
        "done = [stage for stage in reversed(stages) if",
        "done = [stage for stage in stages if",
        "A run's address gives the weights of its first finished stage instead of its last.",
    ),
)
"""By area; each can be applied by itself."""
